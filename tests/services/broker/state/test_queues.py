from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tests.services.broker.bench import stored

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.state.batch_share import total
from rolloutmq.services.broker.state.groups import Groups
from rolloutmq.services.broker.state.queues import Lane, Lanes
from rolloutmq.services.broker.state.split_queue import GroupSums


def lane_of(*sizes: int) -> Lane:
    lane = Lane("e", Split.TRAIN, EnvironmentConfig(entry="a:B"), 0.0)
    for order, size in enumerate(sizes, 1):
        group = stored(order, size)
        lane.accept([group], GroupSums.of([group.header]), 0.0)
    return lane


def orders(lane: Lane) -> list[int]:
    return [group.order for group in lane.in_order()]


def test_sizes_lie_apart_and_the_order_is_that_of_arrival() -> None:
    lane = lane_of(4, 2, 4, 8, 2)
    assert orders(lane) == [1, 2, 3, 4, 5]
    assert [group.order for group in lane.take(4, 2).groups] == [1, 3]
    assert orders(lane) == [2, 4, 5]
    assert lane.queued.as_tuple() == (3, 12, 120, 300)
    oldest = lane.oldest()
    assert oldest is not None
    assert oldest.order == 2
    lane.validate()


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=30), st.randoms())
def test_groups_that_come_back_take_their_old_places(sizes: list[int], random: Random) -> None:
    lane = lane_of(*sizes)
    out = [lane.take(size, (len(lane.sizes[size]) + 1) // 2).groups for size in list(lane.sizes)]
    random.shuffle(out)
    for groups in out:
        lane.put_back(groups)
        lane.validate()
    assert orders(lane) == list(range(1, len(sizes) + 1))


def test_two_leases_that_return_in_the_wrong_order_end_in_the_right_one() -> None:
    lane = lane_of(*[4] * 8)
    first, second = lane.take(4, 3).groups, lane.take(4, 3).groups
    lane.put_back(first)
    lane.put_back(second)
    lane.validate()
    assert orders(lane) == list(range(1, 9))


def test_the_sums_over_all_lanes_follow_every_move() -> None:
    lanes = Lanes({}, Groups(0))
    one, other = (lanes.open(env, Split.TRAIN, 0.0) for env in ("a", "b"))
    for lane in (one, other):
        for _ in range(3):
            group = stored(0, env=lane.env)
            lanes.accept(lane, [group], GroupSums.of([group.header]), 0.0)
    taken = one.take(4, 2).groups
    for group in taken:
        one.leased.add(group)
    lanes.validate()
    assert (lanes.held_groups, lanes.held_bytes) == (6, 600)
    one.leased.add(taken[0], -1)
    lanes.let_go(one, total([taken[0]]))
    one.leased.add(taken[1], -1)
    lanes.put_back([taken[1]])
    lanes.validate()
    assert (lanes.held_groups, lanes.queued_sequences(Split.TRAIN)) == (5, 20)
    assert [group.order for group in other.in_order()] == [4, 5, 6]


def test_what_a_training_environment_makes_for_evaluation_is_not_paced() -> None:
    rules = {"e": EnvironmentConfig(entry="a:B"), "v": EnvironmentConfig(entry="a:B", split="eval")}
    lanes = Lanes(rules, Groups(0))

    def paced() -> list[bool]:
        asked = (("e", Split.TRAIN), ("e", Split.EVAL), ("v", Split.EVAL))
        return [lanes.open(env, split, 0.0).rule.pacing for env, split in asked]

    assert paced() == [True, False, True]
    lanes.adopt({name: rule.model_copy(update={"max_staleness": 9}) for name, rule in rules.items()}, {})
    assert paced() == [True, False, True]
    assert lanes.open("e", Split.EVAL, 0.0).rule.max_staleness == 9
