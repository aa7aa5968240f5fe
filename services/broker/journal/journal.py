"""The journal: makes events and groups durable in commit batches (group commit), written by a thread of its own.

    append    adds events and groups to the open batch, or to the priority batch (see `write.priority_lane`)
    advance   collects finished commits and hands over batches: priority events at once, groups when they are due
    rotate    starts a new event log with a snapshot, behind everything appended so far

Batches are numbered in the order in which they began. Batches of groups are written in their order. Priority events
are handed over at once, and wait for one write or one sync of groups at most. Before a batch of groups is handed over,
all priority events are. A batch is done when it is synced at `disk`, and when it is written at `os`.

All methods belong to the thread of the data plane. It appends the events of a change before it calls `advance`:
records released by the change leave the disk with the batch handed over then.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.shm.arena_allocator import PAGED_BYTES
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.errors import JournalFailedError, JournalWaitsError
from rolloutmq.schemas.wire.control import JournalStatus
from rolloutmq.schemas.wire.envelope import GroupHeader
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.disk import Disk, passes
from rolloutmq.services.broker.journal.event_buffer import Entry, SnapshotRecord
from rolloutmq.services.broker.journal.format.records import BLOCK_BYTES
from rolloutmq.services.broker.journal.read.recovery import Recovered, recover
from rolloutmq.services.broker.journal.read.segments import SegmentStore
from rolloutmq.services.broker.journal.stored_group import BodyMemory, StoredGroup
from rolloutmq.services.broker.journal.write.commit_thread import (
    CommitBatch,
    CommitThread,
    LogRotation,
)
from rolloutmq.services.broker.journal.write.priority_lane import PriorityLane

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 64 << 20
"""Size of a full batch. All producers together seldom have a sixth of it under way; smaller batches make a disk a fifth
slower when it is the only bottleneck.
"""
IDLE_BYTES: Final = 1 << 20
"""Above this, a waiting batch is written as soon as the thread is idle, whenever the last commit was."""
HANDED_LIMIT: Final = 2
"""Most full batches handed over: the thread goes on with the second while the first is collected."""
BEHIND_SLOW_BYTES: Final = 64 << 20
"""Above this many undurable bytes, the disk counts as slow."""
BEHIND_LIMIT_BYTES: Final = 96 << 20
"""Most undurable bytes."""
SNAPSHOT_AFTER_BYTES: Final = 32 << 20
"""Growth of an event log beyond its snapshot that is worth a new log."""
START_PATIENCE_S: Final = 15.0
"""How long a full disk is waited for at the start.

Then the broker ends, and its supervisor restarts it. The time is longer than a life that counts as a crash, so
restarts are never given up, and shorter than the time for an orderly end.
"""
PATIENCE_S: Final = 5.0
"""How long a full disk is waited for at the end."""
_EVENT_BYTES: Final = 200
"""Typical size of an event."""
META_BYTES: Final = 4096
"""Most bytes of a group's record beside its frames: header, names and column table."""
FLUSH_BYTES: Final = 4 * BLOCK_BYTES
"""Room for the end of a write behind the last group."""


def room_of(group: GroupHeader) -> int:
    """Return the most bytes a group takes in a segment among others; see `write.direct_writer`."""
    large = 2 * BLOCK_BYTES if group.nbytes >= PAGED_BYTES else group.nbytes // 64
    return group.nbytes + large + META_BYTES + group.frames * 8


def _room_of(groups: Iterable[GroupHeader]) -> int:
    """Return the most bytes these groups take at the end of the others; 0 for none."""
    need = sum(map(room_of, groups))
    return need and need + FLUSH_BYTES


class Journal:
    """Makes events and groups durable.

    Attributes:
        ticket: Number of the newest batch with content, 0 before the first.
        done: Every batch up to this number is durable.
        priority_ticket, priority_done: The same for the batches of the priority lane.
        behind_bytes: Bytes appended and not durable.
    """

    def __init__(
        self,
        directory: Path,
        config: BrokerConfig,
        ram: BodyMemory,
        wake: Callable[[], None],
        disk: Disk | None = None,
    ) -> None:
        """Open a journal; its thread calls `wake` after each commit, and when its health changes."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ticket = self.priority_ticket = 0
        self.done = self.priority_done = 0
        self.behind_bytes = 0
        self._behind_room = 0
        """Room that the undurable groups may take in segments."""
        self._leaving = False
        """The present segment is being left: no group may be accepted into its rest."""
        self._directory = directory
        self._config = config
        self._ram = ram
        self._disk = disk or Disk()
        self._commit_s = config.commit_ms / 1e3
        self._segments = SegmentStore(directory, self._disk, keep_all=config.replay)
        self._commit_thread = CommitThread(directory, config, self._segments, ram, wake, self._disk)
        self._recovered: Recovered | None = None
        self._batches = deque([CommitBatch()])
        """Batches not handed over: full ones, and the open one."""
        self._priority_batch = CommitBatch(priority=True)
        self._lane = PriorityLane()
        self._unfinished: dict[int, None] = {}
        """Numbers of the batches that began and are not done, in their order."""
        self._last_number = 0
        self._handed = 0
        """Batches of groups handed over and not done."""
        self._began_at = float("-inf")
        self._rotating = False

    def recover(self) -> Recovered:
        """Read the files of an earlier life; blocks. Call it before `start`."""
        self._recovered = recover(self._directory, self._segments, self._ram, self._disk)
        return self._recovered

    def start(self, snapshot: Iterable[SnapshotRecord], *, keep_old: bool = False) -> None:
        """Start a new event log with the state, and the commit thread; blocks while the disk is full, up to a limit.

        With `keep_old` no segment of an earlier life is ever removed: after damage, one of them may hold groups
        without events.

        Raises:
            JournalWaitsError: The disk stayed full; a later start may succeed.
            JournalFailedError: The disk failed.
        """
        if keep_old:
            self._segments.keep_present()
        previous = self._recovered or self.recover()
        items = list(snapshot)
        self._report_missing(items)
        self._commit_thread.hurry(START_PATIENCE_S)
        try:
            self._sync_recovered(previous)
            self._commit_thread.begin(previous.log_number + 1, previous.segment_number + 1, items)
        except OSError as error:
            failed = JournalWaitsError if passes(error) else JournalFailedError
            raise failed(str(self._directory), str(error)) from error
        self._commit_thread.relax()
        for item in items:
            if isinstance(item, tuple):
                item[1].settled_on_disk()
        self._segments.settle()

    def _sync_recovered(self, previous: Recovered) -> None:
        """Make recovered groups as durable as configured: they are acked from now on."""
        if self._config.durability is not Durability.DISK:
            return
        for path in previous.unsynced:
            fd = self._disk.open(path)
            try:
                self._disk.fdatasync(fd)
            finally:
                self._disk.close(fd)

    def append(self, entries: Sequence[Entry]) -> None:
        """Add the events of a change to the open batch; never blocks."""
        if not entries:
            return
        if self._lane.fits(entries):
            self._join(self._priority_batch, entries)
            self.priority_ticket = self._priority_batch.number
            return
        if self._batches[-1].nbytes >= BATCH_BYTES:
            self._batches.append(CommitBatch())
        batch = self._batches[-1]
        self._join(batch, entries)
        self._lane.note(entries, batch.number)

    @property
    def priority_open(self) -> bool:
        """Whether every event about leases is durable once the priority lane is."""
        return self._lane.open

    def _join(self, batch: CommitBatch, entries: Sequence[Entry | LogRotation]) -> None:
        self._begin(batch)
        nbytes, room_before = 0, batch.room_bytes
        for entry in entries:
            if isinstance(entry, StoredGroup):
                batch.bodies.append((entry.body.frames, entry.body.in_blocks))
                nbytes += entry.body.nbytes
                batch.room_bytes += room_of(entry.header)
            else:
                batch.sync_log = True
                nbytes += _EVENT_BYTES
        batch.entries += entries
        batch.nbytes += nbytes
        self.behind_bytes += nbytes
        self._behind_room += batch.room_bytes - room_before
        self.ticket = max(self.ticket, batch.number)

    def _begin(self, batch: CommitBatch) -> None:
        if not batch.number:
            self._last_number = batch.number = self._last_number + 1
            self._unfinished[batch.number] = None

    def advance(self, now: float, *, urgent: bool) -> None:
        """Collect finished commits, and hand over the batches that are ready.

        Args:
            now: Monotonic seconds.
            urgent: A peer waits for the open batch: hand it over as soon as the thread is idle.

        Raises:
            JournalFailedError: The disk failed: batches that are not done by now never will be.
        """
        self._collect()
        self.require_sound()
        if self._segments.dead:  # the open batch comes after the events that released them
            self._batches[-1].dead += self._segments.dead
            self._segments.dead.clear()
        if not (self._leaving or self._behind_room) and self._commit_thread.cramped:
            self._leaving = True
            self._commit_thread.leave_segment()
        self._hand_over_priority()
        while self._ready(now, urgent):
            self._began_at = now
            self._hand_over()

    def _ready(self, now: float, urgent: bool) -> bool:
        """Return whether the next batch of groups may be handed over now."""
        if len(self._batches) > 1 or self._batches[0].nbytes >= BATCH_BYTES:
            return self._handed < HANDED_LIMIT
        return not self._handed and self._waiting() and (urgent or now >= self._due())

    def next_deadline(self) -> float:
        """Return the monotonic time of the next `advance` without a wake-up; infinity for none."""
        return float("inf") if self._handed or not self._waiting() else self._due()

    def status(self) -> JournalStatus:
        """Return the journal's health and counts."""
        thread = self._commit_thread
        health = "slow" if self.behind_bytes > BEHIND_SLOW_BYTES else "ok"
        return JournalStatus(
            health="full" if thread.waits or self.tight else health,
            segments=len(self._segments),
            nbytes=self._segments.nbytes,
            behind_bytes=self.behind_bytes,
            commits=thread.commits,
            commit_s=thread.busy_s,
            quarantined=self._segments.quarantine.count,
        )

    def admits(self, groups: Iterable[GroupHeader]) -> bool:
        """Return whether room is reserved for these groups, too.

        A group without room would be waited for by every event behind it, also by those that make room.
        """
        return not self._leaving and self._behind_room + _room_of(groups) <= self._commit_thread.room_bytes()

    def want(self, groups: Iterable[GroupHeader]) -> None:
        """Reserve room for these groups as soon as the disk has it."""
        self._commit_thread.want(_room_of(groups))

    @property
    def full(self) -> bool:
        """Whether no more groups should be appended now. Whether there is room for them, `admits` decides."""
        return self.behind_bytes > min(BEHIND_LIMIT_BYTES, self._config.segment_bytes // 2)

    @property
    def tight(self) -> bool:
        """Whether the disk has no room for more groups."""
        return self._commit_thread.tight(self.behind_bytes)

    @property
    def wants_snapshot(self) -> bool:
        """Whether the event log has grown so much that a new one pays. On a full disk none does: it takes room."""
        snapshot_bytes, events_bytes = self._commit_thread.log_bytes
        return (
            not self._rotating
            and not self.tight
            and events_bytes > max(SNAPSHOT_AFTER_BYTES, 2 * snapshot_bytes)
        )

    def rotate(self, snapshot: Iterable[SnapshotRecord]) -> None:
        """Start a new event log with the state after everything appended so far."""
        self._rotating = True
        rotation = [LogRotation(list(snapshot))]
        self._join(self._batches[-1], rotation)
        self._lane.note(rotation, self._batches[-1].number)

    def close(self, *, snapshot: Iterable[SnapshotRecord] | None = None) -> None:
        """Commit and sync everything, and end the thread; blocks. After a disk failure it only ends. May be called
        twice.
        """
        if self._commit_thread.running:
            if snapshot is not None:
                self.rotate(snapshot)
            self._commit_thread.hurry(PATIENCE_S)
            self._hand_over_priority()
            while self._waiting():
                self._hand_over()
            self._commit_thread.put(None)
            self._commit_thread.join()
        self._collect()
        self._segments.close()

    def require_sound(self) -> None:
        """Raise JournalFailedError if the disk has failed: what was handed over since is in no file."""
        if (failure := self._commit_thread.failure) is not None:
            raise JournalFailedError(str(self._directory), str(failure))

    def _waiting(self) -> bool:
        return bool(self._batches[0].entries or self._batches[0].dead)

    def _due(self) -> float:
        return float("-inf") if self._batches[0].nbytes >= IDLE_BYTES else self._began_at + self._commit_s

    def _hand_over(self) -> None:
        """Hand over the next batch of groups, behind all priority events so far."""
        self._hand_over_priority()
        batch = self._batches.popleft()
        if not self._batches:
            self._batches.append(CommitBatch())
        self._begin(batch)
        self._handed += 1
        self._commit_thread.put(batch)

    def _hand_over_priority(self) -> None:
        if self._priority_batch.entries:
            self._commit_thread.put(self._priority_batch)
            self._priority_batch = CommitBatch(priority=True)

    def _collect(self) -> None:
        finished = self._commit_thread.finished
        while finished:
            commit = finished.popleft()
            if commit.batch is not None:
                self._take_in(commit.batch)
            else:
                self._leaving = False
            for segment in commit.sealed:  # only now: its groups have been counted
                segment.seal()

    def _take_in(self, batch: CommitBatch) -> None:
        for entry in batch.entries:
            if isinstance(entry, StoredGroup):
                entry.body.settled_on_disk()
            elif isinstance(entry, LogRotation):
                self._rotating = False
        self.behind_bytes -= batch.nbytes
        self._behind_room -= batch.room_bytes
        del self._unfinished[batch.number]
        if batch.priority:
            self.priority_done = batch.number
        else:
            self._handed -= 1
            self._lane.finished(batch.number)
        self.done = next(iter(self._unfinished), self._last_number + 1) - 1

    def _report_missing(self, items: list[SnapshotRecord]) -> None:
        """Log the groups of the state without a record; reading each one decides its outcome."""
        missing: dict[str, int] = {}
        for item in items:
            place = item[1].place if isinstance(item, tuple) else None
            if place is not None and place[1] >= self._segments.find(place[0].number).nbytes:
                name = self._segments.path_of(place[0].number).name
                missing[name] = missing.get(name, 0) + 1
        for name, count in missing.items():
            logger.error("segment missing file=%s groups=%d", self._directory / name, count)
