"""Runs to damage: the run directories that a real core and a real journal leave, and the groups that were written.

Each has several segments and event logs, leases and settlements, dead letters, tasks, settings: whatever events there
are. They are made once in a process, and are the same in every process.
"""

import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.recovery.tree import Tree, gathered
from tests.services.broker.bench import WALL, Bench, Peer, config, ids

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import Disconnect, Drain, Reset, SetValues, SetWorkers
from rolloutmq.schemas.wire.envelope import GroupHeader, PolicyVersion
from rolloutmq.schemas.wire.hardware import CordonGpu
from rolloutmq.schemas.wire.replies import Batch, Rejected
from rolloutmq.schemas.wire.requests import Commit, Goodbye
from rolloutmq.schemas.wire.tasks import CancelTasks, NewTask, SubmitTasks, TakeTasks
from rolloutmq.services.broker.actions import Action, Bury
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.format.events import Began
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.stored_group import BodyMemory, StoredGroup
from rolloutmq.services.broker.snapshots import memory_snapshot

DEADLINE_S: Final = 30.0
STEPS: Final = 14
CONSUMER: Final = "c"


class Written(NamedTuple):
    """One accepted group as it was written."""

    header: GroupHeader
    frames: tuple[bytes, ...]


@dataclass
class Run:
    """A run directory, and what was written in it.

    Attributes:
        truth: Every accepted group by its order.
    """

    name: str
    config: RunConfig
    tree: Tree
    truth: dict[int, Written] = field(default_factory=dict)


def settings(durability: str = "os", *, replay: bool = False) -> RunConfig:
    """Return a configuration with small segments."""
    return config(
        broker={
            "durability": durability,
            "replay": replay,
            "segment_bytes": 1 << 16,
            "commit_ms": 0.0,
            "ram_bytes": 1 << 16,
            "high_bytes": 4 << 20,
            "max_group_bytes": 1 << 16,
            "retain_bytes": 1 << 20,
            "exact_wait_s": 0.0,
            "silence_s": 5.0,
            "lease_s": 20.0,
            "max_deliveries": 2,
        },
        batch=8,
        sort={"max_staleness": 3, "group_size": 4},
        maths={"stale": "pass", "weight": 2.0, "group_size": 4},
    )


class Writing(Bench):
    """A core on a journal in a run directory, through several lives."""

    def __init__(self, root: Path, configured: RunConfig) -> None:
        super().__init__(configured)
        self.shadowed = False
        self.layout = RunLayout(root)
        self.truth: dict[int, Written] = {}
        self.lives = 0
        self.dead = DeadLetterStore(self.layout.dead, 1 << 20, sync=False)
        write_json(self.layout.config, configured)
        self.open()

    def open(self) -> None:
        """Begin a life."""
        self.lives += 1
        ram = BodyMemory(self.settings.broker.ram_bytes)
        self._woken = threading.Event()
        self.disk = Journal(self.layout.journal, self.settings.broker, ram, self._woken.set)
        found = self.disk.recover()
        self.core = BrokerCore(self.settings, epoch=self.lives, ram=ram)
        assert not self.core.restore(found.events, found, self.now, WALL)
        self.disk.start([*self.core.snapshot(), Began(self.lives, 1, "os")])

    def _done(self, actions: list[Action]) -> list[Action]:
        entries = self.core.events()
        for entry in entries:
            if isinstance(entry, StoredGroup) and entry.body.load():
                frames = tuple(map(bytes, entry.body.frames))
                self.truth[entry.order] = Written(entry.header, frames)
        self.disk.append(entries)
        for action in actions:
            if isinstance(action, Bury):
                self.dead.bury(action.group, action.frames, action.reason, WALL)
        self.settled()  # each change is a commit of its own, in every process
        return super()._done(actions)

    def settled(self) -> None:
        """Wait until everything is on disk."""
        until = time.monotonic() + DEADLINE_S
        self.disk.advance(time.monotonic(), urgent=True)
        while self.disk.done < self.disk.ticket or self.disk.priority_done < self.disk.priority_ticket:
            assert time.monotonic() < until
            self._woken.wait(0.01)
            self._woken.clear()
            self.disk.advance(time.monotonic(), urgent=True)

    def ended(self) -> None:
        """End in order."""
        self.disk.append(self.core.events())
        self.disk.close(snapshot=self.core.snapshot())


class _Story:
    """What happens in a run; the same for equal seeds."""

    def __init__(self, bench: Writing, seed: int) -> None:
        self.bench = bench
        self._rng = random.Random(seed)
        self._peers = [bench.producer("p0", "sort"), bench.producer("p1", "maths")]
        self._generation = bench.consumer(CONSUMER)
        self._step = self._committed = 0

    def play(self, steps: int) -> None:
        """Take so many steps."""
        for number in range(steps):
            for peer in self._peers:
                self._send(peer, self._rng.randint(1, 3))
            self.bench.send_beat(CONSUMER)
            self.bench.tick(0.6)
            self._train(number)
            if number % 4 == 3:
                self._commit()
            self._happen(number)
        self.bench.settled()

    def _send(self, peer: Peer, count: int) -> None:
        for _ in range(count):
            size = self._rng.choice((200, 900, 5000, 12_000))
            frames = [self._rng.randbytes(size), b"%d" % size]
            nbytes = sum(map(len, frames))
            head = peer.next(nbytes=nbytes, frames=2, crc=checksum(frames), step=self._step)
            peer.deliver(head, frames=frames)

    def _train(self, number: int) -> None:
        got = self.bench.pull(self._step, 8, consumer=CONSUMER)
        if not isinstance(got, Batch):
            return
        names = ids(got)
        if number == 6:  # a trainer that hangs until its lease is lost
            self.bench.tick(6.0)
            self._generation = self.bench.consumer(CONSUMER)
            return
        rejected = tuple(Rejected(group_id=name, reason="odd") for name in names[:1] if number % 3 == 1)
        left = names[len(rejected) :]
        trained, filtered = left[: len(left) - number % 2], left[len(left) - number % 2 :]
        after = self._step + bool(trained)
        self.bench.settle(
            got,
            consumer=CONSUMER,
            version=PolicyVersion(0, after),
            trained=trained,
            filtered=filtered,
            rejected=rejected,
        )
        self._step = after

    def _commit(self) -> None:
        self.bench.send(Commit(consumer=CONSUMER, version=PolicyVersion(0, self._step)))
        self._committed = self._step

    def _happen(self, number: int) -> None:
        """Let something happen that is no step."""
        bench = self.bench
        match number:
            case 2:
                tasks = tuple(NewTask(id=f"t{n}", env="sort", payload=b"\xa1x") for n in range(4))
                bench.send(SubmitTasks(tasks=tasks))
                taker = self._peers[0]
                bench.send(TakeTasks(producer=taker.name, session=taker.session, number=1, count=2))
                bench.send(CancelTasks(ids=("t3",)))
            case 4:
                bench.send(SetWorkers(env="sort", count=2))
                bench.send(SetValues(values={"broker.lease_s": 30.0}))
                bench.send(CordonGpu(gpu="GPU-0"))
                bench.send(Drain(worker="p1"))
            case 5:
                bench.settled()
                bench.disk.rotate(bench.core.snapshot())
            case 8:  # the trainer resumes from its checkpoint
                resumed = PolicyVersion(0, self._committed)
                self._generation = bench.consumer(CONSUMER, resume=resumed)
                self._step = self._committed
            case 9:  # a killed broker
                bench.settled()
                bench.disk.close()
                bench.open()
                self._generation = bench.consumer(CONSUMER, generation=self._generation)
            case 11:
                peer = self._peers[1]
                bench.send(Goodbye(producer=peer.name, session=peer.session, produced=peer.seq))
                bench.send(Disconnect(env="maths"))
                self._peers[1] = bench.producer("p1", "maths")


@cache
def runs() -> tuple[Run, ...]:
    """Return the runs."""
    return (
        _written("killed", 1, settings(), STEPS),
        _written("ended", 2, settings(), STEPS, ends=True),
        _written("recorded", 3, settings(replay=True), STEPS),
        _written("young", 4, settings(), 2),
        _written("reset", 5, settings(), 4, resets=True),
        _remembered(6),
    )


def _written(
    name: str, seed: int, configured: RunConfig, steps: int, *, ends: bool = False, resets: bool = False
) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "run"
        root.mkdir(mode=0o700)
        bench = Writing(root, configured)
        try:
            _Story(bench, seed).play(steps)
            if resets:
                bench.send(Reset())
                _Story(bench, seed + 100).play(2)
            if ends:
                bench.ended()
            return Run(name, configured, gathered(root), bench.truth)
        finally:
            bench.disk.close()


def _remembered(seed: int) -> Run:
    """Return a run without a journal that ended in order."""
    configured = settings("memory")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "run"
        root.mkdir(mode=0o700)
        bench = Writing(root, settings())
        try:
            _Story(bench, seed).play(5)
            layout = RunLayout(root)
            write_json(layout.config, configured)
            assert all(group.body.load() for group in bench.core._state.groups)
            memory_snapshot.save(layout.saved, bench.core.snapshot())
            tree = {name: data for name, data in gathered(root).items() if not name.startswith("journal/")}
            return Run("remembered", configured, tree, bench.truth)
        finally:
            bench.disk.close()
