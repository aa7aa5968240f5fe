"""Which way of sharing an address file stands for, and a share by it."""

from pathlib import Path

from torch import nn

from rolloutmq.bus import segments
from rolloutmq.schemas.sharing import SegmentGoneError
from rolloutmq.trainer.weights import versions
from rolloutmq.trainer.weights.cuda_ipc import CudaShare
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.share import SharedWeights


def backend_of(address_file: Path) -> type[SharedWeights]:
    """Return the backend whose address a file holds.

    Raises:
        SegmentGoneError: There is none, or it is no address.
    """
    if versions.read_address(address_file) is not None:
        return DiskShare
    address = segments.read_address(address_file)
    if address is None:
        raise SegmentGoneError(str(address_file), "no address was published yet")
    return CudaShare if address.path.endswith(f"-{CudaShare.KIND}") else WeightShare


def attach(model: nn.Module, address_file: Path, *, tokenizer: str = "") -> SharedWeights:
    """Attach a model by whatever way the owner shares; see `SharedWeights.attach`."""
    return backend_of(address_file).attach(model, address_file, tokenizer=tokenizer)
