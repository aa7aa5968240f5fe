"""The ledger model, kept from events alone, equals the core after every step."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant
from tests.services.broker.bench import Bench
from tests.services.broker.test_core_machine import Machine

from rolloutmq.services.broker.journal.format.events_codec import decode_events, encode
from rolloutmq.services.broker.journal.inspect.ledger_model import LedgerModel, SnapshotModel
from rolloutmq.services.broker.journal.inspect.verify import differences


class Follower:
    """A ledger model beside a core, fed with its events."""

    def __init__(self, bench: Bench) -> None:
        self.accounts = LedgerModel()
        self._bench = bench
        self._journal = bench.journal
        self._read = 0

    def look(self) -> None:
        """Apply new events, and compare the model with the core."""
        self._apply()
        if self._bench.journal is not self._journal:  # the next life, whose journal begins with a snapshot
            self._journal, self._read = self._bench.journal, 0
            self._apply()
        assert self.accounts.problems == []
        assert list(differences(self.accounts, self._books(), "the core")) == []

    def _apply(self) -> None:
        events = self._journal.read()
        for event in events[self._read :]:
            self.accounts.apply(event)
        self._read = len(events)

    def _books(self) -> SnapshotModel:
        found = SnapshotModel()
        items = [entry[0] if isinstance(entry, tuple) else entry for entry in self._bench.core.snapshot()]
        found.open(decode_events(encode(items)))
        assert found.problems == []
        return found


class Followed(Machine):
    """The machine of the core, with a ledger model beside it."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.follower = Follower(self.bench)

    @invariant()
    def accounts_are_those_of_the_core(self) -> None:
        self.follower.look()


TestFollowed = Followed.TestCase
TestFollowed.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
