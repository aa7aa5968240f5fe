"""Checkpoints: `step-000050/` with everything that a trainer needs to go on as if it had never stopped.

    model.safetensors      the policy's weights, each storage once; with config.json and the tokenizer, which are
                           copied in, the directory is a model that transformers loads; or instead of it
    adapter_model.safetensors, adapter_config.json   LoRA, as peft loads it, where only adapters learn
    optimizer.safetensors  moments, master weights, torch's random state
    state.json             step, incarnation, groups of an open account, digest of the weights that adapters belong
                           to; sizes and checksums of the other files, and its own checksum

A checkpoint is written into a hidden directory, forced to disk and renamed: it is there whole or not at all. One that
was damaged later (a size, a header or a checksum does not fit) is passed over for the one before. Steps that were
passed over are void: the life that goes on from the one before takes them again, otherwise. So the newest checkpoint is
that of the youngest life, and within a life that of the highest step; what is void goes once a checkpoint of that life
is on disk, and if the trainer dies in between, it is no newer than that. The counter of incarnations lies beside the
checkpoints: it grows with each life of the trainer, and is on disk before that life touches a weight.
"""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rolloutmq.bus.codec import checksum
from rolloutmq.bus.durability import force, sum_of
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import ConfigError, DamagedFileError
from rolloutmq.trainer.adapters import ADAPTERS, Adapters
from rolloutmq.trainer.optimizer import PolicyOptimizer
from rolloutmq.trainer.weights.manifest import named_tensors

logger = logging.getLogger(__name__)

WEIGHTS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
STATE: Final = "state.json"
INCARNATIONS: Final = "incarnation"
PREFIX: Final = "step-"
_NAME: Final = re.compile(rf"{PREFIX}(\d+)")
_UNREADABLE: Final = (OSError, msgspec.MsgspecError, SafetensorError, ValueError)
"""What comes of reading a damaged checkpoint."""
_UNKNOWN: Final = -1
"""Incarnation of a checkpoint whose state cannot be read."""
_RANDOM: Final = "random_state"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`.

    Attributes:
        version: The policy that the weights are.
        unsettled: Groups that were learned from, but whose lease was lost before the broker was told. They come
            again, and are then settled without being learned from a second time.
        base: Digest of the frozen weights that the adapters belong to, if there are adapters.
        alpha: Their scale, before it is divided by their rank.
        sizes: Bytes of the other files, by name.
        sums: CRC32C of the other files, by name; empty if it was written before there were any.
        own: CRC32C of this file, with 0 in this place.
    """

    version: PolicyVersion
    unsettled: tuple[str, ...] = ()
    base: str = ""
    alpha: float = 0.0
    sizes: dict[str, int] = {}
    sums: dict[str, int] = {}
    own: int = 0


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was read. Its tensors are its files, mapped: removed ones keep their room for as long."""

    path: Path
    state: TrainerState
    weights: dict[str, Tensor]
    adapters: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def next_incarnation(directory: Path) -> int:
    """Begin a new life: return its number, from 0, once that number is on disk and can never be given again.

    It is above those of all checkpoints, also where these were brought here without the counter.

    Raises:
        DamagedFileError: The counter is no number: a life that was given before could be given again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / INCARNATIONS
    number = 1 + max(_counted(path), *map(_incarnation, saved(directory)), _UNKNOWN)
    partial = directory / f".{INCARNATIONS}.partial"
    partial.write_text(f"{number}\n")
    force(partial)
    partial.replace(path)
    force(directory)
    return number


def _counted(path: Path) -> int:
    try:
        return int(path.read_bytes())
    except FileNotFoundError:
        return _UNKNOWN
    except ValueError:
        problem = "is no number; write there the largest incarnation in trained.jsonl"
        raise DamagedFileError(str(path), 1, problem) from None


def save(
    directory: Path,
    identity: Path,
    state: TrainerState,
    policy: nn.Module | Mapping[str, Tensor],
    optimizer: PolicyOptimizer,
    adapters: Adapters | None = None,
) -> Path:
    """Write a checkpoint and return its path once it is on disk. Blocks for as long as the disk takes.

    Args:
        directory: Where the checkpoints are.
        identity: Directory with the policy's configuration and tokenizer.
        state: What else to remember; sizes and checksums are filled in here.
        policy: Its weights must not change meanwhile. By name, where the policy itself is in shards.
        optimizer: The same.
        adapters: What is saved in place of the policy, if only they learn.
    """
    final = directory / f"{PREFIX}{state.version.step:06d}"
    with _becoming(final) as partial:
        for file in identity.iterdir():
            if file.is_file() and not file.name.startswith("."):
                shutil.copyfile(file, partial / file.name)
        if adapters is None:
            weights = own_tensors(policy) if isinstance(policy, nn.Module) else dict(policy)
            save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        else:
            adapters.save(partial)
            state = msgspec.structs.replace(state, base=adapters.base_digest, alpha=adapters.alpha)
        extra = {_RANDOM: torch.get_rng_state()}
        save_file({**optimizer.state(), **extra}, partial / OPTIMIZER)
        _seal(partial, state)
    return final


def _seal(path: Path, state: TrainerState) -> None:
    """Write the state, with what the files beside it are to be found as."""
    files = list(path.iterdir())
    sizes = {file.name: file.stat().st_size for file in files}
    state = msgspec.structs.replace(
        state, sizes=sizes, sums={file.name: sum_of(file) for file in files}, own=0
    )
    own = checksum([msgspec.json.encode(state)])
    (path / STATE).write_bytes(msgspec.json.encode(msgspec.structs.replace(state, own=own)))


@contextmanager
def _becoming(final: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `final`, durably, when the block ends without an error."""
    partial = final.with_name(f".{final.name}.partial")
    for left in final.parent.glob(f".{PREFIX}*"):  # of a trainer that was killed: this one needs the room
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            force(file)
        force(partial)
        shutil.rmtree(final, ignore_errors=True)  # of an earlier life, whose later steps are void
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    force(final.parent)


def own_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return the policy's own tensors by name; a tied one has its first name only."""
    once: dict[int, str] = {}
    tensors = dict(named_tensors(policy))
    for name, tensor in tensors.items():
        once.setdefault(id(tensor), name)
    return {name: tensors[name].detach() for name in once.values()}


def latest(directory: Path) -> Checkpoint | None:
    """Read the newest whole checkpoint, or return None if there is none."""
    for path in reversed(saved(directory)):
        try:
            return _read(path)
        except _UNREADABLE as error:
            logger.warning("checkpoint passed over path=%s reason=%s", path, error)
    return None


def saved(directory: Path) -> list[Path]:
    """List the checkpoints, oldest first: by life, then by step. Those whose life cannot be read come last."""
    return sorted((path for path in directory.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)), key=_age)


def _age(path: Path) -> tuple[bool, int, int]:
    """Return what is larger of a newer checkpoint, or of one that may be newer: it is tried, and told of, first."""
    incarnation = _incarnation(path)
    return incarnation == _UNKNOWN, incarnation, _step(path)


def _incarnation(path: Path) -> int:
    """Return the life that wrote a checkpoint."""
    try:
        return _state(path).version.incarnation
    except _UNREADABLE:
        return _UNKNOWN


def _step(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found
    return int(found[1])


def _state(path: Path) -> TrainerState:
    data = (path / STATE).read_bytes()
    state = msgspec.json.decode(data, type=TrainerState)
    if (state.sums or state.own) and state.own != checksum(
        [data.replace(b'"own":%d' % state.own, b'"own":0')]
    ):
        raise ValueError(f"{STATE} is not as it was written")
    return state


def _check_sizes(path: Path, state: TrainerState) -> None:
    for name, size in state.sizes.items():
        if (found := (path / name).stat().st_size) != size:
            raise ValueError(f"{name} has {found} bytes, was written with {size}")


def _check_sums(path: Path, state: TrainerState) -> None:
    for name, known in state.sums.items():
        if sum_of(path / name) != known:
            raise ValueError(f"{name} is not as it was written")


def _read(path: Path) -> Checkpoint:
    state = _state(path)
    _check_sizes(path, state)
    _check_sums(path, state)
    return Checkpoint(
        path=path,
        state=state,
        weights=load_file(path / WEIGHTS) if WEIGHTS in state.sizes else {},
        adapters=load_file(path / ADAPTERS) if ADAPTERS in state.sizes else {},
        optimizer=load_file(path / OPTIMIZER),
    )


def restore_policy(checkpoint: Checkpoint, policy: nn.Module) -> None:
    """Put the saved weights into a policy that was built from the same configuration.

    Raises:
        ConfigError: The configuration describes another policy than the one that was saved.
    """
    if checkpoint.adapters:
        raise ConfigError("trainer.lora", f"is missing: the checkpoint {checkpoint.path} has adapters alone")
    mine, saved_ones = own_tensors(policy), checkpoint.weights
    if {n: (t.shape, t.dtype) for n, t in mine.items()} != {
        n: (t.shape, t.dtype) for n, t in saved_ones.items()
    }:
        raise ConfigError("model", f"is another policy than that of the checkpoint {checkpoint.path}")
    for name, tensor in mine.items():
        tensor.copy_(saved_ones[name])


def random_state(checkpoint: Checkpoint) -> Tensor:
    """Return the state of torch's random numbers at the time of the checkpoint."""
    return checkpoint.optimizer[_RANDOM]


def prune(written: Path, keep: int, *, began: int, proven: set[Path]) -> None:
    """Remove what nobody would go on from, now that a checkpoint was written; never that one.

    There remain the newest `keep` whole ones, `written` included. Damaged ones go, and those that are void. What cannot
    be removed stays until the next time, with a line in the log.

    Args:
        written: The newest.
        keep: How many may remain.
        began: Step from which this life went on: what earlier lives have beyond it is void.
        proven: What this life has read or written, and so knows to be whole. Only others are read here, as few as
            will do and each once, and added: to read all of them each time would take as long as to write them.
    """
    life, step = _incarnation(written), _step(written)
    proven.add(written)
    others = [path for path in saved(written.parent) if path != written]
    before = (
        path
        for path in reversed(others)
        if _step(path) < step and (_step(path) <= began or _incarnation(path) == life)
    )
    kept = set(islice((path for path in before if _is_whole(path, proven)), keep - 1))
    for path in others:
        if path not in kept:
            _remove(path)


def _is_whole(path: Path, proven: set[Path]) -> bool:
    """Tell whether all files are there as they were written; of what is proven only the sizes are looked at."""
    try:
        state = _state(path)
        _check_sizes(path, state)
        if path not in proven:
            _check_sums(path, state)
    except _UNREADABLE:
        return False
    proven.add(path)
    return True


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("checkpoint not removed path=%s error=%s", path, error)
