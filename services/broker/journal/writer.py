"""The journal: what is appended becomes durable in batches, written by a thread of its own while the next one gathers.

    append    joins the open batch, or the batch of facts that go ahead of groups (see `ahead`)
    advance   takes in what was finished, and hands over batches: facts that go ahead at once, groups when it is time
    rotate    begins a new log of facts with a snapshot, behind everything appended so far

All batches have numbers in the order in which they began. Those of groups are written in their order, of bounded size,
so that what goes ahead waits for one of them at most; before one of them is handed over, all that goes ahead is. At
`disk` a batch is done when it is synced, at `os` when it is written.
All methods belong to the thread of the data plane, which appends the facts of a change before it calls `advance`: what
the change let go of is removed from disk with the batch that is handed over then.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.control import JournalStatus
from rolloutmq.schemas.delivery import Durability
from rolloutmq.schemas.errors import JournalFailedError, JournalWaitsError
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.ahead import Ahead
from rolloutmq.services.broker.journal.appender import passes
from rolloutmq.services.broker.journal.body import Ram
from rolloutmq.services.broker.journal.committing import Batch, Commit, Committer, Turn
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.recovery import Recovered, recover
from rolloutmq.services.broker.journal.segments import Segments
from rolloutmq.services.broker.log import Entry, SnapshotItem

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 64 << 20
"""A batch with so much is full. Producers together seldom have a sixth of that under way; with fewer bytes at once, a
disk that is the only thing to wait for is written to a fifth slower."""
IDLE_BYTES: Final = 1 << 20
"""So much waiting is written as soon as the thread is idle, whenever the last commit was."""
HANDED_LIMIT: Final = 2
"""Most full batches that are handed over: the thread goes on with the second while the first is taken in."""
BEHIND_SLOW_BYTES: Final = 64 << 20
"""More than this appended and not durable: the disk does not keep up."""
BEHIND_LIMIT_BYTES: Final = 96 << 20
"""More than this must not wait to be written."""
SNAPSHOT_AFTER_BYTES: Final = 32 << 20
"""A log of facts this much longer than its snapshot is worth a new one."""
START_PATIENCE_S: Final = 15.0
"""How long a full disk is waited for at the beginning. Then the broker ends, and whoever keeps it starts it again: this
is longer than a life that counts as a crash, so that it is never given up, and shorter than what it gets to end in."""
PATIENCE_S: Final = 5.0
"""How long a full disk is waited for at the end."""
_FACT_BYTES: Final = 200
"""About what a fact takes."""


class Journal:
    """Makes what happens last.

    Attributes:
        ticket: Number of the newest batch that something was appended to, 0 before the first.
        done: Every batch up to this number is durable.
        ahead_ticket, ahead_done: The same of the batches of facts that go ahead alone.
        behind_bytes: Appended and not durable.
    """

    def __init__(
        self,
        directory: Path,
        config: BrokerConfig,
        ram: Ram,
        wake: Callable[[], None],
        disk: Disk | None = None,
    ) -> None:
        """`wake` is called by the thread of the journal after each commit, and when its health changes."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ticket = self.ahead_ticket = 0
        self.done = self.ahead_done = 0
        self.behind_bytes = 0
        self._directory = directory
        self._config = config
        self._ram = ram
        self._disk = disk or Disk()
        self._commit_s = config.commit_ms / 1e3
        self._segments = Segments(directory, self._disk, keep_all=config.replay)
        self._committer = Committer(directory, config, self._segments, ram, wake, self._disk)
        self._recovered: Recovered | None = None
        self._batches = deque([Batch()])
        """Not handed over: full ones, and the open one."""
        self._ahead_batch = Batch(ahead=True)
        self._ahead = Ahead()
        self._unfinished: dict[int, None] = {}
        """Numbers of the batches that began and are not done, in their order."""
        self._last_number = 0
        self._handed = self._ahead_handed = 0
        """Batches that were handed over and are not done."""
        self._began_at = float("-inf")
        self._turning = False

    def recover(self) -> Recovered:
        """Read what an earlier life left; blocks. Comes before `start`."""
        self._recovered = recover(self._directory, self._segments, self._ram, self._disk)
        return self._recovered

    def start(self, snapshot: Iterable[SnapshotItem], *, keep_old: bool = False) -> None:
        """Begin a new log of facts with the state, and start to write; blocks while the disk is full, but not for ever.

        With `keep_old` no segment of an earlier life is ever removed: something was damaged, and one of them may hold
        groups that nobody knows of any more.

        Raises:
            JournalWaitsError: There was no room in time; another start may find some.
            JournalFailedError: The disk failed.
        """
        if keep_old:
            self._segments.keep_present()
        former = self._recovered or self.recover()
        items = list(snapshot)
        self._report_missing(items)
        patience = self._committer.patience
        patience.hurry(START_PATIENCE_S)
        try:
            self._sync_former(former)
            self._committer.begin(former.log_number + 1, former.segment_number + 1, items)
        except OSError as error:
            failed = JournalWaitsError if passes(error) else JournalFailedError
            raise failed(str(self._directory), str(error)) from error
        patience.relax()
        for item in items:
            if isinstance(item, tuple):
                item[1].settled_on_disk()
        self._segments.settle()

    def _sync_former(self, former: Recovered) -> None:
        """Make what was read back as durable as the level says: it is acked from now on."""
        if self._config.durability is not Durability.DISK:
            return
        for path in former.unsynced:
            fd = self._disk.open(path)
            try:
                self._disk.fdatasync(fd)
            finally:
                self._disk.close(fd)

    def append(self, entries: Sequence[Entry]) -> None:
        """Let what happened join the open batch; never blocks."""
        if not entries:
            return
        if self._ahead.fits(entries):
            self._join(self._ahead_batch, entries)
            self.ahead_ticket = self._ahead_batch.number
            return
        if self._batches[-1].nbytes >= BATCH_BYTES:
            self._batches.append(Batch())
        batch = self._batches[-1]
        self._join(batch, entries)
        self._ahead.note(entries, batch.number)

    @property
    def ahead(self) -> bool:
        """Whether all that was ever appended of leases is durable when all that goes ahead is."""
        return self._ahead.open

    def _join(self, batch: Batch, entries: Sequence[Entry | Turn]) -> None:
        self._begin(batch)
        nbytes = 0
        for entry in entries:
            if isinstance(entry, StoredGroup):
                batch.bodies.append((entry.body.frames, entry.body.in_blocks))
                nbytes += entry.body.nbytes
            else:
                batch.binding = True
                nbytes += _FACT_BYTES
        batch.entries += entries
        batch.nbytes += nbytes
        self.behind_bytes += nbytes
        self.ticket = max(self.ticket, batch.number)

    def _begin(self, batch: Batch) -> None:
        if not batch.number:
            self._last_number = batch.number = self._last_number + 1
            self._unfinished[batch.number] = None

    def advance(self, now: float, *, urgent: bool) -> None:
        """Take in what was finished, and hand over what is ready.

        Args:
            now: Monotonic seconds.
            urgent: Somebody waits for the open batch: begin with it as soon as the thread is idle.

        Raises:
            JournalFailedError: The disk failed: what is not done by now never will be.
        """
        self._collect()
        failure = self._committer.failure
        if failure is not None:
            raise JournalFailedError(str(self._directory), str(failure))
        if self._segments.dead:  # the open batch comes after all facts that say why they are
            self._batches[-1].dead += self._segments.dead
            self._segments.dead.clear()
        if not self._ahead_handed:
            self._hand_over_ahead()
        while self._ready(now, urgent):
            self._began_at = now
            self._hand_over()

    def _ready(self, now: float, urgent: bool) -> bool:
        """Whether the next batch of groups may be handed over now."""
        if len(self._batches) > 1 or self._batches[0].nbytes >= BATCH_BYTES:
            return self._handed < HANDED_LIMIT
        return not self._handed and self._waiting() and (urgent or now >= self._due())

    def next_deadline(self) -> float:
        """Return the monotonic time at which `advance` has something to do without a wake-up; infinity for none."""
        return float("inf") if self._handed or not self._waiting() else self._due()

    def status(self) -> JournalStatus:
        """Return how the journal does."""
        committer = self._committer
        health = "slow" if self.behind_bytes > BEHIND_SLOW_BYTES else "ok"
        return JournalStatus(
            health="full" if committer.patience.full or self.tight else health,
            segments=len(self._segments),
            nbytes=self._segments.nbytes,
            behind_bytes=self.behind_bytes,
            commits=committer.commits,
            commit_s=committer.busy_s,
            quarantined=self._segments.quarantine.count,
        )

    @property
    def full(self) -> bool:
        """Whether no more groups should be appended now.

        What is behind must fit into the present segment, even if there is no room for another.
        """
        return self.tight or self.behind_bytes > min(BEHIND_LIMIT_BYTES, self._config.segment_bytes // 2)

    @property
    def tight(self) -> bool:
        """Whether there is no room on the disk for more groups."""
        return self._committer.tight(self.behind_bytes)

    @property
    def wants_snapshot(self) -> bool:
        """Whether the log of facts has grown so much that a new snapshot pays."""
        snapshot_bytes, facts_bytes = self._committer.log_bytes
        return not self._turning and facts_bytes > max(SNAPSHOT_AFTER_BYTES, 2 * snapshot_bytes)

    def rotate(self, snapshot: Iterable[SnapshotItem]) -> None:
        """Let a new log of facts begin with the state as it is after everything appended so far."""
        self._turning = True
        turn = [Turn(list(snapshot))]
        self._join(self._batches[-1], turn)
        self._ahead.note(turn, self._batches[-1].number)

    def close(self, *, snapshot: Iterable[SnapshotItem] | None = None) -> None:
        """Commit all, sync it, and end; blocks. After the disk failed it only ends. May be called again."""
        if self._committer.running:
            if snapshot is not None:
                self.rotate(snapshot)
            self._committer.patience.hurry(PATIENCE_S)
            self._hand_over_ahead()
            while self._waiting():
                self._hand_over()
            self._committer.put(None)
            self._committer.join()
        self._collect()
        self._segments.close()

    def _waiting(self) -> bool:
        return bool(self._batches[0].entries or self._batches[0].dead)

    def _due(self) -> float:
        return float("-inf") if self._batches[0].nbytes >= IDLE_BYTES else self._began_at + self._commit_s

    def _hand_over(self) -> None:
        """Hand over the next batch of groups, behind all that went ahead so far."""
        self._hand_over_ahead()
        batch = self._batches.popleft()
        if not self._batches:
            self._batches.append(Batch())
        self._begin(batch)
        self._handed += 1
        self._committer.put(batch)

    def _hand_over_ahead(self) -> None:
        if self._ahead_batch.entries:
            self._ahead_handed += 1
            self._committer.put(self._ahead_batch)
            self._ahead_batch = Batch(ahead=True)

    def _collect(self) -> None:
        finished = self._committer.finished
        while finished:
            commit = finished.popleft()
            self._take_in(commit)
            number = commit.batch.number
            del self._unfinished[number]
            if commit.batch.ahead:
                self._ahead_handed -= 1
                self.ahead_done = number
            else:
                self._handed -= 1
                self._ahead.finished(number)
            self.done = next(iter(self._unfinished), self._last_number + 1) - 1

    def _take_in(self, commit: Commit) -> None:
        for entry in commit.batch.entries:
            if isinstance(entry, StoredGroup):
                entry.body.settled_on_disk()
            elif isinstance(entry, Turn):
                self._turning = False
        for segment in commit.sealed:
            segment.seal()
        self.behind_bytes -= commit.batch.nbytes

    def _report_missing(self, items: list[SnapshotItem]) -> None:
        """Say which groups of the state are not there: what becomes of each one is known when it is read."""
        missing: dict[str, int] = {}
        for item in items:
            place = item[1].place if isinstance(item, tuple) else None
            if place is not None and place[1] >= self._segments.find(place[0].number).nbytes:
                name = self._segments.path_of(place[0].number).name
                missing[name] = missing.get(name, 0) + 1
        for name, count in missing.items():
            logger.error("missing file=%s groups=%d", self._directory / name, count)
