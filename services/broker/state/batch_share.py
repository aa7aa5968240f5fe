"""Shares of a batch: groups that are handed out, leased and settled together, and what they are together.

Containers count groups, sequences, tokens and bytes by lane. A share adds them up once, on first use. The lease, the
staleness rule, the settlement and the hops then count the whole share at once, instead of group by group.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.journal.stored_group import StoredGroup


class LaneTotals(msgspec.Struct, frozen=True):
    """Groups of one environment in a share of a batch.

    Attributes:
        first: One of them, for its names.
        groups: Their number.
        sequences: Their sequences together.
        tokens: Their tokens together.
        nbytes: Their bytes together.
        oldest: The different oldest policies of theirs.
    """

    first: StoredGroup
    groups: int
    sequences: int
    tokens: int
    nbytes: int
    oldest: frozenset[PolicyVersion]


class BatchShare(msgspec.Struct, eq=False):
    """Groups that are handed out and settled together.

    Attributes:
        groups: Groups of one split; the list is not changed any more.
    """

    groups: Sequence[StoredGroup]
    _lanes: Sequence[LaneTotals] | None = None
    """What `lane_totals` returns for them, once it is known."""

    @property
    def lanes(self) -> Sequence[LaneTotals]:
        """The groups by environment, in the order of their first one."""
        if self._lanes is None:
            self._lanes = lane_totals(self.groups)
        return self._lanes

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        nbytes = 0
        for totals in self.lanes:
            nbytes += totals.nbytes
        return nbytes

    @property
    def sequences(self) -> int:
        """Sequences of all groups."""
        sequences = 0
        for totals in self.lanes:
            sequences += totals.sequences
        return sequences


def lane_totals(groups: Sequence[StoredGroup]) -> list[LaneTotals]:
    """Return the totals of each environment."""
    if len(groups) == 1 or is_one_env(groups):
        return [total(groups)]
    lanes: defaultdict[str, list[StoredGroup]] = defaultdict(list)
    for group in groups:
        lanes[group.env].append(group)
    return [total(members) for members in lanes.values()]


def total(groups: Sequence[StoredGroup]) -> LaneTotals:
    """Return the totals of groups of one environment, at least one."""
    if len(groups) == 1:
        one = groups[0].header
        return LaneTotals(groups[0], 1, one.sequences, one.tokens, one.nbytes, frozenset((one.oldest,)))
    headers = [group.header for group in groups]
    return LaneTotals(
        groups[0],
        len(headers),
        sum([header.sequences for header in headers]),
        sum([header.tokens for header in headers]),
        sum([header.nbytes for header in headers]),
        frozenset([header.oldest for header in headers]),
    )


def is_one_env(groups: Sequence[StoredGroup]) -> bool:
    """Return whether all groups are of one environment; a set of the names takes twice as long to make."""
    envs = [group.env for group in groups]
    return bool(envs) and envs.count(envs[0]) == len(envs)
