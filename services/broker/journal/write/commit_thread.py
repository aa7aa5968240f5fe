"""The commit thread: makes commit batches durable one after the other, and does chores in between.

    commit   write the groups to their segments and sync; write the events to the log; sync the log too if the batch has
             events other than acceptances. Priority batches come first, all that wait together, also between two
             writes of a batch of groups; the others in their order
    chores   reserve room for events, allocate the next segment and zeros ahead in the log, sync events of acceptances
             within a second, remove obsolete segments and old logs: one chore after each commit, the rest when idle

An event is written when its group is durable, and a segment is removed when the events that released it are. After a
disk failure nothing more is written, synced or reported as durable.
"""

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.envelope import ColumnTable
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.disk import Disk, passes
from rolloutmq.services.broker.journal.event_buffer import Entry, SnapshotRecord
from rolloutmq.services.broker.journal.format.events import Accepted, Event, GroupMeta, RecordAddress, Table
from rolloutmq.services.broker.journal.format.events_codec import encode
from rolloutmq.services.broker.journal.read.segments import GroupSegment, SegmentStore
from rolloutmq.services.broker.journal.stored_group import BodyMemory, Frames, GroupBody, StoredGroup
from rolloutmq.services.broker.journal.write.event_log import EventLog, prune
from rolloutmq.services.broker.journal.write.event_reserve import EventReserve
from rolloutmq.services.broker.journal.write.group_log import GroupLog
from rolloutmq.services.broker.journal.write.record_writer import DiskRetry

logger = logging.getLogger(__name__)

EVENTS_SYNC_S: Final = 1.0
"""Latest sync of the events of acceptances; until then recovery reads the segments for them."""


@dataclass
class LogRotation:
    """A new event log begins here."""

    snapshot: list[SnapshotRecord]


@dataclass
class CommitBatch:
    """Groups and events that become durable together."""

    number: int = 0
    """In the order in which batches began; 0 while it is empty."""
    priority: bool = False
    """It has only events, and need not wait for groups before it."""
    entries: list[Entry | LogRotation] = field(default_factory=list)
    bodies: list[tuple[Frames, bool]] = field(default_factory=list)
    """The frames of the groups among the entries, and whether they lie in blocks of memory. The bodies may have dropped
    their frames by the time of the write.
    """
    nbytes: int = 0
    room_bytes: int = 0
    """Most bytes its groups take in segments."""
    sync_log: bool = False
    """It has events other than acceptances."""
    dead: list[GroupSegment] = field(default_factory=list)
    """Segments that are obsolete after it."""


@dataclass
class FinishedCommit:
    """A batch that is durable, and the segments that were finished since the last one."""

    batch: CommitBatch | None
    """None for the answer to `leave_segment`."""
    sealed: list[GroupSegment]


class _Call(Enum):
    """What the thread is called for."""

    COMMIT = auto()
    CHORES = auto()
    LEAVE = auto()
    END = auto()


class CommitThread:
    """Writes batches. All methods but the constructor, `begin` and those marked otherwise belong to its thread.

    Attributes:
        finished: Commits in their order, for another thread to take.
        failure: The disk failure; no commit comes after it.
        commits, busy_s: Number of commits, and the seconds they took.
    """

    def __init__(
        self,
        directory: Path,
        config: BrokerConfig,
        segments: SegmentStore,
        ram: BodyMemory,
        wake: Callable[[], None],
        disk: Disk,
    ) -> None:
        self._group_retry = DiskRetry(wake)
        self._event_retry = DiskRetry(wake)
        self.finished: deque[FinishedCommit] = deque()
        self.failure: OSError | None = None
        self.commits = 0
        self.busy_s = 0.0
        self._directory = directory
        self._config = config
        self._segments = segments
        self._ram = ram
        self._wake = wake
        self._disk = disk
        self._syncs = config.durability is Durability.DISK
        self._batches: deque[CommitBatch] = deque()
        self._priority: deque[CommitBatch] = deque()
        self._handed: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        """A call for each batch in the two queues above."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._groups: GroupLog
        self._events: EventLog
        self._events_due = float("inf")
        self._removals: deque[GroupSegment] = deque()
        self._pruned = False
        self._tables: dict[str, msgspec.Raw] = {}
        self._reserve = EventReserve(directory, config.segment_bytes, disk)
        self._group_retry.meanwhile = self._make_room
        self._event_retry.meanwhile = self._make_room_for_events

    def hurry(self, seconds: float) -> None:
        """Wait for room on a full disk for that long from now at most. For any thread."""
        self._group_retry.hurry(seconds)
        self._event_retry.hurry(seconds)

    def relax(self) -> None:
        """Wait for room without a limit again."""
        self._group_retry.relax()
        self._event_retry.relax()

    @property
    def waits(self) -> bool:
        """Whether a write waits for room right now. For any thread."""
        return self._group_retry.full or self._event_retry.full

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def log_bytes(self) -> tuple[int, int]:
        """Bytes of the present log's snapshot, and of the events after it. For any thread."""
        return self._events.snapshot_bytes, self._events.events_bytes

    def begin(self, log: int, segment: int, snapshot: list[SnapshotRecord]) -> None:
        """Write the first log of this life and start the thread; blocks. `segment` is the first number to use."""
        self._groups = GroupLog(
            self._segments, self._config, self._ram, self._disk, self._group_retry, segment, self._reserve
        )
        try:
            self._events = self._new_log(log, snapshot)
        except BaseException:
            self._groups.abandon(cut=False)
            raise
        self._thread.start()

    def put(self, batch: CommitBatch | None) -> None:
        """Hand over a batch; None ends the thread after those before it. For another thread."""
        if batch is not None:
            (self._priority if batch.priority else self._batches).append(batch)
        self._handed.put(_Call.END if batch is None else _Call.COMMIT)

    def room_bytes(self) -> int:
        """Return the bytes of groups for which room is reserved. For another thread."""
        return self._groups.room_bytes()

    @property
    def cramped(self) -> bool:
        """Whether the present segment should be left; see `GroupLog.cramped`. For another thread."""
        return self._groups.cramped

    def leave_segment(self) -> None:
        """Finish the present segment: see `GroupLog.leave`. A `FinishedCommit` answers. For another thread."""
        self._handed.put(_Call.LEAVE)

    def want(self, nbytes: int) -> None:
        """Reserve that much for groups as soon as the disk has it, and wake the other thread. For another thread."""
        if nbytes != self._groups.wanted_bytes:
            self._groups.wanted_bytes = nbytes
            self._handed.put(_Call.CHORES)

    def join(self) -> None:
        """Wait for the thread to end. For another thread."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take():
                began = time.monotonic()
                # Taken before: of the priority batches, those handed over earlier than it wait by now.
                batch = self._batches.popleft() if self._batches else None
                self._commit_priority()
                if batch is not None:
                    self._commit(batch)
                self.busy_s += time.monotonic() - began
                self._chore()
            self._finish()
        except OSError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("journal failed")
            self._fail(OSError(f"{type(error).__name__}: {error}"))

    def _take(self) -> bool:
        """Do chores until a batch may wait; False at the end."""
        while True:
            match self._next_call():
                case _Call.COMMIT:
                    return True
                case _Call.END:
                    return False
                case _Call.LEAVE:
                    self._groups.leave()
                    self.finished.append(FinishedCommit(None, self._groups.take_sealed()))
                    self._wake()
                case _Call.CHORES:
                    continue

    def _next_call(self) -> "_Call":
        try:
            return self._handed.get(block=False)
        except queue.Empty:
            if self._chore():
                return _Call.CHORES
        left_s = min(self._events_due, self._groups.retry_at) - time.monotonic()
        try:
            return self._handed.get(timeout=None if left_s == float("inf") else max(left_s, 0.0))
        except queue.Empty:
            return _Call.CHORES

    def _commit_priority(self) -> None:
        """Commit all priority batches that wait. A batch of groups may be half written: they commute with it."""
        batches = [self._priority.popleft() for _ in range(len(self._priority))]
        if batches:
            entries = (entry for batch in batches for entry in batch.entries)
            self._write_events([entry for entry in entries if isinstance(entry, Event)], sync=True)
            self._events.settle()
            self.commits += 1
            self.finished += [FinishedCommit(batch, []) for batch in batches]
            self._wake()

    def _commit(self, batch: CommitBatch) -> None:
        events: list[Event] = []
        bodies = iter(batch.bodies)
        for entry in batch.entries:
            if isinstance(entry, StoredGroup):
                events.append(self._store(entry, entry.accepted_wall, entry.table, entry.body, *next(bodies)))
                if self._priority:
                    self._commit_priority()
            elif isinstance(entry, LogRotation):
                self._write(events, sync=True)
                self._groups.settle()
                self._events.settle()
                events = []
                self._rotate(entry.snapshot)
            else:
                events.append(entry)
        self._write(events, sync=batch.sync_log or bool(batch.dead))
        self._groups.settle()
        self._events.settle()
        self._removals += batch.dead
        self.commits += 1
        self.finished.append(FinishedCommit(batch, self._groups.take_sealed()))
        self._wake()

    def _store(
        self,
        group: StoredGroup | Accepted,
        at: float,
        table: ColumnTable,
        body: GroupBody,
        frames: Frames,
        in_blocks: bool,
    ) -> Accepted:
        """Write a group, and return its `Accepted` event with the address, to be written at once."""
        header: Any = msgspec.Raw(encode(group.header))  # shared: it is most of the record and of the event
        order, env, split, run = group.order, group.env, group.split, group.run
        producer, session, requeued = group.producer, group.session, group.requeued
        meta = encode(
            GroupMeta(order, header, env, split, run, producer, session, self._encoded(table), at, requeued)
        )
        segment, offset = body.place = self._groups.append(
            meta, frames, body.nbytes, group.header.crc, in_blocks=in_blocks
        )
        place = RecordAddress(segment.number, offset)
        return Accepted(order, header, env, split, run, producer, session, at, place, requeued)

    def _encoded(self, table: ColumnTable) -> ColumnTable:
        """Return a table in its encoded form: tables are few, and groups are many."""
        found = self._tables.get(table.id)
        if found is None:
            found = self._tables[table.id] = msgspec.Raw(encode(table))
        return found  # type: ignore[return-value]

    def _write(self, events: Sequence[Event], *, sync: bool) -> None:
        """Make the groups durable, then write the events; with `sync`, sync them too."""
        self._groups.commit()
        self._write_events(events, sync=sync)

    def _write_events(self, events: Sequence[Event], *, sync: bool) -> None:
        if events:
            self._events.append(events)
        if not self._syncs:
            return
        if sync:
            self._sync_events()
        elif events and self._events_due == float("inf"):
            self._events_due = time.monotonic() + EVENTS_SYNC_S

    def _sync_events(self) -> None:
        self._events_due = float("inf")
        self._events.sync()

    def _rotate(self, snapshot: list[SnapshotRecord]) -> None:
        previous = self._events
        self._events = self._new_log(previous.number + 1, snapshot)
        self._groups.settle()  # The new log names them, even if the rest of the batch fails.
        previous.close(sync=self._syncs)

    def _new_log(self, number: int, snapshot: list[SnapshotRecord]) -> EventLog:
        items = list(self._placed(snapshot))
        self._groups.commit()
        self._pruned = False
        return self._event_retry.persist(
            partial(
                EventLog,
                self._directory,
                number,
                self._groups.number,
                items,
                self._disk,
                self._event_retry,
                syncs=self._syncs,
            )
        )

    def _placed(self, snapshot: Iterable[SnapshotRecord]) -> Iterable[Event]:
        """Yield the records with the addresses of the groups; a group that was never written is written now."""
        tables: dict[str, ColumnTable] = {}
        for item in snapshot:
            if isinstance(item, Table):
                tables[item.table.id] = item.table
            if not isinstance(item, tuple):
                yield item
                continue
            group, body = item
            event = group.accepted
            if body.place is not None:
                segment, offset = body.place
                event = msgspec.structs.replace(event, place=RecordAddress(segment.number, offset))
            elif body.in_memory:
                event = self._store(event, event.at, tables[group.table], body, body.frames, body.in_blocks)
            yield msgspec.structs.replace(group, accepted=event)

    def _chore(self) -> bool:
        """Do one chore; False if there is none."""
        if time.monotonic() >= self._events_due:
            self._sync_events()
            return True
        if any([self._prepare(), self._events.prepare(), self._remove()]):
            return True
        if not self._pruned and not self._config.replay:
            self._pruned = True
            try:
                return prune(self._directory, self._config.history_bytes, self._disk)
            except OSError as error:
                if not passes(error):
                    raise
        return False

    def _prepare(self) -> bool:
        before = self._groups.retry_at, self._groups.room_bytes()
        prepared = self._groups.prepare(sum(self.log_bytes))
        if before != (self._groups.retry_at, self._groups.room_bytes()):
            self._wake()
        return prepared

    def tight(self, behind_bytes: int) -> bool:
        """Return whether the disk has no room for more groups than are on their way. For any thread."""
        return self._groups.tight(behind_bytes)

    def _remove(self) -> bool:
        """Remove an obsolete segment, or several if there are many; False if there is none."""
        count = math.ceil(len(self._removals) / 4)
        for _ in range(count):
            self._groups.discard(self._removals.popleft())
        if count and not self._removals:
            self._note_removals()
        return count > 0

    def _note_removals(self) -> None:
        try:
            if self._syncs:
                self._disk.sync_directory(self._directory)
        except OSError as error:
            if not passes(error):  # After a power cut the name may return; the next life removes it again.
                raise
        else:
            self._groups.discarded()

    def _make_room(self) -> None:
        while self._remove():
            pass
        self._groups.drop_spares()

    def _make_room_for_events(self) -> None:
        self._make_room()
        self._reserve.give_up()

    def _finish(self) -> None:
        self._make_room_for_events()
        self._groups.close()
        self._events.close(sync=True)
        self._disk.sync_directory(self._directory)

    def _fail(self, error: OSError) -> None:
        logger.error("journal failed error=%s", error)
        # An event must not outlive the groups that it names: they go only if it is gone.
        self._groups.abandon(cut=self._events.abandon())
        with suppress(OSError):
            self._reserve.give_up()
        self.failure = error
        self._wake()
