"""A trainer with a window that is killed again and again, by its groups or from outside, against a simple model.

Some groups kill whoever gets them. Those end as dead letters, and no other group does: unless its trainer was killed
while it held nothing else, which nobody can tell from a fault of the group. Below its limit the trainer always gets
what is queued.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.services.broker.bench import Bench, config, ids
from tests.services.broker.requests.test_windows import Trainer

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, NoBatch, Wait
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.inspect.ledger_model import LedgerModel

SETTINGS = config(
    broker={"retain_bytes": 1 << 20, "silence_s": 5.0, "lease_s": 20.0},
    a={"stale": "pass"},
    b={"stale": "pass"},
)
KILLS = st.sampled_from(["again", "resumed", "silent", "silent, resumed", "no progress"])


class KillMachine(RuleBasedStateMachine):
    @initialize(window=st.integers(1, 4), groups=st.integers(1, 4), last=KILLS)
    def begin(self, window: int, groups: int, last: str) -> None:
        self.bench = Bench(SETTINGS)
        self.bench.shadowed = False
        self.first_records = 0
        self.peers = [self.bench.producer(env, env) for env in "ab"]
        self.window, self.groups = window, groups
        self.trainer = Trainer(self.bench, window=window, groups=groups)
        self.held: set[str] = set()
        self.ended: set[str] = set()
        """Groups trained or filtered."""
        self.sent: set[str] = set()
        self.poison: set[str] = set()
        self.alone: set[str] = set()
        """Groups that a trainer held alone when it was killed from outside."""
        self.history: list[tuple[int, set[str]]] = []
        """Settlements since the last commit: the step after, and their groups."""
        self.due: list[set[str]] = []
        """Settled steps that a resume has queued again, in their order."""
        self.committed = 0
        self.kills = 0
        self.last = last

    @property
    def dead(self) -> set[str]:
        return {record.group_id for record in self.bench.dropped}

    def in_queue(self) -> set[str]:
        return self.sent - self.held - self.ended - self.dead

    @rule(peer=st.integers(0, 1), poison=st.lists(st.sampled_from([False, False, False, True]), max_size=5))
    def send(self, peer: int, poison: list[bool]) -> None:
        for deadly in poison:
            (name,) = self.peers[peer].send(1, sequences=1 + deadly)
            self.sent.add(name)
            self.poison |= {name} if deadly else set()

    @rule(pulls=st.integers(1, 12), kill=KILLS)
    def pull(self, pulls: int, kill: str) -> None:
        """Pull several times; a deadly group kills the trainer before it does anything else."""
        for _ in range(pulls):
            limit = self.window * self.groups
            got = self.trainer.pull()
            if isinstance(got, NoBatch):
                assert (got.wait is Wait.UNSETTLED) == (len(self.held) >= limit)
                assert got.wait is Wait.UNSETTLED or self.in_queue() == set()
                return
            assert isinstance(got, Batch)
            names = set(ids(got))
            assert names <= self.in_queue()
            assert got.rewound or len(self.held | names) <= limit
            self.check_order(names)
            self.held |= names
            if names & self.poison:
                self.die(kill)
                return

    def check_order(self, names: set[str]) -> None:
        """What was settled comes again in the order of the steps."""
        first = next((step for step in self.due if step & names), None)
        if first is None:
            return
        for earlier in self.due[: self.due.index(first)]:
            assert not earlier - self.dead, "an earlier step is still queued"
        first -= names

    @rule(lives=st.lists(st.tuples(st.integers(0, 12), KILLS), min_size=1, max_size=5))
    def kill(self, lives: list[tuple[int, str]]) -> None:
        """Kill the trainer from outside, some lives in a row."""
        for pulls, kill in lives:
            self.pull(pulls, kill)
            self.alone |= self.held if len(self.held) == 1 else set()
            self.die(kill)

    def die(self, kill: str) -> None:
        self.kills += 1
        if "silent" in kill:
            self.bench.tick(SETTINGS.broker.silence_s + 1)
        elif kill == "no progress":
            for _ in range(6):
                self.bench.send_beat()
                self.bench.tick(4.0)
        step = None
        if "resumed" in kill:
            step = PolicyVersion(0, self.committed)
            again = [groups for after, groups in self.history if after > self.committed]
            self.due = [set(groups) for groups in again]
            self.ended -= set().union(*again)
            self.history.clear()
        self.trainer = Trainer(self.bench, window=self.window, groups=self.groups, resume=step)
        self.trainer.step = self.bench.core._state.run.policy.step if step is None else step.step
        self.held.clear()
        assert self.dead <= self.poison | self.alone, "no other group may end"

    @rule(choice=st.randoms(use_true_random=False), part=st.integers(0, 4))
    def settle(self, choice: "object", part: int) -> None:
        """Train on some of the held groups."""
        names = sorted(self.held)
        choice.shuffle(names)  # type: ignore[attr-defined]
        self.train(names[: len(names) * part // 4])

    def train(self, names: list[str]) -> None:
        if not names:
            return
        assert self.trainer.settle(*names).lost == ()
        self.history.append((self.trainer.step, set(names)))
        self.ended |= set(names)
        self.held -= set(names)

    @rule()
    def commit(self) -> None:
        self.trainer.commit()
        self.committed = self.trainer.step
        self.history.clear()

    @rule()
    def restart(self) -> None:
        """Kill the broker. What its journal tells must be what it knew."""
        self.verify()
        self.bench.restart()
        self.first_records = len(self.bench.journal.events)
        self.trainer.generation = self.bench.consumer(generation=self.trainer.generation)

    def verify(self) -> None:
        """Compare the ledger with the journal's, and with this model."""
        model, journal = LedgerModel(), self.bench.journal
        model.open(journal.events[: self.first_records])  # type: ignore[arg-type]
        for event in journal.events[self.first_records :]:
            model.apply(event)  # type: ignore[arg-type]
        assert model.problems == []
        ledger, counted = self.bench.pressure().ledger, model.counts()
        assert {state: getattr(ledger, state.value) for state in GroupState} == counted
        assert ledger.leased == len(self.held)
        assert ledger.trained + ledger.committed == len(self.ended)
        assert ledger.dead == len(self.dead)
        assert ledger.queued == len(self.in_queue())

    def teardown(self) -> None:
        """The trainer goes on, killed in one way: the deadly groups end, and all others are trained."""
        if not hasattr(self, "bench"):
            return
        self.verify()
        most = self.kills + 4 * len(self.poison)
        before, self.kills = self.kills, 0
        for _ in range(1000):
            self.pull(100, self.last)
            if not self.in_queue():
                break
            if len(self.held) >= self.window * self.groups:
                self.train(sorted(self.held))
                self.commit()
        self.train(sorted(self.held))
        assert not self.in_queue()
        assert self.poison <= self.dead
        assert self.kills <= most, (before, self.kills)
        self.verify()


TestKillMachine = KillMachine.TestCase
TestKillMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
