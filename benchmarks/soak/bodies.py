"""Groups whose id tells their contents, so any process can check whether a group is whole.

An id is `<producer>.<life>-<number>`. Its checksum selects the shape and the place in a block of random values: most
groups have 400 B to 2 kB, some up to 200 kB, a few up to some MB. Building one copies its bytes and little more.
"""

import re
import zlib
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.wire.envelope import Dtype

SEQUENCES: Final = (1, 2, 2, 4, 4, 4, 8, 8)
"""Sequences of a group, by checksum."""
LARGEST: Final = max(SEQUENCES)
TOKENS: Final = ((960, 8, 160), (997, 2_000, 20_000), (1_000, 100_000, 400_000))
"""Least and most tokens of a group for each of three parts, in thousandths: small, middle and large ones."""
TOKEN_BYTES: Final = 9
"""Bytes of a token, with its mask and log-probability."""
LARGEST_BYTES: Final = TOKENS[-1][2] * TOKEN_BYTES
_SHIFTS: Final = 4099
"""Places in the block at which a group may begin."""
_ID: Final = re.compile(r"([a-z][a-z0-9]*)\.([0-9]+)-([0-9]+)")


class GroupName(NamedTuple):
    """The parts of a group id."""

    producer: str
    life: int
    number: int

    @classmethod
    def parse(cls, group_id: str) -> "GroupName | None":
        """Return the parts of an id; None if no producer of a soak made it."""
        found = _ID.fullmatch(group_id)
        return cls(found[1], int(found[2]), int(found[3])) if found else None

    def __str__(self) -> str:
        return f"{self.producer}.{self.life}-{self.number}"


class _Block(NamedTuple):
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    scores: NDArray[np.float64]


@cache
def _block() -> _Block:
    size = TOKENS[-1][2] + _SHIFTS
    random = np.random.default_rng(0)
    return _Block(
        random.integers(0, 150_000, size, np.int32),
        random.random(size) < 0.9,
        -random.exponential(1.0, size).astype(np.float32),
        random.random(_SHIFTS + LARGEST),
    )


def made(group_id: str) -> Group:
    """Return the group of that id, the same in every process. Its policy is left to the producer."""
    drawn = zlib.crc32(group_id.encode())
    sequences = SEQUENCES[drawn % len(SEQUENCES)]
    total = _total(drawn >> 3)
    start = (drawn * 2_654_435_761 >> 16) % _SHIFTS
    lengths = np.full(sequences, total // sequences, np.uint32)
    lengths[0] += total % sequences
    block = _block()
    tokens = block.tokens[start : start + total].copy()
    tokens[0] = drawn & 0x7FFFFFFF  # no two ids of one shape have the same contents
    rows = (lengths,)
    columns = {
        "tokens": Column(Dtype.I32, tokens, rows),
        "mask": Column(Dtype.BOOL, block.mask[start : start + total], rows),
        "scores": Column(Dtype.F64, block.scores[start : start + sequences]),
        "inference_logprobs": Column(Dtype.F32, block.logprobs[start : start + total], rows),
    }
    return Group(group_id, columns, sequences=sequences, tokens=total, stamped=False)


def _total(drawn: int) -> int:
    part = drawn % 1000
    for below, least, most in TOKENS:
        if part < below:
            return least + (drawn // 1000) % (most - least)
    raise AssertionError("the parts add up to a thousand")


def is_whole(group: Group) -> bool:
    """Return whether a group is bit for bit the one of its id."""
    expected = made(group.group_id)
    if (group.sequences, group.tokens) != (expected.sequences, expected.tokens):
        return False
    if group.columns.keys() != expected.columns.keys():
        return False
    return all(_equal(group.columns[name], column) for name, column in expected.columns.items())


def _equal(found: Column, wanted: Column) -> bool:
    if found.dtype is not wanted.dtype or found.depth != wanted.depth:
        return False
    levels: list[tuple[Any, Any]] = [(found.values, wanted.values)]
    levels += zip(found.lengths, wanted.lengths, strict=True)
    return all(np.array_equal(one, other) for one, other in levels)
