"""Checkpoints: `step-000050/` holds everything a trainer needs to continue exactly where it was.

    model.safetensors      the policy's weights, each storage once; with the copied config.json and tokenizer the
                           directory is a model for transformers; or instead of it
    adapter_model.safetensors, adapter_config.json   LoRA adapters in peft's format, if only adapters are trained
    optimizer.safetensors  moments, master weights, torch's random state
    state.json             step, incarnation, unsettled groups, digest of the adapters' base weights; sizes and
                           checksums of the other files, and its own checksum

A checkpoint is written to a hidden directory, synced and renamed: it is complete or absent. A checkpoint that was
damaged later (size, header or checksum) is skipped in favour of the one before. Skipped steps are void: the trainer
that continues from the earlier checkpoint takes them again, with another result. So the newest checkpoint is that of
the highest incarnation, and within it that of the highest step. Void checkpoints are removed once a checkpoint of the
current incarnation is on disk. The counter of incarnations lies beside the checkpoints; it grows with each start of the
trainer, and is on disk before that trainer changes a weight. `files.checkpoints` reads what needs no torch.
"""

import logging
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

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.bus.files import (
    PRIVATE_DIRECTORY,
    copy_private,
    force,
    make_private,
    read_regular,
    sum_of,
    write_private,
)
from rolloutmq.bus.tokenizer_fingerprint import fingerprint as in_directory
from rolloutmq.schemas.errors import ConfigError, DamagedFileError
from rolloutmq.trainer.files.checkpoints import (
    PREFIX,
    STATE,
    UNKNOWN,
    UNREADABLE,
    TrainerState,
    check_sizes,
    check_sums,
    incarnation_of,
    saved,
    state_of,
    step_of,
)
from rolloutmq.trainer.policy.adapters import ADAPTERS, Adapters
from rolloutmq.trainer.step.optimizer import PolicyOptimizer
from rolloutmq.trainer.weights.manifest import named_tensors

logger = logging.getLogger(__name__)

WEIGHTS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
INCARNATIONS: Final = "incarnation"
_UNREADABLE: Final = (*UNREADABLE, SafetensorError)
"""Errors of reading a damaged checkpoint."""
_RANDOM: Final = "random_state"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in memory. Its tensors map its files; a removed file keeps its disk space while mapped."""

    path: Path
    state: TrainerState
    weights: dict[str, Tensor]
    adapters: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def next_incarnation(directory: Path) -> int:
    """Reserve the next incarnation, from 0, and return it once it is on disk.

    It is above the incarnations of all checkpoints, even if these were copied here without the counter.

    Raises:
        DamagedFileError: The counter is not a number, so an incarnation could be used twice.
    """
    directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    path = directory / INCARNATIONS
    number = 1 + max(_counted(path), *map(incarnation_of, saved(directory)), UNKNOWN)
    partial = directory / f".{INCARNATIONS}.partial"
    write_private(partial, b"%d\n" % number)
    force(partial)
    partial.replace(path)
    force(directory)
    return number


def _counted(path: Path) -> int:
    try:
        return int(read_regular(path))
    except FileNotFoundError:
        return UNKNOWN
    except ValueError:
        problem = "must be a number; write the largest incarnation in trained.jsonl there"
        raise DamagedFileError(str(path), 1, problem) from None


def save(
    directory: Path,
    identity: Path,
    state: TrainerState,
    policy: nn.Module | Mapping[str, Tensor],
    optimizer: PolicyOptimizer,
    adapters: Adapters | None = None,
) -> Path:
    """Write a checkpoint and return its path once it is on disk. Blocks while the disk writes.

    Args:
        directory: Directory of the checkpoints.
        identity: Directory with the policy's configuration and tokenizer.
        state: Further state; sizes and checksums are filled in here.
        policy: The policy, or its tensors by name if it is sharded. Must not change meanwhile.
        optimizer: The optimizer. Must not change meanwhile.
        adapters: Adapters to save instead of the policy, if only they are trained.
    """
    final = directory / f"{PREFIX}{state.version.step:06d}"
    with _becoming(final) as partial:
        for file in identity.iterdir():
            if file.is_file() and not file.name.startswith("."):
                copy_private(file, partial / file.name)
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
    """Write the state, with sizes and checksums of the files beside it."""
    files = list(path.iterdir())
    sizes = {file.name: file.stat().st_size for file in files}
    state = msgspec.structs.replace(
        state, sizes=sizes, sums={file.name: sum_of(file) for file in files}, own=0
    )
    own = checksum([msgspec.json.encode(state)])
    write_private(path / STATE, msgspec.json.encode(msgspec.structs.replace(state, own=own)))


@contextmanager
def _becoming(final: Path) -> Iterator[Path]:
    """Yield an empty directory that durably replaces `final` if the block ends without an error."""
    partial = final.with_name(f".{final.name}.partial")
    for left in final.parent.glob(f".{PREFIX}*"):  # left by a killed trainer; frees its disk space
        shutil.rmtree(left, ignore_errors=True)
    final.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    partial.mkdir(mode=PRIVATE_DIRECTORY)
    try:
        yield partial
        for file in partial.iterdir():
            make_private(file)
            force(file)
        force(partial)
        shutil.rmtree(final, ignore_errors=True)  # of an earlier incarnation, whose later steps are void
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    force(final.parent)


def own_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return the policy's tensors by name; a tied one under its first name only."""
    once: dict[int, str] = {}
    tensors = dict(named_tensors(policy))
    for name, tensor in tensors.items():
        once.setdefault(id(tensor), name)
    return {name: tensors[name].detach() for name in once.values()}


def latest(directory: Path) -> Checkpoint | None:
    """Read the newest valid checkpoint; None if there is none."""
    for path in reversed(saved(directory)):
        try:
            return _read(path)
        except _UNREADABLE as error:
            logger.warning("checkpoint skipped path=%s reason=%s", path, error)
    return None


def _read(path: Path) -> Checkpoint:
    state = state_of(path)
    check_sizes(path, state)
    check_sums(path, state)
    return Checkpoint(
        path=path,
        state=state,
        weights=load_file(path / WEIGHTS) if WEIGHTS in state.sizes else {},
        adapters=load_file(path / ADAPTERS) if ADAPTERS in state.sizes else {},
        optimizer=load_file(path / OPTIMIZER),
    )


def restore_policy(checkpoint: Checkpoint, policy: nn.Module) -> None:
    """Copy the saved weights into a policy built from the same configuration.

    Raises:
        ConfigError: The configuration describes another policy than the saved one.
    """
    if checkpoint.adapters:
        raise ConfigError("trainer.lora", f"is required: the checkpoint {checkpoint.path} has adapters only")
    mine, saved_ones = own_tensors(policy), checkpoint.weights
    if {n: (t.shape, t.dtype) for n, t in mine.items()} != {
        n: (t.shape, t.dtype) for n, t in saved_ones.items()
    }:
        raise ConfigError(
            "model",
            f"does not fit the checkpoint {checkpoint.path}: names, shapes or types of tensors differ",
        )
    for name, tensor in mine.items():
        tensor.copy_(saved_ones[name])


def require_tokenizer(checkpoint: Checkpoint, configured: str) -> None:
    """Check that the configured tokenizer is the one of the saved policy, if both have one.

    Args:
        checkpoint: The checkpoint.
        configured: Fingerprint of the configured tokenizer; empty if there is none.

    Raises:
        ConfigError: Its tokens would mean something else to the saved policy.
    """
    saved = in_directory(checkpoint.path)
    if saved and configured and saved != configured:
        raise ConfigError(
            "model",
            f"has another tokenizer than the checkpoint {checkpoint.path} (got fingerprint {configured[:16]}, saved "
            f"{saved[:16]}), so its tokens would mean something else; use the alphabet or tokenizer of the checkpoint",
        )


def random_state(checkpoint: Checkpoint) -> Tensor:
    """Return the saved state of torch's random generator."""
    return checkpoint.optimizer[_RANDOM]


def prune(written: Path, keep: int, *, began: int, proven: set[Path]) -> None:
    """Remove checkpoints that no trainer would continue from, after one was written; never that one.

    The newest `keep` valid ones stay, including `written`. Damaged and void ones are removed. A checkpoint that cannot
    be removed is logged and stays until the next time.

    Args:
        written: The newest checkpoint.
        keep: How many may stay.
        began: Step from which this incarnation continued: later steps of earlier incarnations are void.
        proven: Checkpoints this incarnation knows to be valid; extended here. Only others are read, as few as needed
            and each once, because reading all of them takes as long as writing them.
    """
    life, step = incarnation_of(written), step_of(written)
    proven.add(written)
    others = [path for path in saved(written.parent) if path != written]
    before = (
        path
        for path in reversed(others)
        if step_of(path) < step and (step_of(path) <= began or incarnation_of(path) == life)
    )
    kept = set(islice((path for path in before if _is_whole(path, proven)), keep - 1))
    for path in others:
        if path not in kept:
            _remove(path)


def _is_whole(path: Path, proven: set[Path]) -> bool:
    """Return whether all files are as written; of known checkpoints only the sizes are checked."""
    try:
        state = state_of(path)
        check_sizes(path, state)
        if path not in proven:
            check_sums(path, state)
    except _UNREADABLE:
        return False
    proven.add(path)
    return True


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("checkpoint not removed path=%s error=%s", path, error)
