"""A recording: the batches of a run in their order, read from its journal, and the addresses of their groups.

A batch is part of the recording once all its ranks have settled it. A lost lease is not; its groups follow in a later
one. After a resume from a checkpoint, batches are trained again: the recording has only the last time. It is
therefore the sequence of batches the final policy has trained on, with the shards of their ranks. Nothing here
writes to the recorded run, which may even be live.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from rolloutmq.schemas.errors import DamagedJournalError, MissingError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import ColumnTable, PolicyVersion
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format import events as f
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent, decode_meta
from rolloutmq.services.broker.journal.format.records import Record
from rolloutmq.services.broker.journal.inspect.history import SEGMENTS, JournalHistory, files
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.read.segments import GROUP, is_numbered
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.broker.journal.stored_group import BodyMemory, Frames, GroupBody
from rolloutmq.services.broker.state.groups import Stream

OPEN_FILES: Final = 16
"""Segments that are open at once."""


class RecordedBatch(NamedTuple):
    """One trained batch: orders of the groups of each rank."""

    stream: Stream
    step: int
    shards: tuple[tuple[int, ...], ...]
    short: bool
    moments: Mapping[str, Moments]

    @property
    def groups(self) -> Iterator[int]:
        return (order for rank in self.shards for order in rank)


class _Settled(NamedTuple):
    number: int
    after: PolicyVersion
    stepped: bool
    batch: RecordedBatch


class Transcript:
    """Follows the events of a run; `batches` is the result."""

    def __init__(self) -> None:
        self.accepted: dict[int, f.Accepted] = {}
        self._open: dict[int, tuple[f.Leased, list[f.Settles]]] = {}
        self._certain: list[_Settled] = []
        self._uncommitted: dict[str, deque[_Settled]] = {}
        """Batches a resume may still rewind, by consumer group; see `batches.rewind`."""
        self._count = 0

    @property
    def batches(self) -> list[RecordedBatch]:
        """The batches in the order of their settlement."""
        settled = [*self._certain, *(one for kept in self._uncommitted.values() for one in kept)]
        return [one.batch for one in sorted(settled, key=lambda one: one.number)]

    def read(self, event: AnyEvent) -> None:
        """Apply one event, or one record of a snapshot."""
        match event:
            case f.Accepted():
                self.accepted[event.order] = event
            case f.GroupSnapshot():
                self.accepted.setdefault(event.accepted.order, event.accepted)
            case f.Leased():
                self._open[event.number] = event, []
            case f.Carved():
                self._carve(event)
            case f.Lost():
                self._open.pop(event.lease, None)
            case f.Settles():
                self._settle(event)
            case f.Committed():
                self._let_go(event.group, self._covered(event.group, event.version))
            case f.Forgot():
                self._let_go(event.group, event.batches)
            case f.Rewound():
                self._rewind(event)
            case f.WasReset():
                self._open.clear()
                self._certain.clear()
                self._uncommitted.clear()

    def _carve(self, event: f.Carved) -> None:
        """Take groups out of the leases of a window. What was settled together is a batch of the recording."""
        own = set(event.orders)
        for number, (lease, settles) in list(self._open.items()):
            if not lease.window or own.isdisjoint(lease.shards[0]):
                continue
            left = tuple(order for order in lease.shards[0] if order not in own)
            self._open[event.number] = replace(lease, number=event.number, shards=(event.orders,)), []
            self._open[number] = replace(lease, shards=(left,)), settles

    def _settle(self, event: f.Settles) -> None:
        lease, settles = self._open.get(event.settle.lease, (None, []))
        settles.append(event)
        if lease is None or len(settles) < len(lease.shards):
            return
        del self._open[lease.number]
        reports = [each.settle for each in settles]
        self._count += 1
        one = _Settled(
            number=self._count,
            after=max(settle.version for settle in reports),
            stepped=any(settle.trained for settle in reports),
            batch=RecordedBatch(
                (lease.group, lease.split), lease.step, lease.shards, lease.short, lease.moments
            ),
        )
        if any(settle.trained or settle.filtered for settle in reports):
            self._uncommitted.setdefault(lease.group, deque()).append(one)
        else:
            self._certain.append(one)

    def _covered(self, group: str, version: PolicyVersion) -> int:
        kept = self._uncommitted.get(group, ())
        return next((i for i, one in enumerate(kept) if one.after.step > version.step), len(kept))

    def _let_go(self, group: str, count: int) -> None:
        kept = self._uncommitted.get(group, deque())
        self._certain += [kept.popleft() for _ in range(min(count, len(kept)))]

    def _rewind(self, event: f.Rewound) -> None:
        kept = self._uncommitted.pop(event.group, deque())
        ends = [i + 1 for i, one in enumerate(kept) if one.stepped and one.after.step <= event.version.step]
        self._certain += list(kept)[: max(ends, default=0)]


class Recording:
    """The batches of a recorded run, and its groups. Belongs to one thread; close it.

    Raises:
        MissingError: There is no journal, or it no longer has all of the batches.
        DamagedJournalError: The events are damaged, so the batches are unknown.
    """

    def __init__(self, run_dir: Path, ram: BodyMemory) -> None:
        require_own_records(RunLayout(run_dir))
        self._journal = RunLayout(run_dir).journal
        self._paths = files(self._journal, SEGMENTS)
        self._ram = ram
        self._open: OrderedDict[int, RecordFile] = OrderedDict()
        transcript = self._transcribe()
        self.batches = transcript.batches
        if not self.batches:
            raise MissingError(f"a trained batch in {self._journal}", "only settled batches can be replayed")
        self._accepted = transcript.accepted
        self._tables: dict[str, ColumnTable] = {}
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _transcribe(self) -> Transcript:
        if not self._journal.is_dir():
            raise MissingError(str(self._journal), "record a run with `rolloutmq up --replay`")
        history, transcript = JournalHistory(self._journal), Transcript()
        for number, log in enumerate(history.logs()):
            if number == 0 and _is_late(log.snapshot):
                remedy = "its oldest logs were removed; `rolloutmq up --replay` keeps all"
                raise MissingError(f"the beginning of the record in {self._journal}", remedy)
            for item in log.snapshot:
                if isinstance(
                    item, f.GroupSnapshot
                ):  # A crash may have come before the event of its acceptance.
                    transcript.read(item)
            for commit in log.commits:
                for event in commit.events:
                    transcript.read(event)
        if history.damage:
            raise DamagedJournalError(history.damage[0])
        return transcript

    def _check(self) -> None:
        """Read every group of the recording: a replay has all of its batches, or does not begin."""
        needed = {order: batch.step for batch in self.batches for order in batch.groups}
        places = {order: event.place for order, event in self._accepted.items() if order in needed}
        for order in sorted(needed, key=lambda order: _disk_order(places.get(order))):
            place = places.get(order)
            record = None if place is None else self._record(place)
            meta = None if record is None else decode_meta(record.meta)
            if meta is None or meta.header != self._accepted[order].header:
                name = self._accepted[order].header.group_id if order in self._accepted else str(order)
                raise MissingError(
                    f"group {name} of step {needed[order]} in {self._journal}",
                    "only a run that was started with `rolloutmq up --replay` keeps every group",
                )
            self._tables[meta.table.id] = meta.table

    def items(self) -> list[AnyEvent]:
        """Return the snapshot of a broker with every batch on the rewind queue."""
        orders = sorted(order for batch in self.batches for order in batch.groups)
        accepted = [self._accepted[order] for order in orders]
        returning = [
            f.RewoundBatchSnapshot(*b.stream, b.shards, b.short, dict(b.moments)) for b in self.batches
        ]
        return [
            f.Numbers(orders[-1] + 1, 0, 0),
            *map(f.Table, self._tables.values()),
            *(f.GroupSnapshot(event, event.header.table, 0, 0) for event in accepted),
            *returning,
            f.LedgerSnapshot(len(orders), 0, 0, 0, {"queued": len(orders)}, {}, 0),
        ]

    def body(self, accepted: f.Accepted) -> GroupBody:
        """Return the body of a group; its frames are read when a batch needs them."""
        assert accepted.place is not None
        source = _RecordedSegment(accepted.place.segment, self)
        return GroupBody.stored(source, accepted.place.offset, accepted.header.nbytes, self._ram)

    def table(self, accepted: f.Accepted) -> ColumnTable | None:
        return self._tables.get(accepted.header.table)

    def frames(self, place: f.RecordAddress) -> Frames:
        """Return the frames of a record; DamagedJournalError, which ends the replay, if it is damaged by now."""
        record = self._record(place)
        if record is None:
            path = self._paths.get(place.segment, self._journal)
            raise DamagedJournalError(f"{path}: the record at {place.offset} was damaged during the replay")
        return record.frames

    def _record(self, place: f.RecordAddress) -> Record | None:
        file = self._file(place.segment)
        record = file.record(place.offset) if file is not None else None
        return record if record is not None and record.kind == GROUP else None

    def _file(self, number: int) -> RecordFile | None:
        if number not in self._open:
            try:
                file = RecordFile(Disk(), self._paths[number])
            except (KeyError, FileNotFoundError):
                return None
            self._open[number] = file
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        file = self._open[number]
        return file if is_numbered(file.nonce, number) else None

    def close(self) -> None:
        """Close the files. May be called twice."""
        while self._open:
            self._open.popitem()[1].close()


class _RecordedSegment:
    """One segment of a recording, as a source of bodies; it is never changed."""

    def __init__(self, number: int, recording: Recording) -> None:
        self.number = number
        self._recording = recording

    def read(self, offset: int) -> Frames:
        return self._recording.frames(f.RecordAddress(self.number, offset))

    def gained(self) -> None:
        """Keep every record anyway."""

    def lost(self) -> None:
        """Keep every record anyway."""


def _disk_order(place: f.RecordAddress | None) -> tuple[int, int]:
    return (0, 0) if place is None else (place.segment, place.offset)


def _is_late(snapshot: Iterable[AnyEvent]) -> bool:
    """Return whether the first log that is left begins in the middle of a run."""
    return any(isinstance(item, f.LedgerSnapshot) and item.accepted for item in snapshot)
