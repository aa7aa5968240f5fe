"""Checkpoints as files: their order, their state and whether they are whole. Reads them without torch."""

import re
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.bus.files import decode_json, read_regular, sum_of
from rolloutmq.schemas.wire.envelope import PolicyVersion

STATE: Final = "state.json"
PREFIX: Final = "step-"
_NAME: Final = re.compile(rf"{PREFIX}(\d+)")
UNREADABLE: Final = (OSError, msgspec.MsgspecError, ValueError)
"""Errors of reading the files of a damaged checkpoint."""
UNKNOWN: Final = -1
"""Incarnation of a checkpoint whose state cannot be read."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`.

    Attributes:
        version: Policy version of the weights.
        unsettled: Groups that were trained on, but whose lease was lost before the broker heard. They are redelivered,
            and then settled without being trained on again.
        base: Digest of the frozen base weights of the adapters, if there are adapters.
        alpha: Scale of the adapters, before division by their rank.
        sizes: Bytes of the other files, by name.
        sums: CRC-32C of the other files, by name; empty in old checkpoints without checksums.
        own: CRC-32C of this file, computed with 0 in this field.
    """

    version: PolicyVersion
    unsettled: tuple[str, ...] = ()
    base: str = ""
    alpha: float = 0.0
    sizes: dict[str, int] = {}
    sums: dict[str, int] = {}
    own: int = 0


def newest_whole(directory: Path) -> Path | None:
    """Return the newest checkpoint whose files are as they were written; None if there is none."""
    return next((path for path in reversed(saved(directory)) if is_whole(path)), None)


def is_whole(path: Path) -> bool:
    """Return whether the files of a checkpoint are as they were written. Reads all of them."""
    try:
        state = state_of(path)
        check_sizes(path, state)
        check_sums(path, state)
    except UNREADABLE:
        return False
    return True


def saved(directory: Path) -> list[Path]:
    """List the checkpoints, oldest first: by incarnation, then step. Unreadable ones come last."""
    return sorted((path for path in directory.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)), key=_age)


def _age(path: Path) -> tuple[bool, int, int]:
    """Return a sort key, larger for newer checkpoints; unknown incarnations are largest, so that they are tried
    first.
    """
    incarnation = incarnation_of(path)
    return incarnation == UNKNOWN, incarnation, step_of(path)


def incarnation_of(path: Path) -> int:
    """Return the incarnation that wrote a checkpoint."""
    try:
        return state_of(path).version.incarnation
    except UNREADABLE:
        return UNKNOWN


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    found = _NAME.fullmatch(path.name)
    assert found
    return int(found[1])


def state_of(path: Path) -> TrainerState:
    """Return the state of a checkpoint; one of `UNREADABLE` if it is damaged."""
    data = read_regular(path / STATE)
    state = decode_json(data, TrainerState)
    if (state.sums or state.own) and state.own != checksum(
        [data.replace(b'"own":%d' % state.own, b'"own":0')]
    ):
        raise ValueError(f"{STATE} does not match its checksum")
    return state


def check_sizes(path: Path, state: TrainerState) -> None:
    """Raise one of `UNREADABLE` if a file has another size than was written."""
    for name, size in state.sizes.items():
        if (found := (path / name).stat().st_size) != size:
            raise ValueError(f"{name} has {found} bytes, {size} were written")


def check_sums(path: Path, state: TrainerState) -> None:
    """Raise one of `UNREADABLE` if the contents of a file are not those that were written."""
    for name, known in state.sums.items():
        if sum_of(path / name) != known:
            raise ValueError(f"{name} does not match its checksum")
