"""The staleness rule: when a group is too old to be trained on.

Staleness is the number of optimizer steps from the oldest policy that sampled a group to the policy that pulls it. A
group of a newer policy than that is not stale.
Each environment bounds it with `max_staleness`. Above the bound, `stale = "drop"` expires the group and
`stale = "pass"` delivers it and counts it in the ledger as `passed(stale)`. A group an operator requeued is never
dropped for its age. A group of the split `eval` is trained on by nobody, so no bound holds for it.
"""

from collections.abc import Set

from msgspec.structs import replace

from rolloutmq.schemas.policy_lineage import PolicyLineage
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare, LaneTotals
from rolloutmq.services.broker.state.ledger import Ledger
from rolloutmq.services.broker.state.queues import Lanes


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

    def too_stale(self, share: BatchShare, version: PolicyVersion) -> list[StoredGroup]:
        """Return the groups to drop instead of delivering them to a trainer at `version`."""
        if not self._any_exceeds(share, version):
            return []
        return [group for group in share.groups if self._is_dropped(group, version)]

    def record(self, share: BatchShare, version: PolicyVersion) -> None:
        """Record the staleness of groups delivered to a trainer at `version`."""
        for totals in share.lanes:
            if totals.first.split is Split.TRAIN:
                self.max_delivered = max(self.max_delivered, self._largest(totals, version))
        if self._any_exceeds(share, version):
            passed = sum(self._exceeds_bound(group, version) for group in share.groups)
            self._ledger.reasons["passed(stale)"] += passed

    def note_trained(self, share: BatchShare, trained: Set[str], version: PolicyVersion) -> None:
        """Record the staleness of groups of a window at their step, which led to `version`.

        At their pull they were as stale as allowed; how long they are held is the trainer's choice.
        """
        used = [group for group in share.groups if group.header.group_id in trained]
        if len(used) < len(share.groups):
            share = BatchShare(used)
        self.record(share, replace(version, step=max(0, version.step - 1)))

    def _largest(self, totals: LaneTotals, version: PolicyVersion) -> int:
        """Return the largest staleness of some groups; it is computed once for each policy, not for each group."""
        return max([self._lineage.staleness(version, oldest) for oldest in totals.oldest])

    def _any_exceeds(self, share: BatchShare, version: PolicyVersion) -> bool:
        """Return whether a group exceeds its bound."""
        for totals in share.lanes:
            lane = self._lanes.of(totals.first)
            if lane.split is Split.TRAIN and self._largest(totals, version) > lane.rule.max_staleness:
                return True
        return False

    def _is_dropped(self, group: StoredGroup, version: PolicyVersion) -> bool:
        drops = self._lanes.of(group).rule.stale == "drop"
        return drops and not group.requeued and self._exceeds_bound(group, version)

    def _exceeds_bound(self, group: StoredGroup, version: PolicyVersion) -> bool:
        if group.split is Split.EVAL:
            return False
        return self.staleness(group, version) > self._lanes.of(group).rule.max_staleness
