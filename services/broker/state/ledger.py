"""The ledger: the number of accepted groups in each state, at every instant.

    accepted = queued + leased + trained + committed + filtered + expired + dead + discarded

A group enters by `accept` and changes its state by `move`, and by nothing else, so the sum cannot drift. Every group
that leaves untrained has a reason.
"""

from collections import Counter

from rolloutmq.schemas.wire.control import LedgerCounts
from rolloutmq.services.broker.journal.format.events import GroupState, LedgerSnapshot


class Ledger:
    """Counts of groups by state, and by reason for the states that have reasons."""

    def __init__(self) -> None:
        self.accepted = 0
        self.rewound = 0
        self.lost = 0
        """Groups that ended sessions had finished and that were never accepted."""
        self.forgotten = 0
        """Trained groups that are not retained for a checkpoint: the run was reset, or its trainer commits none."""
        self.counts = dict.fromkeys(GroupState, 0)
        self.reasons: Counter[str] = Counter()

    def accept(self, groups: int = 1) -> None:
        """Count new groups as queued."""
        self.accepted += groups
        self.counts[GroupState.QUEUED] += groups

    def move(self, old: GroupState, new: GroupState, groups: int = 1, reason: str = "") -> None:
        self.counts[old] -= groups
        self.counts[new] += groups
        if reason:
            self.reasons[f"{new.value}({reason})"] += groups

    def requeued(self) -> None:
        """Count a dead group out; it is accepted anew. One that died in a life without records is in no count."""
        if self.counts[GroupState.DEAD]:
            self.move(GroupState.DEAD, GroupState.DISCARDED, reason="requeued")

    def restore(self, item: LedgerSnapshot) -> None:
        """Restore the counts of a snapshot."""
        self.accepted, self.rewound, self.lost = item.accepted, item.rewound, item.lost
        self.forgotten = item.forgotten
        for state in GroupState:
            self.counts[state] = item.counts.get(state.value, 0)
        self.reasons.update(item.reasons)

    def rewind(self, old: GroupState, groups: int) -> None:
        """Move settled groups back to the queue, because the trainer resumed before them."""
        self.move(old, GroupState.QUEUED, groups)
        self.rewound += groups

    def report(self, lost_now: int = 0) -> LedgerCounts:
        """Return the counts; `lost_now` adds the lost groups of silent sessions."""
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
