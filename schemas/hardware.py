"""GPUs as the control plane knows them: what an operator orders, and why one takes no new workers.

A GPU is its UUID everywhere. Its index changes with a reset, with a reboot and with CUDA_VISIBLE_DEVICES.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rolloutmq.schemas.envelope import Count, Seconds
from rolloutmq.schemas.message import Message

GpuId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9/-]{0,95}\Z")]
"""UUID of a GPU, as NVML gives it."""
Reason = Annotated[str, Meta(max_length=200)]


class Cause(StrEnum):
    """Why a GPU is cordoned: it takes no new workers."""

    MANUAL = "manual"
    HEAT = "heat"
    LOST = "lost"
    """The driver does not reach it any more."""
    RECOVERY = "recovery"
    """The driver says that it must be reset, drained or rebooted."""
    ECC = "ecc"
    """Memory errors that could not be corrected, since the driver was loaded."""
    REMAP = "remap"
    """A row of its memory that failed and could not be replaced."""
    XID = "xid"
    """An error of the driver's list after which nothing on the GPU can be relied on."""


FATAL: Final = frozenset({Cause.LOST, Cause.RECOVERY, Cause.ECC, Cause.REMAP, Cause.XID})
"""With these its workers must go, too."""


class CordonGpu(Message, tag="cordon_gpu", frozen=True, kw_only=True):
    """Put no new workers on a GPU until `UncordonGpu`. Those that are on it stay."""

    gpu: GpuId
    reason: Reason = "asked"


class UncordonGpu(Message, tag="uncordon_gpu", frozen=True, kw_only=True):
    """Use a GPU again, whatever it was cordoned for; the same event does not cordon it a second time."""

    gpu: GpuId


class GpuOrdered(Message, tag="gpu_ordered", frozen=True, kw_only=True):
    """The order is kept, also over a restart; `order` is its number, by which its execution is known."""

    order: Count


class GpuOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator last asked for with one GPU.

    Attributes:
        number: Grows with each order of the run.
        cordoned: Whether new workers are to be kept off it.
    """

    number: Count
    cordoned: bool
    reason: Reason = ""


class GpuStanding(Message, tag="gpu_standing", frozen=True, kw_only=True):
    """How the orchestrator treats one GPU; published on `telemetry.fleet.<uuid>` at each change and now and then.

    Attributes:
        causes: Why it is cordoned; none if it is in use.
        reason: The same for people, or why it is in use although something is wrong.
        since: When it was cordoned.
        draining: Its workers are being drained, too.
        holders: Workers that have it.
        promised_bytes: Memory that is kept for workers that still load.
        ghost_bytes: Memory in use that no worker of this run can have any more.
        order: Number of the last order that was carried out.
    """

    uuid: GpuId
    host: str
    name: str
    at: Seconds
    causes: tuple[Cause, ...] = ()
    reason: str = ""
    since: Seconds = 0.0
    draining: bool = False
    holders: tuple[str, ...] = ()
    promised_bytes: Count = 0
    ghost_bytes: Count = 0
    order: Count = 0

    @property
    def cordoned(self) -> bool:
        """Whether it takes no new workers."""
        return bool(self.causes)
