"""The ledger: where every accepted group is, at every instant.

    accepted = queued + leased + trained + committed + filtered + expired + dead + discarded

A group enters by `accept` and changes its state by `move`, and by nothing else, so that the sum cannot drift. What
leaves the stream says why.
"""

from collections import Counter
from enum import StrEnum

from rolloutmq.schemas.control import LedgerCounts
from rolloutmq.services.broker.journal.facts import LedgerItem


class State(StrEnum):
    """Where an accepted group is."""

    QUEUED = "queued"
    LEASED = "leased"
    TRAINED = "trained"
    COMMITTED = "committed"
    FILTERED = "filtered"
    EXPIRED = "expired"
    DEAD = "dead"
    DISCARDED = "discarded"


class Ledger:
    """Counts of groups by state, and by reason where a state has reasons."""

    def __init__(self) -> None:
        self.accepted = 0
        self.rewound = 0
        self.lost = 0
        """Groups that ended sessions had finished and never got accepted."""
        self.forgotten = 0
        """Trained groups that are not kept for a checkpoint: the run was reset, or its trainer makes none."""
        self.counts = dict.fromkeys(State, 0)
        self.reasons: Counter[str] = Counter()

    def accept(self, groups: int = 1) -> None:
        """Count new groups, which are queued."""
        self.accepted += groups
        self.counts[State.QUEUED] += groups

    def move(self, old: State, new: State, groups: int = 1, reason: str = "") -> None:
        """Move groups from one state to another."""
        self.counts[old] -= groups
        self.counts[new] += groups
        if reason:
            self.reasons[f"{new.value}({reason})"] += groups

    def requeued(self) -> None:
        """Count a dead group out; it is accepted anew. One that died in a life nobody remembers is in no count."""
        if self.counts[State.DEAD]:
            self.move(State.DEAD, State.DISCARDED, reason="requeued")

    def restore(self, item: LedgerItem) -> None:
        """Become what a snapshot says."""
        self.accepted, self.rewound, self.lost = item.accepted, item.rewound, item.lost
        self.forgotten = item.forgotten
        for state in State:
            self.counts[state] = item.counts.get(state.value, 0)
        self.reasons.update(item.reasons)

    def rewind(self, old: State, groups: int) -> None:
        """Bring settled groups back to the queue, because the trainer resumed before them."""
        self.move(old, State.QUEUED, groups)
        self.rewound += groups

    def report(self, lost_now: int = 0) -> LedgerCounts:
        """Return the counts; `lost_now` is added for sessions that are silent but not over."""
        return LedgerCounts(
            accepted=self.accepted,
            rewound=self.rewound,
            lost_before_accept=self.lost + lost_now,
            reasons=dict(self.reasons),
            **{state.value: count for state, count in self.counts.items()},
        )

    def validate(self) -> None:
        """Assert the ledger's equation."""
        assert min(self.counts.values()) >= 0, self.counts
        assert self.accepted == sum(self.counts.values()), (self.accepted, self.counts)
