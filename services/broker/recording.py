"""A recorded run, read back from its journal for a replay: its batches in their order, and where their groups lie.

A batch is part of the record when all its ranks have settled it. What was lost before that came again in another lease;
what a trainer settled and went back behind, when it resumed at a checkpoint, came again too: of both, the record has
the last time only. So it is the sequence of batches that the policy at its end has learned from, with the shards of
their ranks. Nothing here writes to the recorded run, which may even be alive.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from rolloutmq.schemas.envelope import ColumnTable, PolicyVersion
from rolloutmq.schemas.errors import DamagedJournalError, MissingError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.broker.groups import Stream
from rolloutmq.services.broker.journal import facts as f
from rolloutmq.services.broker.journal.body import Body, Frames, Ram
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.history import SEGMENTS, History, files
from rolloutmq.services.broker.journal.packing import AnyFact, decode_meta
from rolloutmq.services.broker.journal.reading import RecordFile
from rolloutmq.services.broker.journal.segment import Record
from rolloutmq.services.broker.journal.segments import GROUP, is_numbered

OPEN_FILES: Final = 16
"""Segments that are open at once."""


class RecordedBatch(NamedTuple):
    """One batch as it was trained: groups by rank."""

    stream: Stream
    step: int
    shards: tuple[tuple[int, ...], ...]
    short: bool

    @property
    def groups(self) -> Iterator[int]:
        return (order for rank in self.shards for order in rank)


class _Settled(NamedTuple):
    number: int
    after: PolicyVersion
    stepped: bool
    batch: RecordedBatch


class Transcript:
    """Follows the facts of a run; `batches` is what they come to."""

    def __init__(self) -> None:
        self.accepted: dict[int, f.Accepted] = {}
        self._open: dict[int, tuple[f.Leased, list[f.Settles]]] = {}
        self._certain: list[_Settled] = []
        self._kept: dict[str, deque[_Settled]] = {}
        """What may still come again, by consumer group; see `retained`."""
        self._count = 0

    @property
    def batches(self) -> list[RecordedBatch]:
        """The batches in the order of their settlement."""
        settled = [*self._certain, *(one for kept in self._kept.values() for one in kept)]
        return [one.batch for one in sorted(settled, key=lambda one: one.number)]

    def read(self, fact: AnyFact) -> None:
        """Note one fact, or one item of a snapshot."""
        match fact:
            case f.Accepted():
                self.accepted[fact.order] = fact
            case f.GroupItem():
                self.accepted.setdefault(fact.accepted.order, fact.accepted)
            case f.Leased():
                self._open[fact.number] = fact, []
            case f.Lost():
                self._open.pop(fact.lease, None)
            case f.Settles():
                self._settle(fact)
            case f.Committed():
                self._let_go(fact.group, self._covered(fact.group, fact.version))
            case f.Forgot():
                self._let_go(fact.group, fact.batches)
            case f.Rewound():
                self._rewind(fact)
            case f.WasReset():
                self._open.clear()
                self._certain.clear()
                self._kept.clear()

    def _settle(self, fact: f.Settles) -> None:
        lease, settles = self._open.get(fact.settle.lease, (None, []))
        settles.append(fact)
        if lease is None or len(settles) < len(lease.shards):
            return
        del self._open[lease.number]
        said = [each.settle for each in settles]
        self._count += 1
        one = _Settled(
            number=self._count,
            after=max(settle.version for settle in said),
            stepped=any(settle.trained for settle in said),
            batch=RecordedBatch((lease.group, lease.split), lease.step, lease.shards, lease.short),
        )
        if any(settle.trained or settle.filtered for settle in said):
            self._kept.setdefault(lease.group, deque()).append(one)
        else:
            self._certain.append(one)

    def _covered(self, group: str, version: PolicyVersion) -> int:
        kept = self._kept.get(group, ())
        return next((i for i, one in enumerate(kept) if one.after.step > version.step), len(kept))

    def _let_go(self, group: str, count: int) -> None:
        kept = self._kept.get(group, deque())
        self._certain += [kept.popleft() for _ in range(min(count, len(kept)))]

    def _rewind(self, fact: f.Rewound) -> None:
        kept = self._kept.pop(fact.group, deque())
        ends = [i + 1 for i, one in enumerate(kept) if one.stepped and one.after.step <= fact.version.step]
        self._certain += list(kept)[: max(ends, default=0)]


class Recording:
    """The batches of a recorded run, and its groups. Belongs to one thread; close it.

    Raises:
        MissingError: There is no journal, or not all of the batches is in it any more.
        DamagedJournalError: The facts are damaged, so that nobody knows what the batches were.
    """

    def __init__(self, run_dir: Path, ram: Ram) -> None:
        self._journal = RunLayout(run_dir).journal
        self._paths = files(self._journal, SEGMENTS)
        self._ram = ram
        self._open: OrderedDict[int, RecordFile] = OrderedDict()
        transcript = self._transcribe()
        self.batches = transcript.batches
        if not self.batches:
            raise MissingError(f"a trained batch in {self._journal}", "only what was settled is replayed")
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
        history, transcript = History(self._journal), Transcript()
        for number, chapter in enumerate(history.chapters()):
            if number == 0 and _is_late(chapter.snapshot):
                remedy = "its oldest logs were removed; `rolloutmq up --replay` keeps all"
                raise MissingError(f"the beginning of the record in {self._journal}", remedy)
            for item in chapter.snapshot:
                if isinstance(
                    item, f.GroupItem
                ):  # Some are told of nowhere else: the crash came before the fact.
                    transcript.read(item)
            for commit in chapter.commits:
                for fact in commit.facts:
                    transcript.read(fact)
        if history.damage:
            raise DamagedJournalError(history.damage[0])
        return transcript

    def _check(self) -> None:
        """Read every group that will be served: a replay has all of its batches, or does not begin."""
        needed = {order: batch.step for batch in self.batches for order in batch.groups}
        places = {order: fact.place for order, fact in self._accepted.items() if order in needed}
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

    def items(self) -> list[AnyFact]:
        """Return the state of a broker that has all of it before it: every batch comes again."""
        orders = sorted(order for batch in self.batches for order in batch.groups)
        accepted = [self._accepted[order] for order in orders]
        returning = [f.ReturningItem(*b.stream, b.shards, b.short) for b in self.batches]
        return [
            f.Numbers(orders[-1] + 1, 0, 0),
            *map(f.Table, self._tables.values()),
            *(f.GroupItem(fact, fact.header.table, 0, 0) for fact in accepted),
            *returning,
            f.LedgerItem(len(orders), 0, 0, 0, {"queued": len(orders)}, {}, 0),
        ]

    def body(self, accepted: f.Accepted) -> Body:
        """Return the frames of a group; they are read when a batch needs them."""
        assert accepted.place is not None
        source = _Shelf(accepted.place.segment, self)
        return Body.stored(source, accepted.place.offset, accepted.header.nbytes, self._ram)

    def table(self, accepted: f.Accepted) -> ColumnTable | None:
        return self._tables.get(accepted.header.table)

    def frames(self, place: f.Place) -> Frames:
        """Return the frames of a record. DamagedJournalError, which ends the replay, if it is not whole any more."""
        record = self._record(place)
        if record is None:
            path = self._paths.get(place.segment, self._journal)
            raise DamagedJournalError(f"{path}: the record at {place.offset} was whole and is not any more")
        return record.frames

    def _record(self, place: f.Place) -> Record | None:
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


class _Shelf:
    """One segment of a recording, as bodies know it: nothing that becomes of them changes it."""

    def __init__(self, number: int, recording: Recording) -> None:
        self.number = number
        self._recording = recording

    def read(self, offset: int) -> Frames:
        return self._recording.frames(f.Place(self.number, offset))

    def gained(self) -> None:
        """Keep all of it anyway."""

    def lost(self) -> None:
        """Keep all of it anyway."""


def _disk_order(place: f.Place | None) -> tuple[int, int]:
    return (0, 0) if place is None else (place.segment, place.offset)


def _is_late(snapshot: Iterable[AnyFact]) -> bool:
    """Whether a log that should be the first one begins in the middle of a run."""
    return any(isinstance(item, f.LedgerItem) and item.accepted for item in snapshot)
