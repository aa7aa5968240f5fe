"""Groups that are accepted together leave the same state as the same groups accepted one by one."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.services.broker.bench import TABLE, Bench, Peer, config

from rolloutmq.schemas.wire.envelope import (
    ArenaRef,
    Envelope,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.schemas.wire.replies import GAP_WINDOW, Batch, Ok, Registered
from rolloutmq.schemas.wire.requests import DeclareTables, RegisterProducer
from rolloutmq.schemas.wire.tasks import NewTask, SubmitTasks, TaskStates
from rolloutmq.services.broker.core import BrokerCore

SLOT = 100
ARENA = ArenaRef(pid=1, fd=2, ino=3, nbytes=8000)
ENVS: dict[str, dict[str, Any]] = {
    "paced": {"pacing": True, "max_staleness": 3},
    "free": {"stale": "pass"},
    "marked": {"high_bytes": 3000, "stale": "drop"},
}


class Memory:
    """An arena without a file."""

    fd = 3
    ref = ARENA
    view = memoryview(bytes(ARENA.nbytes))

    def close(self) -> None:
        """Nothing to close."""


class Side:
    """A broker, its producer and its trainer; `together` allows the quick way of a whole message."""

    def __init__(self, env: str, *, together: bool, in_arena: bool, half_life: int | None) -> None:
        rewards = {} if half_life is None else {"rewards": {"half_life_groups": half_life}}
        broker = {"high_bytes": 9000, "max_group_bytes": 900, "high_groups": 40, "max_deliveries": 3}
        given = config(
            broker=broker, trainer=rewards, paced=ENVS["paced"], free=ENVS["free"], marked=ENVS["marked"]
        )
        self.bench = Bench(given)
        self.bench.shadowed = False
        self.bench.core = BrokerCore(given, epoch=1, open_arena=(lambda _: Memory()) if in_arena else None)
        self.core = self.bench.core
        self.quick = 0
        """Messages that were accepted as a whole."""
        self.clean = self.core._producers._keys_of_clean
        self.together = together
        self.core._producers._keys_of_clean = self._keys_of_clean  # type: ignore[method-assign]
        request = RegisterProducer(
            producer="p", env=env, slots=64, group_size=4, arena=ARENA if in_arena else None
        )
        self.peer = Peer(self.bench, "p", env, Split.TRAIN, self.bench.ask(request, Registered).ack)
        self.bench.ask(DeclareTables(producer="p", session=self.peer.session, tables=(TABLE,)), Ok)
        tasks = tuple(NewTask(id=f"t{number}", env=env, payload=b"x") for number in range(3))
        self.bench.ask(SubmitTasks(run="default", tasks=tasks), TaskStates)
        self.bench.consumer()
        self.step = 0

    def _keys_of_clean(self, arrived: Any) -> list[int] | None:
        keys = self.clean(arrived) if self.together else None
        self.quick += keys is not None
        return keys

    def send(self, heads: list[GroupHeader], offsets: tuple[int, ...]) -> None:
        about = 4, "p", self.peer.session, "default", self.peer.env, Split.TRAIN
        frames = [] if offsets else [b"%d" % number for number in range(sum(head.frames for head in heads))]
        self.bench.ingest(Envelope(*about, tuple(heads), offsets, ARENA.ino if offsets else 0), frames)

    def train(self) -> None:
        got = self.bench.pull(self.step)
        if isinstance(got, Batch):
            self.bench.settle(got)
            self.step += 1

    def state(self) -> dict[str, Any]:
        """Return all that arriving groups change."""
        state, session = self.core._state, self.core._state.sessions.current("p")
        assert session is not None
        found = {name: getattr(session, name) for name in SESSION}
        found["window"] = session.window.snapshot()
        found["held"] = sorted(session.arena._held) if session.arena else []
        found["acks"] = list(state.sessions.touched.now), list(state.sessions.touched.later)
        for lane in state.lanes:
            found |= {f"{lane.env}.{name}": getattr(lane, name) for name in LANE}
            found[f"{lane.env}.orders"] = [group.order for group in lane.in_order()]
            found[f"{lane.env}.load"] = lane.queued.as_tuple(), lane.arrivals._buckets
        for name in ("granted_bytes", "granted_groups", "_excess"):
            found[name] = getattr(state.credits, name)
        found["credit"] = (
            list(state.credits._credit_queue),
            {k: (c.end, c.since) for k, c in state.credits._claims.items()},
        )
        found["counts"] = state.rejected, state.as_frames, state.ledger.report(), state.produced._buckets
        found["due"] = state.permits_due, state.permits.behind, len(state.permits._due)
        found["hops"] = [group.order for group in state.hops._arrived]
        found["newest"] = {env: (group.order, frames) for env, (group, frames) in state.newest.items()}
        found["known"] = sorted(state.groups._present), state.groups.ended, state.groups.next_order
        found["tasks"] = state.tasks.counts()
        found["snapshot"] = [item[0] if isinstance(item, tuple) else item for item in self.core.snapshot()]
        found["events"] = self.bench.journal.events
        return found


SESSION = (
    "promised_bytes", "granted_bytes", "start_limit", "charged_bytes", "charged_starts", "wait", "accepted_at",
    "granted_at", "abandoned",
)  # fmt: skip
LANE = (
    "accepted_groups", "accepted_sequences", "granted", "granted_bytes", "largest_bytes", "rollout_s", "arrived_at",
    "rewards",
)  # fmt: skip


class Sides:
    """The same traffic on both ways."""

    def __init__(self, env: str = "free", *, in_arena: bool = False, half_life: int | None = None) -> None:
        self.both = [
            Side(env, together=together, in_arena=in_arena, half_life=half_life) for together in (True, False)
        ]
        self.in_arena = in_arena

    def next(self, count: int, **given: Any) -> list[GroupHeader]:
        first, other = ([side.peer.next(**dict(given)) for _ in range(count)] for side in self.both)
        assert first == other or "rewards" in given, "the peers went apart"
        return first

    def send(self, heads: list[GroupHeader], offsets: tuple[int, ...] | None = None) -> None:
        if offsets is None:
            offsets = tuple(head.seq % 60 * SLOT for head in heads) if self.in_arena else ()
        for side in self.both:
            side.send(heads, offsets)
        self.compare()

    def compare(self) -> None:
        one, other = (side.state() for side in self.both)
        assert one == other, {name: (one[name], other[name]) for name in one if one[name] != other[name]}

    def each(self, act: Callable[[Side], object]) -> None:
        for side in self.both:
            act(side)
        self.compare()

    def tick(self, after: float) -> None:
        self.each(lambda side: side.bench.tick(after))

    @property
    def quick(self) -> int:
        assert self.both[1].quick == 0
        return self.both[0].quick


@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("env", ENVS)
def test_a_clean_message_is_accepted_as_a_whole(env: str, in_arena: bool) -> None:
    sides = Sides(env, in_arena=in_arena)
    sides.send(sides.next(3))
    sides.send(sides.next(4, nbytes=120, sequences=2, started_at=1.0, finished_at=3.5))
    sides.send(sides.next(1))
    assert sides.quick == 3
    sides.each(Side.train)
    sides.tick(0.1)
    sides.send(sides.next(5))
    assert sides.quick == 4


def changed(number: int, **given: Any) -> Callable[[list[GroupHeader]], list[GroupHeader]]:
    """Return a message with one group changed."""

    def change(heads: list[GroupHeader]) -> list[GroupHeader]:
        heads[number] = replace(heads[number], **given)
        return heads

    return change


EXCEPTIONS: dict[str, Callable[[list[GroupHeader]], list[GroupHeader]]] = {
    "gap": lambda heads: [*heads[:1], *heads[2:]],
    "gap at the start": lambda heads: heads[1:],
    "other order": lambda heads: heads[::-1],
    "duplicate in the message": lambda heads: [*heads[:2], heads[1], *heads[2:]],
    "beyond the window": lambda heads: [
        *heads[:2], replace(heads[2], seq=GAP_WINDOW + 99, position=heads[2].position + GAP_WINDOW + 99),
    ],
    "wrong position": changed(1, position=150),
    "position too large": changed(3, position=1000),
    "beyond the credit": changed(3, position=1 << 40),
    "too large": changed(2, nbytes=901),
    "unknown table": changed(1, table="0" * 16),
    "same identity in the message": lambda heads: changed(
        2, group_id=heads[0].group_id, crc=heads[0].crc
    )(heads),
}  # fmt: skip


@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("env", ["paced", "free"])
@pytest.mark.parametrize("what", EXCEPTIONS)
def test_a_message_with_one_exception_goes_group_by_group(what: str, env: str, in_arena: bool) -> None:
    sides = Sides(env, in_arena=in_arena)
    sides.send(EXCEPTIONS[what](sides.next(4)))
    assert sides.quick == 0
    sides.tick(0.1)


def test_a_message_sent_again_or_after_a_gap_goes_group_by_group() -> None:
    sides = Sides()
    first, second, third = (sides.next(2) for _ in range(3))
    sides.send(first)
    sides.send(first)
    sides.send(third)
    sides.send(second)  # the gap behind it
    assert sides.quick == 1
    assert sides.both[0].core._state.rejected["duplicate"] == 2
    sides.send(sides.next(2))
    assert sides.quick == 2


def test_groups_known_from_another_session_are_not_queued_again() -> None:
    sides = Sides()
    heads = sides.next(3)
    sides.send(heads)
    sides.each(Side.train)
    for known in (heads[0], heads[2]):  # one that ended, one that is queued
        again = sides.next(3)
        again[1] = replace(again[1], group_id=known.group_id, crc=known.crc)
        sides.send(again)
    assert sides.quick == 1
    assert sides.both[0].core._state.rejected["duplicate"] == 2


@pytest.mark.parametrize("offset", [ARENA.nbytes, ARENA.nbytes - 99, 1 << 50])
def test_an_offset_outside_the_arena_is_refused(offset: int) -> None:
    sides = Sides(in_arena=True)
    sides.send(sides.next(3), (0, offset, SLOT))
    assert sides.quick == 0
    assert sides.both[0].core._state.rejected == {"arena_range": 1}


def test_groups_of_several_sizes_versions_and_tasks_are_accepted_as_a_whole() -> None:
    sides = Sides("marked")
    heads = [
        *sides.next(2, step=3), *sides.next(1, step=1), *sides.next(2, sequences=2, step=2),
        *sides.next(1, rewards=RewardSummary(5.0, 0.0, 1.0, 0.0)),
    ]  # fmt: skip
    heads[0] = replace(heads[0], task="t1")
    heads[3] = replace(heads[3], task="t1")
    heads[4] = replace(heads[4], task="other")
    sides.send(heads)
    sides.send([replace(head, task="t2") for head in sides.next(2, step=0)])
    assert sides.quick == 2
    lane = sides.both[0].core._state.lanes.open("marked", Split.TRAIN, 0.0)
    assert [group.header.oldest.step for group in lane.in_order()] == [0, 0, 0, 1, 2, 2, 3, 3]
    assert sides.both[0].core._state.tasks.counts().done == 2


def test_credit_that_was_reclaimed_is_found_again_group_by_group() -> None:
    """The producer may send what was promised; the room went to others, or is there again."""
    sides = Sides()
    sides.send(sides.next(2))

    def reclaim(side: Side) -> None:
        session = side.core._state.sessions.current("p")
        assert session is not None
        side.core._state.credits._reclaim(session)

    for side in sides.both:
        reclaim(side)
    sides.send(sides.next(3))
    assert sides.quick == 1
    assert sides.both[0].core._state.lanes.held_groups == 5


def test_room_for_three_groups_takes_three_groups_of_a_message() -> None:
    """Their credit was reclaimed, and each takes its room as it comes."""
    sides = Sides()
    sides.send(sides.next(2))
    for side in sides.both:
        session, credits = side.core._state.sessions.current("p"), side.core._state.credits
        assert session is not None
        credits._reclaim(session)
        credits._windows.drains = credits.room - 300
    sides.send(sides.next(4))
    assert sides.both[0].core._state.lanes.held_groups == 5
    assert sides.both[0].core._state.rejected == {"no_room": 1}


def test_the_mark_in_groups_refuses_the_rest_of_a_message() -> None:
    sides = Sides()
    for _ in range(4):
        sides.send(sides.next(9, nbytes=1))
    sides.send(sides.next(6, nbytes=1))
    assert sides.quick == 4
    assert sides.both[0].core._state.rejected == {"no_room": 2}


GROUP = st.fixed_dictionaries(
    {
        "nbytes": st.sampled_from([1, 60, 100, 100, 100, 700]),
        "sequences": st.sampled_from([4, 4, 4, 2, 8]),
        "step": st.integers(0, 3),
        "started_at": st.sampled_from([0.0, 5.0]),
        "finished_at": st.floats(0.0, 1e6),
        "rewards": st.builds(RewardSummary, *[st.sampled_from([0.0, 0.5, 1.0, 1e200, float("nan")])] * 4),
    }
)
MESSAGE = st.tuples(
    st.lists(GROUP, min_size=1, max_size=6),
    st.sampled_from([None, None, None, *EXCEPTIONS]),
    st.sampled_from(["", "", "tick", "late tick", "train"]),
)


@pytest.mark.parametrize("env", ENVS)
@given(messages=st.lists(MESSAGE, max_size=12), in_arena=st.booleans(), half_life=st.sampled_from([None, 3]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_traffic_leaves_the_same_state(
    env: str, messages: list[Any], in_arena: bool, half_life: int | None
) -> None:
    sides = Sides(env, in_arena=in_arena, half_life=half_life)
    for groups, exception, then in messages:
        heads = [head for group in groups for head in sides.next(1, **group)]
        if exception is not None and len(heads) >= 4:
            heads = EXCEPTIONS[exception](heads)
        sides.send(heads)
        if then == "train":
            sides.each(Side.train)
        elif then:
            sides.tick(1.2 if then == "late tick" else 0.01)


def test_the_policy_of_a_group_decides_its_place_not_the_message() -> None:
    sides = Sides("marked")
    sides.send(sides.next(2, step=5))
    sides.send(sides.next(2, step=4))
    lane = sides.both[0].core._state.lanes.open("marked", Split.TRAIN, 0.0)
    assert [group.header.oldest for group in lane.in_order()] == [
        PolicyVersion(0, step) for step in (4, 4, 5, 5)
    ]
    assert sides.quick == 2
