"""Many lanes: shares as with few, at a cost that does not grow with the lanes that give nothing."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.broker.batches.test_exact import supply
from tests.services.broker.bench import Bench, Peer, config, stored

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Batch
from rolloutmq.services.broker.batches.candidates import FEW_LANES, all_candidates, most_owed
from rolloutmq.services.broker.batches.exact import LaneSupply, _OldestFirst, greedy, quotas
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.state.groups import Groups
from rolloutmq.services.broker.state.queues import Lane, Lanes
from rolloutmq.services.broker.state.split_queue import GroupSums

SIZES = st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=6)
OFFERS = st.lists(
    st.tuples(SIZES, st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([-8.0, 0.0, 0.0, 4.0, 12.0])),
    min_size=1,
    max_size=8,
)


def by_sorting(supplies: Sequence[LaneSupply], target: int) -> tuple[list[dict[int, int]], int]:
    """Meet the wishes as `greedy` promises, with a whole sort for every group."""
    wishes = quotas(supplies, target) if len(supplies) > 1 else [float(target)]
    walks = [_OldestFirst(supply) for supply in supplies]
    left = target
    for walk, wish in zip(walks, wishes, strict=True):
        walk.up_to(min(left, int(wish + 1e-6)))
        left -= walk.total
    unfilled = list(zip(walks, wishes, strict=True))
    while left and unfilled:
        unfilled.sort(key=lambda pair: pair[0].total - pair[1])
        got = unfilled[0][0].one(left)
        left -= got
        if not got:
            unfilled.pop(0)
    return [dict(walk.taken) for walk in walks], left


@given(OFFERS, st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_the_heap_serves_whom_a_sort_for_every_group_would_serve(
    offers: list[tuple[list[int], float, float]], target: int
) -> None:
    def supplies() -> list[LaneSupply]:
        return [supply(*sizes, weight=weight, carry=carry) for sizes, weight, carry in offers]

    assert greedy(supplies(), target) == by_sorting(supplies(), target)


def lanes_of(weights: Sequence[float]) -> tuple[Lanes, list[Lane]]:
    rules = {f"e{i}": EnvironmentConfig(entry="a:B", weight=weight) for i, weight in enumerate(weights)}
    lanes = Lanes(rules, Groups(0))
    return lanes, [lanes.open(env, Split.TRAIN, 0.0) for env in rules]


def fill(lanes: Lanes, lane: Lane, groups: int) -> None:
    for _ in range(groups):
        group = stored(0, 4, env=lane.env)
        lanes.accept(lane, [group], GroupSums.of([group.header]), 0.0)


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=5),
    st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 3), min_size=1), max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_what_is_owed_is_as_if_every_batch_were_added_to_every_lane(
    weights: list[float], batches: list[dict[int, int]]
) -> None:
    lanes, each = lanes_of(weights)
    queue = lanes.of_split(Split.TRAIN)
    owed = dict.fromkeys(each, 0.0)
    for lane in each:
        fill(lanes, lane, 40)
    for batch in batches:
        taken = {each[i]: 4 * groups for i, groups in batch.items() if i < len(each)}
        taken[each[0]] = taken.get(each[0], 0) + 16 - min(16, sum(taken.values()))
        if sum(taken.values()) != 16:
            continue
        queue.served(taken)
        for lane in each:
            share = lane.weight / (sum(weights) or 1.0)
            owed[lane] = max(-16.0, min(16.0, owed[lane] + 16 * share - taken.get(lane, 0)))
        assert [lane.carry for lane in each] == pytest.approx([owed[lane] for lane in each])
        lanes.validate()


def test_a_lane_that_was_empty_at_a_batch_is_owed_nothing() -> None:
    lanes, (one, other) = lanes_of([1.0, 1.0])
    fill(lanes, one, 9)
    queue = lanes.of_split(Split.TRAIN)
    one.take(4, 4)
    queue.served({one: 16})
    fill(lanes, other, 1)
    assert (one.carry, other.carry) == (-8.0, 0.0)
    queue.served({one: 16})
    assert other.carry == 8.0


def test_few_lanes_are_all_candidates_and_of_many_those_owed_most_and_those_with_a_floor() -> None:
    lanes, each = lanes_of([1.0] * (2 * FEW_LANES))
    queue = lanes.of_split(Split.TRAIN)
    for lane in each[:FEW_LANES]:
        fill(lanes, lane, 3)
    assert most_owed(queue, {}, 16, lambda lane: lane.queued.sequences) is None
    assert [candidate.lane for candidate in all_candidates(queue, {})] == each[:FEW_LANES]
    for lane in each[FEW_LANES:]:
        fill(lanes, lane, 3)
    queue.served(dict.fromkeys(each[:FEW_LANES], 4))
    found = most_owed(queue, {each[0]: 4}, 16, lambda lane: lane.queued.sequences)
    assert found is not None
    assert [candidate.lane for candidate in found] == [each[0], *each[FEW_LANES : 2 * FEW_LANES - 1]]
    assert (found[0].floor, found[1].floor) == (4, 0)
    assert sum(candidate.carry for candidate in found) == pytest.approx(0.0)


def crowd(environments: int, weights: Sequence[float], **broker: Any) -> tuple[Bench, list[Peer]]:
    """Return environments with a producer each, without comparing every step with a restart."""
    given = {f"e{i}": {"weight": weights[i % len(weights)], "stale": "pass"} for i in range(environments)}
    bench = Bench(config(batch=64, broker={"high_bytes": 1 << 30, **broker}, **given))
    bench.shadowed = False
    bench.core.validate = lambda: None  # type: ignore[method-assign]  # it looks at every environment each time
    return bench, [bench.producer(f"p{i}", f"e{i}") for i in range(environments)]


@pytest.mark.parametrize("tokens", [False, True])
def test_many_environments_share_by_weight_as_few_do(tokens: bool) -> None:
    """A batch has 16 groups for 150 environments: each gets its share over batches, to within one batch."""
    weights = [1.0, 2.0, 5.0]
    bench, peers = crowd(150, weights)
    for peer in peers:
        peer.send(12)
    bench.consumer()
    taken: Counter[str] = Counter()
    for _ in range(50):
        batch = bench.batch(0, **({"tokens": 640} if tokens else {"sequences": 64}))
        assert not batch.short
        assert len(batch.groups) == 16
        taken.update(delivery.env for delivery in batch.groups)
        bench.settle(batch, no_signal=True)
    BrokerCore.validate(bench.core)
    total, weight = taken.total(), sum(weights) * 50
    for number in range(150):
        due = total * weights[number % 3] / weight
        assert abs(taken[f"e{number}"] - due) <= 1.5, (number, due, taken[f"e{number}"])


def test_a_pull_and_a_message_look_at_few_of_many_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, peers = crowd(300, [1.0])
    bench.consumer()
    looked: Counter[str] = Counter()
    for name in ("counts", "in_order", "oldest_above", "silent"):
        method = getattr(Lane, name)

        def counted(lane: Lane, *words: Any, name: str = name, method: Any = method) -> Any:
            looked[name] += 1
            return method(lane, *words)

        monkeypatch.setattr(Lane, name, counted)
    assert bench.wait(0, 64) == []
    looked.clear()
    for peer in peers[:15]:
        peer.send()
    assert looked == {}, "a message that leaves the trainer waiting looks at no lane"
    for peer in peers[15:]:
        peer.send()
    (first,) = [reply.message for reply in bench.late if isinstance(reply.message, Batch)]
    bench.settle(first)
    looked.clear()
    bench.batch(1, 64)
    assert looked.total() <= 2 * FEW_LANES


def test_an_exact_batch_is_found_although_the_lanes_owed_most_have_none() -> None:
    """All lanes have groups of 4, only the last one has one of 2."""
    bench, peers = crowd(100, [1.0])
    for peer in peers[:-1]:
        peer.send(2)
    bench.consumer()
    bench.settle(bench.batch(0, 64))
    peers[-1].send(1, sequences=2)
    batch = bench.batch(1, 66)
    assert sum(delivery.header.sequences for delivery in batch.groups) == 66
