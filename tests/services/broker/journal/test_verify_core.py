"""The verifier against a real core with restarts: the ledger adds up, and any loss shows."""

import shutil
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize
from tests.services.broker import test_core_machine
from tests.services.broker.bench import WALL, Bench
from tests.services.broker.test_core_machine import SETTINGS, Machine

from rolloutmq.schemas.files import AckedGroup
from rolloutmq.services.broker.actions import Action, Bury
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.format.events import Began
from rolloutmq.services.broker.journal.inspect.explain import group_histories
from rolloutmq.services.broker.journal.inspect.verify import Verdict, Witness, verify
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.stored_group import BodyMemory

DURABLE_S = 10.0


class JournaledBench(Bench):
    """A core with a real journal."""

    def __init__(self, directory: Path) -> None:
        super().__init__(SETTINGS)
        self.shadowed = False
        self.directory = directory
        self.lives = 0
        self.dead = DeadLetterStore(directory / "dead", 1 << 20, sync=False)
        self.open()

    def open(self) -> None:
        """Begin a life of the core with the journal's contents."""
        self.lives += 1
        config = self.settings.broker.model_copy(update={"segment_bytes": 1 << 16, "commit_ms": 0.0})
        self.disk = Journal(self.directory / "journal", config, BodyMemory(1 << 20), lambda: None)
        found = self.disk.recover()
        assert not found.damage
        self.core = BrokerCore(self.settings, epoch=self.lives)
        assert not self.core.restore(found.events, found, self.now, WALL)
        self.disk.start([*self.core.snapshot(), Began(self.lives, 1, "disk")])

    def restart(self) -> None:
        self.catch_up()
        self.disk.close()
        self.open()

    def _done(self, actions: list[Action]) -> list[Action]:
        entries = self.core.events()
        self.disk.append(entries)
        if self.disk.ticket % 7 == 0:
            self.disk.rotate(self.core.snapshot())
        for action in actions:
            if isinstance(action, Bury):
                self.dead.bury(action.group, action.frames, action.reason, WALL)
        self.disk.advance(time.monotonic(), urgent=True)
        return super()._done(actions)

    def catch_up(self) -> None:
        """Wait until everything is durable."""
        until = time.monotonic() + DURABLE_S
        while self.disk.done < self.disk.ticket:
            assert time.monotonic() < until
            self.disk.advance(time.monotonic(), urgent=True)

    def verify(self, *acked: str) -> Verdict:
        lines = [AckedGroup(group_id=name, session=1, seq=1, at=0.0) for name in acked]
        return verify(self.directory / "journal", self.directory / "dead", lambda: Witness(lines))


class Journaled(Machine):
    """The machine of the core, with a journal verified at the end."""

    bench: JournaledBench

    @initialize()
    def begin(self) -> None:
        self.files = tempfile.TemporaryDirectory()
        bench = JournaledBench(Path(self.files.name))
        with patch.object(test_core_machine, "Bench", lambda _: bench):
            super().begin()

    def teardown(self) -> None:
        try:
            self.look()
            self.lose()
            super().teardown()
            self.look()
        finally:
            self.bench.disk.close()
            self.files.cleanup()

    def look(self) -> None:
        """Check the journal against the core, and against the producers' acks."""
        bench = self.bench
        bench.catch_up()
        acked = set().union(*(producer.acked for producer in self.producers))
        verdict = bench.verify(*acked)
        assert verdict.problems == []
        counts = bench.pressure().ledger
        assert verdict.counts == {state: getattr(counts, state) for state in verdict.counts}
        assert (verdict.accepted, verdict.rewound) == (counts.accepted, counts.rewound)
        for name in sorted(acked)[:3]:
            (story,) = group_histories(bench.directory / "journal", name)
            assert story.moments[0].event == "accepted"

    def lose(self) -> None:
        """Remove needed files from a copy: each of their groups is named."""
        copy = self.bench.directory / "copy"
        shutil.copytree(self.bench.directory / "journal", copy)
        for path in copy.glob("groups-*.rmq"):
            path.unlink()
        verdict = verify(copy, self.bench.directory / "dead", Witness)
        assert set(self.bench.waiting()) <= {problem.group_id for problem in verdict.problems}


TestJournaled = Journaled.TestCase
TestJournaled.settings = settings(
    max_examples=8,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
