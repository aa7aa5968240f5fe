"""Handmade journals, event by event, to test readers without the writers."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rolloutmq.bus.encoding.codec import encode_group, header_of
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Rejected
from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Began,
    Event,
    GroupMeta,
    GroupSnapshot,
    GroupState,
    Leased,
    LedgerSnapshot,
    Numbers,
    RecordAddress,
    Settles,
)
from rolloutmq.services.broker.journal.format.events_codec import encode
from rolloutmq.services.broker.journal.format.records import encode_record, file_header
from rolloutmq.services.broker.journal.read.event_log_reader import EVENTS, SNAPSHOT
from rolloutmq.services.broker.journal.read.segments import GROUP, numbered_nonce
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup

SESSION = 7
EMPTY = dict.fromkeys((state.value for state in GroupState), 0)
TRAINER = "trainer"


def version(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, step)


def make_group(name: str) -> Group:
    """Return a group of two sequences."""
    columns: dict[str, Any] = {
        "tokens": [[1, 2, 3], [4, 5]],
        "mask": [[0, 1, 1], [0, 1]],
        "scores": [0.25, 1.0],
        "messages": [{"role": "user"}, {"role": "user"}],
    }
    return Group.build(
        name,
        **columns,
        oldest=version(1),
        newest=version(2),
        started_at=1000.0,
        finished_at=1001.5,
        task="t-1",
    )


class Handmade:
    """The journal of a run directory. Wall-clock seconds are 2000 plus the number of the previous record."""

    def __init__(self, root: Path, durability: str = "disk") -> None:
        self.layout = RunLayout(root)
        write_json(self.layout.config, validate({"broker": {"durability": durability}}))
        self.journal = self.layout.journal
        self.journal.mkdir(exist_ok=True)
        self.groups: dict[int, StoredGroup] = {}
        self.leases = 0
        self._segments: dict[int, bytearray] = {}
        self._clock = 2000.0

    def accept(
        self, order: int, name: str = "", *, segment: int = 1, session: int = SESSION, seq: int = 0
    ) -> Accepted:
        """Write a group's record and return its `Accepted` event."""
        group = make_group(name or f"g{order}")
        encoded = encode_group(group, 1 << 20)
        header = header_of(group, encoded, seq=seq or order, position=order * encoded.nbytes)
        at = 1002.0 + order
        meta = GroupMeta(order, header, "sort3", Split.TRAIN, "run", "sort3-0", session, encoded.table, at)
        self.groups[order] = StoredGroup(
            header=header,
            env="sort3",
            split=Split.TRAIN,
            run="run",
            producer="sort3-0",
            session=session,
            table=encoded.table,
            body=GroupBody(encoded.frames, encoded.nbytes),
            accepted_at=0.0,
            accepted_wall=at,
            order=order,
        )
        offset = self._record(segment, encode(meta), encoded.frames)
        place = RecordAddress(segment, offset)
        return Accepted(order, header, "sort3", Split.TRAIN, "run", "sort3-0", session, at, place)

    def _record(self, number: int, meta: bytes, frames: Sequence[Any]) -> int:
        nonce = numbered_nonce(number, b"same")
        data = self._segments.setdefault(number, bytearray(file_header(nonce)))
        offset = len(data)
        for part in encode_record(nonce, offset, GROUP, meta, frames):
            data += part
        self.segment(number).write_bytes(bytes(data) + bytes(64))
        return offset

    def segment(self, number: int = 1) -> Path:
        return self.journal / f"groups-{number:08d}.rmq"

    def log_file(self, number: int = 1) -> Path:
        return self.journal / f"events-{number:08d}.rmq"

    def log(self, snapshot: Iterable[Event], *commits: Sequence[Event], number: int = 0) -> None:
        """Write the next log, or the one of that number: a snapshot, and a record for each commit."""
        number = number or 1 + len(list(self.journal.glob("events-*.rmq")))
        nonce = numbered_nonce(number, b"\1\0\0\0")
        data = bytearray(file_header(nonce))
        records: list[tuple[int, Sequence[Event]]] = [(SNAPSHOT, list(snapshot)), (EVENTS, ())]
        records += [(EVENTS, commit) for commit in commits]
        for count, (kind, events) in enumerate(records):
            meta = msgspec.msgpack.encode((self._clock, count))
            self._clock += 1.0
            for part in encode_record(nonce, len(data), kind, meta, [encode(list(events))]):
                data += part
        self.log_file(number).write_bytes(data)

    def lease(self, *shards: Sequence[int], step: int = 1, again: bool = False) -> Leased:
        self.leases += 1
        return Leased(
            number=self.leases,
            generation=self.leases,
            group=TRAINER,
            split=Split.TRAIN,
            step=step,
            version=version(step - 1),
            sequences=2,
            shards=tuple(map(tuple, shards)),
            again=again,
        )

    def acked(self, *names: str, session: int = SESSION) -> None:
        """Write a producer's ack log."""
        lines = [
            AckedGroup(group_id=name, session=session, seq=seq, at=1.0) for seq, name in enumerate(names, 1)
        ]
        write_lines(self.layout.ack_log("sort3-0"), lines)

    def trained(self, *batches: SettledBatch) -> None:
        write_lines(self.layout.trained, batches)

    def dropped(self, *groups: DroppedGroup) -> None:
        write_lines(self.layout.dropped, groups)


def began(epoch: int = 1) -> list[Event]:
    """Return the snapshot of a new run."""
    return [Numbers(1, 0, 0), ledger(), Began(epoch, 1, "disk")]


def ledger(accepted: int = 0, *, rewound: int = 0, forgotten: int = 0, **counts: Any) -> LedgerSnapshot:
    reasons = counts.pop("reasons", {})
    return LedgerSnapshot(accepted, rewound, 0, forgotten, {**EMPTY, **counts}, reasons, 0)


def item(accepted: Accepted, deliveries: int = 0) -> GroupSnapshot:
    return GroupSnapshot(accepted, accepted.header.table, deliveries, 0)


def settles(
    lease: Leased,
    *trained: str,
    filtered: Sequence[str] = (),
    rejected: Sequence[str] = (),
    rank: int = 0,
) -> Settles:
    """Return a rank's settlement; the policy after the step is that of the lease's step."""
    return Settles(
        Settle(
            consumer=f"{TRAINER}-{rank}",
            lease=lease.number,
            generation=lease.generation,
            rank=rank,
            version=version(lease.step if trained else lease.step - 1),
            trained=trained,
            filtered=tuple(filtered),
            rejected=tuple(Rejected(group_id=name, reason="odd") for name in rejected),
        )
    )


def batch(step: int, *trained: str, **fields: Any) -> SettledBatch:
    return SettledBatch(at=100.0 + step, version=version(step), trained=trained, **fields)


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[offset] ^= 0x10
    path.write_bytes(data.tobytes())
