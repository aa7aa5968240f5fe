"""A consumer with a window against a simple model: any mix of settlements, losses, rewinds and restarts."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.services.broker.bench import Bench, config, ids
from tests.services.broker.requests.test_windows import Trainer

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, NoBatch, Settled, Wait
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.inspect.ledger_model import LedgerModel

WINDOW = 3
SETTINGS = config(
    broker={"retain_bytes": 1 << 20, "silence_s": 5.0, "lease_s": 20.0, "max_deliveries": 100},
    a={"stale": "pass"},
    b={"stale": "pass"},
)


class WindowMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.bench = Bench(SETTINGS)
        self.bench.shadowed = False
        self.first_records = 0
        self.peers = [self.bench.producer(env, env) for env in "ab"]
        self.trainer = Trainer(self.bench, window=WINDOW, groups=3)
        self.held: dict[str, int] = {}
        """Groups in the trainer's hand, with the number of their pull."""
        self.history: list[tuple[int, tuple[str, ...]]] = []
        """Settlements since the last commit: the step after, and their groups."""
        self.trained: set[str] = set()
        self.filtered: set[str] = set()
        self.dead: set[str] = set()
        self.sent: set[str] = set()
        self.pulls = 0

    @rule(peer=st.integers(0, 1), sizes=st.lists(st.integers(1, 5), max_size=4))
    def send(self, peer: int, sizes: list[int]) -> None:
        for size in sizes:
            self.sent |= set(self.peers[peer].send(1, sequences=size))

    @rule(groups=st.integers(1, 4), twice=st.booleans())
    def pull(self, groups: int, twice: bool) -> None:
        self.pulls += 1
        request = {"groups": groups, "request_id": f"pull{self.pulls}"}
        got = self.trainer.pull(**request)
        if isinstance(got, NoBatch):
            assert (got.wait is Wait.UNSETTLED) == (len(self.held) >= WINDOW * groups)
            assert got.wait is Wait.UNSETTLED or self.in_queue() == set()
            return
        assert isinstance(got, Batch)
        if twice:
            again = self.trainer.pull(**request)
            assert isinstance(again, Batch)
            assert ids(again) == ids(got)
        assert got.rewound or len(got.groups) <= groups
        assert got.rewound or len(self.held) + len(got.groups) <= WINDOW * groups
        assert set(ids(got)) <= self.in_queue()
        self.held |= dict.fromkeys(ids(got), self.pulls)

    def in_queue(self) -> set[str]:
        return self.sent - self.held.keys() - self.trained - self.filtered - self.dead

    @rule(choice=st.randoms(use_true_random=False), fates=st.text("tttfr-", max_size=9), again=st.booleans())
    def settle(self, choice: "object", fates: str, again: bool) -> None:
        """Settle some of the held groups, in any order; repeat the request in another life of the broker."""
        names = sorted(self.held)
        choice.shuffle(names)  # type: ignore[attr-defined]
        named: dict[str, list[str]] = {"t": [], "f": [], "r": [], "-": []}
        for name, fate in zip(names, fates, strict=False):
            named[fate].append(name)
        request = self.trainer.request(named["t"], named["f"], named["r"])
        reply = self.bench.ask(request, Settled)
        assert reply.lost == ()
        self.trained |= set(named["t"])
        self.filtered |= set(named["f"])
        self.dead |= set(named["r"])
        for name in (*named["t"], *named["f"], *named["r"]):
            del self.held[name]
        if kept := (*named["t"], *named["f"]):
            self.history.append((self.trainer.step if named["t"] else -1, kept))
        if again:
            self.restart()
            assert self.bench.ask(request, Settled) == reply

    @rule()
    def commit(self) -> None:
        self.trainer.commit()
        self.history.clear()
        self.committed_step = self.trainer.step

    @rule()
    def restart(self) -> None:
        """Kill the broker. What its journal tells must be what it knew."""
        self.verify()
        self.bench.restart()
        self.first_records = len(self.bench.journal.events)
        self.trainer.generation = self.bench.consumer(generation=self.trainer.generation)

    @rule(seconds=st.sampled_from([0.0, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass; after silence all leases are lost."""
        self.bench.send_beat()  # otherwise several short times in a row are a silence, too
        self.bench.tick(seconds)
        if seconds > SETTINGS.broker.silence_s:
            self.held.clear()
            self.trainer.generation = self.bench.consumer()

    @rule()
    def crash_and_resume(self) -> None:
        """Start again at the last checkpoint: later settlements come again in their order, then the held groups."""
        step = getattr(self, "committed_step", 0)
        again = [set(kept) for _, kept in self.history]
        waits = any(item.rewound for item in self.bench.core._state.leases) or any(
            True for _ in self.bench.core._state.rewind_buffer.queued()
        )
        self.trainer = Trainer(self.bench, window=WINDOW, groups=3, resume=PolicyVersion(0, step))
        for kept in again:
            self.trained -= kept
            self.filtered -= kept
        self.held.clear()
        self.history.clear()
        if waits:  # then batches of an earlier resume follow, which this model does not order
            return
        for kept in again:
            self.take_again(kept)

    def take_again(self, kept: set[str]) -> None:
        """Pull what one settlement had: its groups come in one lease, or two if some were rewound before."""
        left = set(kept)
        while left:
            if len(self.held) >= WINDOW * 3:
                return
            self.pulls += 1
            got = self.trainer.pull()
            assert isinstance(got, Batch)
            assert got.rewound
            assert set(ids(got)) <= left
            left -= set(ids(got))
            self.held |= dict.fromkeys(ids(got), self.pulls)

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
        assert ledger.trained + ledger.committed == len(self.trained)
        assert ledger.filtered == len(self.filtered)
        assert ledger.dead == len(self.dead)
        assert ledger.queued == len(self.in_queue())

    def teardown(self) -> None:
        """Everything that was sent is settled in the end, once."""
        if not hasattr(self, "bench"):
            return
        self.verify()
        for _ in range(1000):
            if self.held:
                self.settle_all()
            if not self.in_queue():
                break
            self.pull(3, False)
        assert not self.in_queue()
        self.verify()

    def settle_all(self) -> None:
        names = tuple(self.held)
        assert self.trainer.settle(*names).lost == ()
        self.trained |= set(names)
        self.held.clear()


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
