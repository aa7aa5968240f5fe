"""Damage to the files of a run: bits, cuts, lost and swapped files, and records whose checksums hide absurd contents.

Damage without `forged` is what disks, crashes and people do. Forged records are what a defect of another program, or
an attacker, would leave; no checksum can tell them from written ones.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from tests.fuzz.mutations import mutate, some_edits
from tests.fuzz.recovery.tree import Kind, Odd, Tree
from tests.fuzz.values import mutated

from rolloutmq.services.broker.journal.format.records import (
    Record,
    encode_record,
    file_header,
    nonce_of,
    scan,
)

BLOCK_BYTES: Final = 4096
DAMAGES_LIMIT: Final = 4
EDITED_LIMIT: Final = 12
"""Most values that are changed in one file."""
CONFIG: Final = "config.json"
NUMBERS: Final = (0, 1, 2, 3, 5, 99_999_999, 100_000_000, (1 << 32) - 1, 1 << 32, 10**18)


@dataclass
class Damaged:
    """A damaged directory.

    Attributes:
        forged: Some record has a right checksum and other contents than the journal wrote.
        what: What was done, for people.
    """

    tree: dict[str, bytes | Odd]
    forged: bool = False
    what: list[str] = field(default_factory=list)

    def files(self) -> list[str]:
        """Return the names of the files that may be damaged: not the configuration, which recovery does not own."""
        return [name for name, entry in self.tree.items() if isinstance(entry, bytes) and name != CONFIG]


def damaged(tree: Tree, rng: random.Random) -> Damaged:
    """Return a copy with a few damages."""
    found = Damaged(dict(tree))
    for _ in range(rng.randint(1, DAMAGES_LIMIT)):
        names = found.files()
        if not names:
            break
        damage = rng.choice(_DAMAGES)
        if damage is _forge and rng.random() < 0.6:  # most is said by the events
            names = [name for name in names if "events" in name or "saved" in name] or names
        name = rng.choice(names)
        found.what.append(f"{damage.__name__.strip('_')} {name}")
        damage(found, name, rng)
    return found


def _bytes_of(found: Damaged, name: str) -> bytes:
    entry = found.tree[name]
    assert isinstance(entry, bytes)
    return entry


def _flip(found: Damaged, name: str, rng: random.Random) -> None:
    """Flip some bits, mostly where there is something."""
    data = bytearray(_bytes_of(found, name))
    end = len(data.rstrip(b"\0")) if rng.random() < 0.8 else len(data)
    for _ in range(rng.choice((1, 1, 2, 20)) if end else 0):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    found.tree[name] = bytes(data)


def _edit(found: Damaged, name: str, rng: random.Random) -> None:
    """Insert, remove, repeat or splice bytes."""
    data = _bytes_of(found, name)
    others = [entry for entry in found.tree.values() if isinstance(entry, bytes)]
    found.tree[name] = mutate(data, some_edits(rng, 4), others)


def _cut(found: Damaged, name: str, rng: random.Random) -> None:
    data = _bytes_of(found, name)
    end = len(data.rstrip(b"\0"))
    found.tree[name] = data[: rng.choice((rng.randint(0, end), rng.randint(0, len(data)), end, 24, 12))]


def _zero(found: Damaged, name: str, rng: random.Random) -> None:
    """Lose a stretch or some blocks, as a disk does that had not written them."""
    data = bytearray(_bytes_of(found, name))
    start = rng.randint(0, len(data))
    if rng.random() < 0.5:
        start -= start % BLOCK_BYTES
    size = rng.choice((8, 100, BLOCK_BYTES, 3 * BLOCK_BYTES, len(data)))
    end = min(start + size, len(data))
    data[start:end] = bytes(end - start) if rng.random() < 0.7 else rng.randbytes(end - start)
    found.tree[name] = bytes(data)


def _extend(found: Damaged, name: str, rng: random.Random) -> None:
    data = _bytes_of(found, name)
    count = rng.choice((1, 7, 100, BLOCK_BYTES, 1 << 18))
    more = rng.choice((bytes(count), rng.randbytes(count), data[:count], data[-count:]))
    found.tree[name] = data + more


def _empty(found: Damaged, name: str, _: random.Random) -> None:
    found.tree[name] = b""


def _delete(found: Damaged, name: str, _: random.Random) -> None:
    del found.tree[name]


def _rename(found: Damaged, name: str, rng: random.Random) -> None:
    data = found.tree.pop(name)
    found.tree[_other_name(name, rng)] = data


def _duplicate(found: Damaged, name: str, rng: random.Random) -> None:
    found.tree[_other_name(name, rng)] = found.tree[name]


def _swap(found: Damaged, name: str, rng: random.Random) -> None:
    other = rng.choice(found.files())
    found.tree[name], found.tree[other] = found.tree[other], found.tree[name]


def _replace(found: Damaged, name: str, rng: random.Random) -> None:
    """Put something else where a file belongs."""
    kind = rng.choice(tuple(Kind))
    own = name.rpartition("/")[2]
    target = rng.choice(
        (own, "nowhere", "..", ".", "/dev/null", rng.choice(found.files()).rpartition("/")[2])
    )
    found.tree[name] = Odd(kind, target)


def _add(found: Damaged, name: str, rng: random.Random) -> None:
    """Add an entry that is no file under a name of a file."""
    free = _other_name(name, rng)
    if free not in found.tree:
        found.tree[free] = Odd(rng.choice((Kind.DIRECTORY, Kind.FIFO, Kind.SOCKET, Kind.FULL_DIRECTORY)))


def _forge(found: Damaged, name: str, rng: random.Random) -> None:
    """Rewrite the records of a file with right checksums."""
    data = _bytes_of(found, name)
    nonce = nonce_of(data)
    if nonce is None:
        return
    records = [
        (one.kind, bytes(one.meta), [bytes(frame) for frame in one.frames])
        for one in scan(data, sealed=False)
        if isinstance(one, Record)
    ]
    for _ in range(rng.randint(1, EDITED_LIMIT)):
        if records:
            _forge_one(records, rng)
    written = bytearray(file_header(nonce))
    for kind, meta, frames in records:
        for part in encode_record(nonce, len(written), kind, meta, frames):
            written += part
    found.tree[name] = bytes(written) + bytes(rng.choice((0, 64, BLOCK_BYTES)))
    found.forged = True


def _forge_one(records: list[tuple[int, bytes, list[bytes]]], rng: random.Random) -> None:
    at = rng.randrange(len(records))
    kind, meta, frames = records[at]
    match rng.randrange(12):
        case 0:
            del records[at]
        case 1:
            records.insert(rng.randrange(len(records)), records[at])
        case 2:
            records[at] = (rng.choice((0, 1, 2, 3, 16, 17, 65535)), meta, frames)
        case 3:
            records[at] = (kind, meta, [*frames, b"x"] if rng.random() < 0.5 else frames[:-1])
        case 4:
            records[at] = (kind, _forged(meta, rng), frames)
        case _:
            changed = [_forged(frame, rng) if len(frame) < 1 << 16 else frame for frame in frames]
            records[at] = (kind, _forged(meta, rng) if kind == 1 else meta, changed)


def _forged(packed: bytes, rng: random.Random) -> bytes:
    """Return msgpack with another value somewhere; other bytes stay."""
    try:
        value: Any = msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return packed
    for _ in range(rng.choice((1, 1, 2))):
        value = mutated(value, rng)
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return packed


def _other_name(name: str, rng: random.Random) -> str:
    """Return a name that another file may have."""
    folder, _, file = name.rpartition("/")
    stem = file.partition("-")[0] if "-" in file else "events"
    number = rng.choice(NUMBERS)
    file = rng.choice(
        (
            f"{stem}-{number:08d}.rmq",
            f"{rng.choice(('events', 'groups', 'spare', 'facts'))}-{number:08d}.rmq",
            f"{number:012d}.rmq",
            f"{file}.{number}.tmp",
            f"{file}~",
            "events-١٢٣٤٥٦٧٨.rmq",
            "quarantine",
            "reserve.rmq",
        )
    )
    return f"{folder}/{file}" if folder else file


_Damage = Callable[[Damaged, str, random.Random], None]
_DAMAGES: Final[tuple[_Damage, ...]] = (
    *(_flip, _flip, _edit, _cut, _cut, _zero, _zero, _extend, _empty, _delete, _rename, _duplicate, _swap),
    *(_replace, _add, _forge, _forge, _forge),
)
