"""Which way of sharing weights a run or an address file stands for, and a share by it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from rolloutmq.bus import segments
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.sharing import SegmentGoneError
from rolloutmq.trainer.weights import address
from rolloutmq.trainer.weights.cuda_ipc import CudaShare
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.sender import Sender
from rolloutmq.trainer.weights.share import SharedWeights
from rolloutmq.trainer.weights.tokenizer import directory_fingerprint


@contextmanager
def owned(
    policy: nn.Module, config: RunConfig, layout: RunLayout, version: PolicyVersion
) -> Iterator[WeightShare | DiskShare | Sender]:
    """Share a trainer's weights in the way of its run.

    After an orderly end nothing of it is left; after a failure it stays, and the next life goes on from it.
    """
    tokenizer, backend = directory_fingerprint(layout.model), config.weights.backend
    share: WeightShare | DiskShare | Sender
    # What a dead trainer left there in another way has no heir.
    if backend == "disk":
        segments.sweep(layout.weights)
        address.sweep_sent(layout.weights)  # published files stay good until there is a newer version
        share = DiskShare.create(policy, layout.weights, version=version, tokenizer=tokenizer)
    elif backend == "vllm_http":
        segments.sweep(layout.weights)
        share = Sender.create(policy, layout.weights, layout.vllm, version=version, tokenizer=tokenizer)
    elif backend == "cuda_ipc":
        address.sweep(layout.weights)
        share = CudaShare.create_or_adopt(policy, layout.weights, version=version, tokenizer=tokenizer)
    else:
        address.sweep(layout.weights)
        fused = config.inference.kind == "vllm"  # the only one that has tensors of its own shapes
        share = WeightShare.create_or_adopt(
            policy, layout.weights, version=version, fused=fused, tokenizer=tokenizer
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
    """Attach a model as a reader of a run does, in the way that the run names; see `SharedWeights.attach`.

    Raises:
        ConfigError: Nobody reads weights in that way.
        SegmentGoneError: The address file is not there yet, or is that of another way.
    """
    match backend:
        case "posix_shm":
            return WeightShare.attach(model, address_file, tokenizer=tokenizer)
        case "disk":
            return DiskShare.attach(model, address_file, tokenizer=tokenizer)
        case _:
            raise ConfigError("weights.backend", f"`{backend}` has no readers")


def backend_of(address_file: Path) -> type[SharedWeights]:
    """Return the backend whose address a file holds.

    Raises:
        SegmentGoneError: There is none, or it is no address.
    """
    if address.read_disk(address_file) is not None:
        return DiskShare
    found = segments.read_address(address_file)
    if found is None:
        raise SegmentGoneError(str(address_file), "no address was published yet")
    return CudaShare if found.path.endswith(f"-{CudaShare.KIND}") else WeightShare


def attach(model: nn.Module, address_file: Path, *, tokenizer: str = "") -> SharedWeights:
    """Attach a model by whatever way the owner shares; see `SharedWeights.attach`."""
    return backend_of(address_file).attach(model, address_file, tokenizer=tokenizer)
