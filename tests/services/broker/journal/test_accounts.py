"""The accounts that are kept from facts alone are those of the core that said the facts, whatever happens to it."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant
from tests.services.broker.bench import Bench
from tests.services.broker.test_core_machine import Machine

from rolloutmq.services.broker.journal.accounts import Accounts
from rolloutmq.services.broker.journal.books import Books
from rolloutmq.services.broker.journal.differences import differences
from rolloutmq.services.broker.journal.packing import decode_facts, encode


class Follower:
    """Keeps accounts beside a core, out of what it writes down."""

    def __init__(self, bench: Bench) -> None:
        self.accounts = Accounts()
        self._bench = bench
        self._journal = bench.journal
        self._read = 0

    def look(self) -> None:
        """Apply what is new, and hold the accounts against the core."""
        self._apply()
        if self._bench.journal is not self._journal:  # the next life, whose journal begins with a snapshot
            self._journal, self._read = self._bench.journal, 0
            self._apply()
        assert self.accounts.problems == []
        assert list(differences(self.accounts, self._books(), "the core")) == []

    def _apply(self) -> None:
        facts = self._journal.read()
        for fact in facts[self._read :]:
            self.accounts.apply(fact)
        self._read = len(facts)

    def _books(self) -> Books:
        found = Books()
        items = [entry[0] if isinstance(entry, tuple) else entry for entry in self._bench.core.snapshot()]
        found.open(decode_facts(encode(items)))
        assert found.problems == []
        return found


class Followed(Machine):
    """The machine of the core, with accounts beside it."""

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
