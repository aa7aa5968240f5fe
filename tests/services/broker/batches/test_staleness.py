from msgspec.structs import replace
from tests.services.broker.bench import config, header, stored

from rolloutmq.schemas.policy_lineage import PolicyLineage
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.batches.staleness import StalenessRule
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.groups import Groups
from rolloutmq.services.broker.state.ledger import Ledger
from rolloutmq.services.broker.state.queues import Lanes


class Rules:
    """A staleness rule over lanes with a bound of 2."""

    def __init__(self, stale: str = "drop") -> None:
        environments = config(e={"max_staleness": 2, "stale": stale}).environment
        self.lanes = Lanes(environments, Groups(0), 1)
        self.ledger = Ledger()
        self.lineage = PolicyLineage()
        self.rule = StalenessRule(self.lanes, self.lineage, self.ledger)

    def group(self, order: int, step: int, *, split: Split = Split.TRAIN) -> StoredGroup:
        """Return an accepted group the policy of `step` sampled."""
        self.lanes.open("e", split, 0.0)
        group = stored(order)
        group.split = split
        group.header = replace(header(order, order * 100), oldest=PolicyVersion(0, step))
        return group

    def dropped(self, *groups: StoredGroup, at: int) -> list[int]:
        share = BatchShare(groups)
        return [one.order for one in self.rule.too_stale(share, self.rule.age(share, PolicyVersion(0, at)))]

    def record(self, groups: list[StoredGroup], at: int) -> None:
        """Deliver groups to a trainer at the policy of a step."""
        share = BatchShare(groups)
        self.rule.record(share, self.rule.age(share, PolicyVersion(0, at)))


def test_a_group_at_the_bound_is_kept_and_one_above_it_is_dropped() -> None:
    rules = Rules()
    groups = [rules.group(order, step) for order, step in ((1, 3), (2, 4), (3, 6))]
    assert rules.dropped(*groups, at=6) == [1]
    assert rules.ledger.reasons == {}


def test_the_oldest_policy_of_a_group_decides() -> None:
    rules = Rules()
    group = rules.group(1, 3)
    group.header = replace(group.header, newest=PolicyVersion(0, 6))
    assert rules.rule.staleness(group, PolicyVersion(0, 6)) == 3
    assert rules.dropped(group, at=6) == [1]


def test_a_stale_group_passes_where_the_environment_says_so_and_is_counted() -> None:
    rules = Rules(stale="pass")
    groups = [rules.group(1, 0), rules.group(2, 5)]
    assert rules.dropped(*groups, at=6) == []
    rules.record(groups, 6)
    assert rules.ledger.reasons == {"passed(stale)": 1}
    assert rules.rule.max_delivered == 6


def test_a_requeued_group_is_never_too_stale() -> None:
    rules = Rules()
    group = rules.group(1, 0)
    group.requeued = True
    assert rules.dropped(group, at=9) == []
    rules.record([group], 9)
    assert rules.ledger.reasons == {"passed(stale)": 1}


def test_eval_groups_do_not_count_into_the_largest_staleness() -> None:
    rules = Rules()
    rules.record([rules.group(1, 5)], 6)
    rules.record([rules.group(2, 4, split=Split.EVAL)], 6)
    assert rules.rule.max_delivered == 1


def test_eval_groups_are_never_stale() -> None:
    rules = Rules()
    group = rules.group(1, 0, split=Split.EVAL)
    assert rules.dropped(group, at=90) == []
    rules.record([group], 90)
    assert rules.ledger.reasons == {}


def test_steps_that_a_resumed_trainer_threw_away_count() -> None:
    rules = Rules()
    rules.lineage.seen(PolicyVersion(0, 6))
    rules.lineage.resumed(PolicyVersion(0, 4))
    rules.lineage.seen(PolicyVersion(1, 4))
    assert rules.rule.staleness(rules.group(1, 6), PolicyVersion(1, 5)) == 3
