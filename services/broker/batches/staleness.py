"""The staleness rule: when a group is too old to be trained on.

Staleness is the number of optimizer steps from the oldest policy that sampled a group to the policy that pulls it. A
group of a newer policy than that is not stale.
Each environment bounds it with `max_staleness`. Above the bound, `stale = "drop"` expires the group and
`stale = "pass"` delivers it and counts it in the ledger as `passed(stale)`. A group an operator requeued is never
dropped for its age. A group of the split `eval` is trained on by nobody, so no bound holds for it.
"""

from collections.abc import Set

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.policy_lineage import PolicyLineage
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.ledger import Ledger
from rolloutmq.services.broker.state.queues import Lanes


class ShareAge(msgspec.Struct, frozen=True):
    """How stale groups are to a trainer at a version.

    Attributes:
        version: That version.
        largest: Steps by which the most stale one is; 0 for groups of split `eval`.
        exceeds: Whether one of them exceeds the bound of its environment.
    """

    version: PolicyVersion
    largest: int
    exceeds: bool


class StalenessRule:
    """Decides which groups are too stale for a policy, and records the staleness of delivered groups."""

    def __init__(self, lanes: Lanes, lineage: PolicyLineage, ledger: Ledger) -> None:
        self._lanes = lanes
        self._lineage = lineage
        self._ledger = ledger
        self.max_delivered = 0
        """Largest staleness of any training group in a batch so far."""

    def staleness(self, group: StoredGroup, version: PolicyVersion) -> int:
        """Return by how many optimizer steps `version` has moved on from the group's oldest policy."""
        return self._lineage.staleness(version, group.header.oldest)

    def age(self, share: BatchShare, version: PolicyVersion) -> ShareAge:
        """Return how stale groups are to a trainer at `version`: computed once for each of their policies."""
        largest, exceeds = 0, False
        for totals in share.lanes:
            lane = self._lanes.of(totals.first)
            if lane.split is Split.EVAL:
                continue
            for oldest in totals.oldest:
                steps = self._lineage.staleness(version, oldest)
                largest = max(largest, steps)
                exceeds = exceeds or steps > lane.rule.max_staleness
        return ShareAge(version, largest, exceeds)

    def too_stale(self, share: BatchShare, age: ShareAge) -> list[StoredGroup]:
        """Return the groups to drop instead of delivering them at this age."""
        return (
            [group for group in share.groups if self._is_dropped(group, age.version)] if age.exceeds else []
        )

    def record(self, share: BatchShare, age: ShareAge) -> None:
        """Record the staleness of groups delivered at this age."""
        self.max_delivered = max(self.max_delivered, age.largest)
        if age.exceeds:
            passed = sum(self._exceeds_bound(group, age.version) for group in share.groups)
            self._ledger.reasons["passed(stale)"] += passed

    def note_trained(self, share: BatchShare, trained: Set[str], version: PolicyVersion) -> None:
        """Record the staleness of groups of a window at their step, which led to `version`.

        At their pull they were as stale as allowed; how long they are held is the trainer's choice.
        """
        used = [group for group in share.groups if group.header.group_id in trained]
        if len(used) < len(share.groups):
            share = BatchShare(used)
        self.record(share, self.age(share, replace(version, step=max(0, version.step - 1))))

    def _is_dropped(self, group: StoredGroup, version: PolicyVersion) -> bool:
        drops = self._lanes.of(group).rule.stale == "drop"
        return drops and not group.requeued and self._exceeds_bound(group, version)

    def _exceeds_bound(self, group: StoredGroup, version: PolicyVersion) -> bool:
        if group.split is Split.EVAL:
            return False
        return self.staleness(group, version) > self._lanes.of(group).rule.max_staleness
