"""The thread that writes: takes batches of what happened, makes each one durable, and tidies up in between.

    commit   groups to their segments, sync; facts to the log; sync that too if more happened than acceptances.
             Batches of facts that go ahead come first of all that was handed over; the others in their order
    chores   the next segment ahead of time, zeros ahead in the log, facts of acceptances synced within a second,
             segments removed that nobody needs, old logs removed: one after each commit, the rest when idle

A fact is written when the group that it names is durable, and a segment is removed when the facts that say so are.
When the disk fails nothing more is written, synced or said to be durable.
"""

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Durability
from rolloutmq.schemas.envelope import ColumnTable
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.appender import Patience, passes
from rolloutmq.services.broker.journal.body import Body, Frames, Ram
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.factlog import FactLog, prune
from rolloutmq.services.broker.journal.facts import Accepted, Fact, GroupMeta, Place, Table
from rolloutmq.services.broker.journal.grouplog import GroupLog
from rolloutmq.services.broker.journal.packing import encode
from rolloutmq.services.broker.journal.segments import Segment, Segments
from rolloutmq.services.broker.log import Entry, SnapshotItem

logger = logging.getLogger(__name__)

FACTS_SYNC_S: Final = 1.0
"""The facts of acceptances are durable by then; until they are, the segments speak for them."""


@dataclass
class Turn:
    """A new log of facts begins here."""

    snapshot: list[SnapshotItem]


@dataclass
class Batch:
    """What is made durable together."""

    number: int = 0
    """In the order in which batches began; 0 before anything is in it."""
    ahead: bool = False
    """It is facts, and need not wait for groups that came before."""
    entries: list[Entry | Turn] = field(default_factory=list)
    bodies: list[tuple[Frames, bool]] = field(default_factory=list)
    """The frames of the groups among the entries, which their bodies may have let go by the time they are written, and
    whether they lie in blocks of memory.
    """
    nbytes: int = 0
    binding: bool = False
    """Something but acceptances is in it."""
    dead: list[Segment] = field(default_factory=list)
    """Segments that may go after it."""


@dataclass
class Commit:
    """A batch that is durable."""

    batch: Batch
    sealed: list[Segment]


class Committer:
    """Writes batches. All but the constructor, `begin` and what says otherwise belongs to its thread.

    Attributes:
        finished: Commits in their order, for another thread to take.
        failure: Why the disk failed; no commit comes after it.
        commits, busy_s: How many commits there were, and the seconds they took.
    """

    def __init__(
        self,
        directory: Path,
        config: BrokerConfig,
        segments: Segments,
        ram: Ram,
        wake: Callable[[], None],
        disk: Disk,
    ) -> None:
        self.patience = Patience(wake)
        self.finished: deque[Commit] = deque()
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
        self._batches: deque[Batch] = deque()
        self._ahead: deque[Batch] = deque()
        self._handed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each batch in the two above, False for the end."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._groups: GroupLog
        self._facts: FactLog
        self._facts_due = float("inf")
        self._removals: deque[Segment] = deque()
        self._pruned = False
        self._tables: dict[str, msgspec.Raw] = {}
        self.patience.meanwhile = self._make_room

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def log_bytes(self) -> tuple[int, int]:
        """Bytes of the present log's snapshot, and of the facts after it. For any thread."""
        return self._facts.snapshot_bytes, self._facts.facts_bytes

    def begin(self, log: int, segment: int, snapshot: list[SnapshotItem]) -> None:
        """Write the first log of this life and start the thread; blocks. `segment` is the first number to use."""
        self._groups = GroupLog(self._segments, self._config, self._ram, self._disk, self.patience, segment)
        try:
            self._facts = self._new_log(log, snapshot)
        except BaseException:
            self._groups.abandon(cut=False)
            raise
        self._thread.start()

    def put(self, batch: Batch | None) -> None:
        """Hand over a batch; None ends the thread after those before it. For another thread."""
        if batch is not None:
            (self._ahead if batch.ahead else self._batches).append(batch)
        self._handed.put(batch is not None)

    def join(self) -> None:
        """Wait for the thread to end. For another thread."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (batch := self._take()) is not None:
                self._commit(batch)
                self._chore()
            self._finish()
        except OSError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("journal failed")
            self._fail(OSError(f"{type(error).__name__}: {error}"))

    def _take(self) -> Batch | None:
        while True:
            try:
                return self._first(self._handed.get(block=False))
            except queue.Empty:
                if self._chore():
                    continue
            try:
                left_s = min(self._facts_due, self._groups.retry_at) - time.monotonic()
                timeout = None if left_s == float("inf") else max(left_s, 0.0)
                return self._first(self._handed.get(timeout=timeout))
            except queue.Empty:
                continue

    def _first(self, more: bool) -> Batch | None:
        return (self._ahead or self._batches).popleft() if more else None

    def _commit(self, batch: Batch) -> None:
        began = time.monotonic()
        facts: list[Fact] = []
        bodies = iter(batch.bodies)
        for entry in batch.entries:
            if isinstance(entry, StoredGroup):
                facts.append(self._accept(entry, *next(bodies)))
            elif isinstance(entry, Turn):
                self._write(facts, binding=True)
                self._groups.settle()
                self._facts.settle()
                facts = []
                self._turn(entry.snapshot)
            else:
                facts.append(entry)
        self._write(facts, binding=batch.binding or bool(batch.dead))
        self._groups.settle()
        self._facts.settle()
        self._removals += batch.dead
        self.commits += 1
        self.busy_s += time.monotonic() - began
        self.finished.append(Commit(batch, self._groups.take_sealed()))
        self._wake()

    def _accept(self, group: StoredGroup, frames: Frames, in_blocks: bool) -> Accepted:
        return self._store(group.accepted(), group.table, group.body, frames, in_blocks)

    def _store(
        self, fact: Accepted, table: ColumnTable, body: Body, frames: Frames, in_blocks: bool
    ) -> Accepted:
        """Write a group, and return the fact of its acceptance with the place that it got, to be written at once."""
        header: Any = msgspec.Raw(encode(fact.header))  # for both: it is most of either
        meta = GroupMeta(
            fact.order,
            header,
            fact.env,
            fact.split,
            fact.run,
            fact.producer,
            fact.session,
            self._encoded(table),
            fact.at,
            fact.requeued,
        )
        segment, offset = body.place = self._groups.append(
            encode(meta), frames, body.nbytes, fact.header.crc, in_blocks=in_blocks
        )
        place = Place(segment.number, offset)
        return Accepted(
            fact.order,
            header,
            fact.env,
            fact.split,
            fact.run,
            fact.producer,
            fact.session,
            fact.at,
            place,
            fact.requeued,
        )

    def _encoded(self, table: ColumnTable) -> ColumnTable:
        """Return a table as it is written, in place of the table itself: there are few, and groups are many."""
        found = self._tables.get(table.id)
        if found is None:
            found = self._tables[table.id] = msgspec.Raw(encode(table))
        return found  # type: ignore[return-value]

    def _write(self, facts: Sequence[Fact], *, binding: bool) -> None:
        """Make the groups durable, then write the facts, and sync them too if they are binding."""
        self._groups.commit()
        if facts:
            self._facts.append(facts)
        if not self._syncs:
            return
        if binding:
            self._sync_facts()
        elif facts and self._facts_due == float("inf"):
            self._facts_due = time.monotonic() + FACTS_SYNC_S

    def _sync_facts(self) -> None:
        self._facts_due = float("inf")
        self._facts.sync()

    def _turn(self, snapshot: list[SnapshotItem]) -> None:
        former = self._facts
        self._facts = self._new_log(former.number + 1, snapshot)
        self._groups.settle()  # The new log names them, whatever comes of the rest of the batch.
        former.close(sync=self._syncs)

    def _new_log(self, number: int, snapshot: list[SnapshotItem]) -> FactLog:
        items = list(self._placed(snapshot))
        self._groups.commit()
        self._pruned = False
        return self.patience.persist(
            partial(
                FactLog,
                self._directory,
                number,
                self._groups.number,
                items,
                self._disk,
                self.patience,
                syncs=self._syncs,
            )
        )

    def _placed(self, snapshot: Iterable[SnapshotItem]) -> Iterable[Fact]:
        """Yield the items with the places of the groups; a group that was never written is written now."""
        tables: dict[str, ColumnTable] = {}
        for item in snapshot:
            if isinstance(item, Table):
                tables[item.table.id] = item.table
            if not isinstance(item, tuple):
                yield item
                continue
            group, body = item
            fact = group.accepted
            if body.place is not None:
                segment, offset = body.place
                fact = msgspec.structs.replace(fact, place=Place(segment.number, offset))
            elif body.in_memory:
                fact = self._store(fact, tables[group.table], body, body.frames, body.in_blocks)
            yield msgspec.structs.replace(group, accepted=fact)

    def _chore(self) -> bool:
        """Do a little of what need not be done during a commit; False if there is nothing."""
        if time.monotonic() >= self._facts_due:
            self._sync_facts()
            return True
        if any([self._prepare(), self._facts.prepare(), self._remove()]):
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
        lacked = self._groups.retry_at
        prepared = self._groups.prepare()
        if lacked != self._groups.retry_at:
            self._wake()
        return prepared

    def tight(self, behind_bytes: int) -> bool:
        """Whether there is no room for more groups than are on their way. For any thread."""
        return self._groups.tight(behind_bytes)

    def _remove(self) -> bool:
        """Remove a segment that may go, or more if many may; False if there is none."""
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
            if not passes(error):  # A name that comes back is removed again by a later life.
                raise
        else:
            self._groups.discarded()

    def _make_room(self) -> None:
        while self._remove():
            pass
        self._groups.drop_spares()

    def _finish(self) -> None:
        self._make_room()
        self._groups.close()
        self._facts.close(sync=True)
        self._disk.sync_directory(self._directory)

    def _fail(self, error: OSError) -> None:
        logger.error("journal failed error=%s", error)
        # A fact must not outlive the groups that it names: they go only if it is gone.
        self._groups.abandon(cut=self._facts.abandon())
        self.failure = error
        self._wake()
