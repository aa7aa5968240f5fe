"""Mutations of bytes: an edit has a kind, a place (a part of the length) and a number, which hypothesis can shrink."""

import random
from collections.abc import Callable, Sequence
from typing import Final

Edit = tuple[str, float, int]
"""A mutation, its place (as a part of the length), and a number."""

NUMBERS: Final = (
    b"\xff" * 8,
    b"\x00" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\xcf" + b"\xff" * 8,
    b"\xdd\xff\xff\xff\xff",
    b"\xc1",
    b"\x80",
)
EDITS_LIMIT: Final = 12
"""Most edits of one input."""


def mutate(data: bytes, edits: Sequence[Edit], others: Sequence[bytes]) -> bytes:
    """Change bytes a little, again and again; a splice continues with one of the others."""
    for kind, where, number in edits:
        at = int(where * len(data))
        if kind == SPLICE:
            other = others[number % len(others)]
            data = data[:at] + other[number % max(1, len(other)) :]
        else:
            data = _EDITS[kind](data, at, number)
    return data


def some_edits(rng: random.Random, most: int = EDITS_LIMIT) -> list[Edit]:
    """Return a few edits."""
    return [(rng.choice(EDITS), rng.random(), rng.randrange(1 << 16)) for _ in range(rng.randint(1, most))]


def _flip(data: bytes, at: int, number: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << number % 8)]) + data[at + 1 :] if at < len(data) else data


def _overwrite(data: bytes, at: int, number: int) -> bytes:
    written = NUMBERS[number % len(NUMBERS)]
    return data[:at] + written + data[at + len(written) :]


_EDITS: Final[dict[str, Callable[[bytes, int, int], bytes]]] = {
    "flip": _flip,
    "set": lambda data, at, number: data[:at] + bytes([number % 256]) + data[at + 1 :],
    "cut": lambda data, at, _: data[:at],
    "remove": lambda data, at, number: data[:at] + data[at + number % 32 :],
    "repeat": lambda data, at, number: data[:at] + data[at : at + 16] * (number % 64) + data[at + 16 :],
    "insert": lambda data, at, number: data[:at] + NUMBERS[number % len(NUMBERS)] + data[at:],
    "overwrite": _overwrite,
}
SPLICE: Final = "splice"
EDITS: Final = (*_EDITS, SPLICE)
