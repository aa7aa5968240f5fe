"""GPUs in the control plane: an operator's orders, and cordons.

Every message identifies a GPU by its UUID, because its index changes with resets, reboots and CUDA_VISIBLE_DEVICES.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count, Message, Seconds

GpuId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9/-]{0,95}\Z")]
"""UUID of a GPU, as NVML reports it; or `NODE_PREFIX` and the id of a node of the cluster that runs the workers."""
NODE_PREFIX: Final = "node/"
Reason = Annotated[str, Meta(max_length=200)]


class Cause(StrEnum):
    """Reason of a cordon. A cordoned GPU takes no new workers."""

    MANUAL = "manual"
    HEAT = "heat"
    LOST = "lost"
    """The driver cannot reach it any more."""
    RECOVERY = "recovery"
    """The driver requires a reset, a drain or a reboot."""
    ECC = "ecc"
    """Uncorrected memory errors since its first sample in this run."""
    REMAP = "remap"
    """A memory row failed and could not be replaced."""
    XID = "xid"
    """A driver error after which the GPU is unreliable."""


FATAL: Final = frozenset({Cause.LOST, Cause.RECOVERY, Cause.ECC, Cause.REMAP, Cause.XID})
"""With these its workers must go, too."""


class CordonGpu(Message, tag="cordon_gpu", frozen=True, kw_only=True):
    """Put no new workers on a GPU until `UncordonGpu`. Its present workers stay; those of a node are drained."""

    gpu: GpuId
    reason: Reason = "asked"


class UncordonGpu(Message, tag="uncordon_gpu", frozen=True, kw_only=True):
    """Allow new workers on a cordoned GPU or node. The event that caused the cordon is ignored from now on."""

    gpu: GpuId


class GpuOrdered(Message, tag="gpu_ordered", frozen=True, kw_only=True):
    """The order is stored and survives a restart; `order` is its number, which `GpuStanding` repeats once done."""

    order: Count


class GpuOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The last order of an operator for one GPU.

    Attributes:
        number: Grows with each order of the run.
        cordoned: Whether the GPU is to be cordoned.
        reason: Reason that the operator gave.
    """

    number: Count
    cordoned: bool
    reason: Reason = ""


class GpuStanding(Message, tag="gpu_standing", frozen=True, kw_only=True):
    """The orchestrator's state of one GPU; published on `telemetry.fleet.<uuid>` at each change and at intervals.

    Attributes:
        causes: Causes of its cordon; empty if it is in use.
        reason: Text of the causes, or the reason why it is in use despite a problem.
        since: Start of the cordon.
        draining: Its workers are being drained too.
        holders: Workers on it.
        promised_bytes: Memory reserved for workers that are still loading.
        ghost_bytes: Used memory that belongs to no worker of this run.
        order: Number of the last executed order.
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
