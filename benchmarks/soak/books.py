"""The books: what producers and trainers of a soak write down themselves, each into files of its own.

Lines are appended with one write each and are never buffered, so a killed process leaves all of them; a last line may
be torn. Nothing of the product writes or reads these files.

A producer's line is a letter and a number: `b` built, `s` sent (the call returned), `a` acked (its future ended). `t`
means that the groups left by earlier lives are acked, `l` that this life left in order. A rank's line is one `Entry`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")


class Book:
    """An append-only file of one life of one process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def line(self, text: bytes) -> None:
        """Append one line."""
        os.write(self._fd, text + b"\n")

    def note(self, entry: "Entry") -> None:
        """Append an entry of a rank."""
        self.line(msgspec.json.encode(entry))

    def close(self) -> None:
        os.close(self._fd)


class Began(msgspec.Struct, frozen=True, tag=True):
    """A registration of a rank. `resume` is the step of the checkpoint it went back to."""

    at: float
    incarnation: int
    resume: int | None = None


class Got(msgspec.Struct, frozen=True, tag=True):
    """A shard a rank has pulled. `torn` names groups that are not those of their ids."""

    at: float
    lease: int
    generation: int
    incarnation: int
    step: int
    world: int
    ids: tuple[str, ...]
    torn: tuple[str, ...] = ()
    rewound: bool = False


class Asked(msgspec.Struct, frozen=True, tag=True):
    """A settlement about to be sent. Groups in no list are trained."""

    at: float
    lease: int
    generation: int
    filtered: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()


class Told(msgspec.Struct, frozen=True, tag=True):
    """The answer to a settlement."""

    at: float
    lease: int
    generation: int
    how: Literal["settled", "lost"]


class Saved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint that was written, before it was committed."""

    at: float
    incarnation: int
    step: int


Entry = Began | Got | Asked | Told | Saved


class ProducerLife(msgspec.Struct):
    """One life of a producer, by its own book. Numbers count from 0."""

    producer: str
    life: int
    built: int = 0
    sent: set[int] = msgspec.field(default_factory=set)
    acked: set[int] = msgspec.field(default_factory=set)
    took_over: bool = False
    left: bool = False


def lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a book."""
    yield from path.read_bytes().split(b"\n")[:-1]


def read_producer(path: Path) -> ProducerLife:
    """Read the book of one life of a producer, `<producer>.<life>`."""
    name, _, life = path.name.rpartition(".")
    found = ProducerLife(name, int(life))
    for line in lines(path):
        match line[:1]:
            case b"b":
                found.built = max(found.built, int(line[1:]) + 1)
            case b"s":
                found.sent.add(int(line[1:]))
            case b"a":
                found.acked.add(int(line[1:]))
            case b"t":
                found.took_over = True
            case b"l":
                found.left = True
            case _:
                raise ValueError(f"{path}: unknown line {line!r}")
    return found


def read_rank(path: Path) -> list[Entry]:
    """Read the book of one life of a rank."""
    decoder = msgspec.json.Decoder(Entry)
    return [decoder.decode(line) for line in lines(path)]
