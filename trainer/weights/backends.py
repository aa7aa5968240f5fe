"""Backend of the shared weights, chosen by a run or by an address file."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import nn

from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, SegmentGoneError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights import address
from rolloutmq.trainer.weights.cuda_ipc import CudaShare, share_kind
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.manifest import named_tensors
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.share import SharedWeights, Source
from rolloutmq.trainer.weights.vllm_http import VllmSender


@contextmanager
def owned(
    policy: nn.Module,
    config: RunConfig,
    layout: RunLayout,
    version: PolicyVersion,
    source: Source | None = None,
) -> Iterator[WeightShare | DiskShare | VllmSender]:
    """Share a trainer's weights with the backend of its run.

    An orderly end removes everything. After a failure it stays, and the next trainer takes it over.

    Args:
        policy: Its weights are shared.
        source: Tensors to share instead of the policy's, see `Source`; not with `cuda_ipc`.
    """
    tokenizer, backend = directory_fingerprint(layout.model), config.weights.backend
    fused = config.inference.kind == "vllm"  # the only server with fused tensors
    share: WeightShare | DiskShare | VllmSender
    # Nobody takes over what a dead trainer left with another backend.
    if backend == "disk":
        segment_file.sweep(layout.weights)
        address.sweep_sent(layout.weights)  # published versions stay valid until there is a newer one
        share = DiskShare.create(policy, layout.weights, version=version, tokenizer=tokenizer, source=source)
    elif backend == "vllm_http":
        segment_file.sweep(layout.weights)
        share = VllmSender.create(
            policy, layout.weights, layout.vllm, version=version, tokenizer=tokenizer, source=source
        )
    elif backend == "cuda_ipc":
        if source is not None:
            problem = "shares the trainer's own tensors (got a source); use posix_shm, disk or vllm_http"
            raise ConfigError("weights.backend", f"cuda_ipc {problem}")
        address.sweep(layout.weights)
        share = CudaShare.create_or_adopt(
            policy, layout.weights, version=version, fused=fused, tokenizer=tokenizer
        )
    else:
        address.sweep(layout.weights)
        if backend == "stream" and source is None and next(policy.parameters()).device.type != "cpu":
            source = partial(
                named_tensors, policy
            )  # relays and engines of this host read a copy in its memory
        share = WeightShare.create_or_adopt(
            policy, layout.weights, version=version, fused=fused, tokenizer=tokenizer, source=source
        )
    orderly = False
    try:
        yield share
        orderly = True
    finally:
        share.close(unlink=orderly)


def attach_as(
    backend: str, model: nn.Module, address_file: Path, *, tokenizer: str = ""
) -> WeightShare | DiskShare:
    """Attach a model as a reader with the backend that the run names; see `SharedWeights.attach`.

    Raises:
        ConfigError: The backend has no readers.
        SegmentGoneError: The address file is not there yet, or belongs to another backend.
    """
    match backend:
        case "posix_shm" | "stream":
            return WeightShare.attach(model, address_file, tokenizer=tokenizer)
        case "disk":
            return DiskShare.attach(model, address_file, tokenizer=tokenizer)
        case _:
            raise ConfigError("weights.backend", f"no server can attach to `{backend}`")


def backend_of(address_file: Path) -> type[SharedWeights]:
    """Return the backend of an address file.

    Raises:
        SegmentGoneError: There is none, or it is not an address.
    """
    if address.read_disk(address_file) is not None:
        return DiskShare
    if segment_file.read_address(address_file) is None:
        raise SegmentGoneError(str(address_file), "no address has been published yet")
    return share_kind(address_file)


def attach(model: nn.Module, address_file: Path, *, tokenizer: str = "") -> SharedWeights:
    """Attach a model with the backend of the owner; see `SharedWeights.attach`."""
    return backend_of(address_file).attach(model, address_file, tokenizer=tokenizer)
