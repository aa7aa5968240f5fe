"""Groups that close at a deadline: their members, and the late ones."""

# ruff: noqa: ARG002 - arguments are those of the protocols

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import pytest
from tests.services.worker.test_rollouts import FakeOutlet, until

from rolloutmq.bus.encoding.codec import decode_group, encode_group, header_of
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError, EnvironmentFailedError
from rolloutmq.schemas.group import Group
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.environment import SingleTurn
from rolloutmq.services.worker.group_members import GroupMembers
from rolloutmq.services.worker.loader import check_abilities
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.rollouts import Rollouts
from rolloutmq.services.worker.scripted import ScriptedPolicy
from rolloutmq.services.worker.trajectory import Trajectory

FOREVER_S = 60.0
"""A deadline that no test waits for."""


class Race(SingleTurn[str]):
    """A group whose member of number `n` does `play(n)` before it is scored with `n`."""

    def __init__(
        self, play: Callable[[int], Awaitable[Any]], stragglers: Literal["cancel", "await"] = "cancel"
    ) -> None:
        self.stragglers = stragglers
        self.begun = 0
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self._play = play

    def task(self, rng: random.Random) -> str:
        return f"{rng.random()}"

    def prompt(self, task: str) -> str:
        return task

    async def score(self, task: str, completion: Completion) -> float:
        number, self.begun = self.begun, self.begun + 1
        try:
            await self._play(number)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        self.ended.append(number)
        return float(number)


class Gates:
    """Members that wait each for a gate of their own."""

    def __init__(self, size: int) -> None:
        self.gates = [asyncio.Event() for _ in range(size)]

    async def __call__(self, number: int) -> None:
        await self.gates[number].wait()

    def open(self, *numbers: int) -> None:
        for number in numbers:
            self.gates[number].set()


def members(race: Race, size: int = 4) -> GroupMembers:
    return GroupMembers(race, ScriptedPolicy("1"), "q", size, random.Random(0))


def scores(trajectories: Sequence[Trajectory]) -> list[float]:
    return [float(one.score) for one in trajectories]


async def test_a_whole_group_closes_as_soon_as_it_is_whole() -> None:
    gates = Gates(4)
    group = members(Race(gates))
    gates.open(3, 1, 0, 2)
    assert scores(await group.closed(2, FOREVER_S)) == [0.0, 1.0, 2.0, 3.0]
    assert group.late == 0


async def test_at_the_deadline_a_group_goes_with_those_that_are_there() -> None:
    gates = Gates(4)
    race = Race(gates)
    group = members(race)
    gates.open(3, 1)
    assert scores(await group.closed(2, 0.02)) == [1.0, 3.0]
    assert group.late == 2
    await group.end()
    assert sorted(race.cancelled) == [0, 2]


async def test_below_its_minimum_a_group_waits_beyond_the_deadline() -> None:
    gates = Gates(4)
    group = members(Race(gates))
    gates.open(1)
    closing = asyncio.create_task(group.closed(2, 0.0))
    await until(lambda: len(group._running) - sum(map(asyncio.Task.done, group._running)) == 3)
    assert not closing.done()
    gates.open(2)
    assert scores(await closing) == [1.0, 2.0]
    assert group.late == 2
    await group.end()


async def test_a_straggler_may_come_to_its_end_and_is_late_all_the_same() -> None:
    gates = Gates(2)
    race = Race(gates, "await")
    group = members(race, 2)
    gates.open(0)
    assert scores(await group.closed(1, 0.0)) == [0.0]
    ending = asyncio.create_task(group.end(FOREVER_S))
    await asyncio.sleep(0)
    gates.open(1)
    await ending
    assert (race.ended, race.cancelled, group.late) == ([0, 1], [], 1)


async def test_a_straggler_that_never_ends_is_cancelled_at_last() -> None:
    race = Race(Gates(2), "await")
    race._play.open(0)  # type: ignore[attr-defined]
    group = members(race, 2)
    await group.closed(1, 0.0)
    await group.end(0.01)
    assert race.cancelled == [1]


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)])
async def test_a_member_that_raises_takes_the_group_with_it(error: BaseException) -> None:
    async def play(number: int) -> None:
        if number == 2:
            raise error
        await asyncio.Event().wait()

    race = Race(play)
    group = members(race)
    with pytest.raises((ValueError, RuntimeError), match=r"bad|SystemExit: 3"):
        await group.closed(1, FOREVER_S)
    assert sorted(race.cancelled) == [0, 1, 3]


async def test_a_cancelled_group_cancels_its_members() -> None:
    race = Race(Gates(3))
    group = members(race, 3)
    closing = asyncio.create_task(group.closed(1, FOREVER_S))
    await until(lambda: race.begun == 3)
    closing.cancel()
    await asyncio.wait({closing})
    assert sorted(race.cancelled) == [0, 1, 2]


def rollouts(race: Race, outlet: FakeOutlet, **config: Any) -> Rollouts:
    section = EnvironmentConfig(entry="a:B", **({"group_size": 4, "concurrency": 1} | config))
    return Rollouts("race-1", section, race, ScriptedPolicy("1"), outlet)


def over_the_wire(group: Group) -> Group:
    encoded = encode_group(group, 1 << 20)
    return decode_group(header_of(group, encoded, seq=1, position=1), encoded.table, encoded.frames)


async def test_the_worker_sends_the_short_group_and_counts_the_late_members() -> None:
    gates = Gates(4)
    gates.open(0, 1, 3)
    outlet = FakeOutlet(1)
    made = rollouts(Race(gates), outlet, min_group_size=3, group_deadline_s=0.02)
    await made.run()
    (group,) = outlet.groups
    assert (made.produced, made.abandoned, made.late_members) == (1, 0, 1)
    came = over_the_wire(group)
    assert came.scores.tolist() == [0.0, 1.0, 3.0]
    assert came.columns["members"].values == {"wanted": 4, "got": 3}


async def test_without_a_minimum_the_deadline_waits_for_all() -> None:
    async def slow(number: int) -> None:
        await asyncio.sleep(0.01 * number)

    outlet = FakeOutlet(1)
    made = rollouts(Race(slow), outlet, group_deadline_s=0.001)
    await made.run()
    assert (outlet.groups[0].sequences, made.late_members) == (4, 0)


async def test_the_permit_ends_with_the_group_and_the_slot_with_its_stragglers() -> None:
    gates = Gates(4)
    gates.open(0, 1, 2)
    outlet = FakeOutlet(1)
    made = rollouts(Race(gates, "await"), outlet, min_group_size=1, group_deadline_s=0.01)
    running = asyncio.create_task(made.run())
    await until(lambda: bool(outlet.groups))
    assert (outlet.credit.in_hand, made.in_hand, running.done()) == (0, 1, False)
    gates.open(3)
    await running
    assert made.late_members == 1


async def test_a_group_that_never_reaches_its_minimum_is_abandoned_at_the_timeout() -> None:
    gates = Gates(4)
    gates.open(0)
    race, outlet = Race(gates), FakeOutlet(1)
    made = rollouts(
        race, outlet, min_group_size=2, group_deadline_s=0.01, rollout_timeout_s=0.05, failure_limit=1
    )
    with pytest.raises(EnvironmentFailedError, match=r"took longer than rollout_timeout_s \(0\.05 s\)"):
        await made.run()
    assert sorted(race.cancelled) == [1, 2, 3]
    assert (made.abandoned, made.late_members) == (1, 0)


async def test_each_member_has_randomness_of_its_own() -> None:
    class Drawing(Race):
        drawn: list[float] = []

        async def member(self, policy: Policy, task: str, rng: random.Random) -> Trajectory:
            self.drawn.append(rng.random())
            return await super().member(policy, task, rng)

    gates = Gates(4)
    gates.open(*range(4))
    await members(Drawing(gates)).closed(4, FOREVER_S)
    assert len(set(Drawing.drawn)) == 4


class Bare:
    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> list[Trajectory]:
        return []


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"group_deadline_s": 1.0}, "environment.e.group_deadline_s: Bare has no method `task`"),
        ({"tasks": "both"}, "environment.e.tasks: Bare has no method `rollout_task`"),
    ],
)
def test_an_environment_that_cannot_is_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_abilities("e", EnvironmentConfig(entry="a:B", **section), Bare())
    check_abilities("e", EnvironmentConfig(entry="a:B"), Bare())
    check_abilities("e", EnvironmentConfig(entry="a:B", **section), Race(Gates(1)))


def test_an_environment_of_numbered_tasks_needs_no_method_for_payloads() -> None:
    check_abilities("e", EnvironmentConfig(entry="a:B", tasks="submitted"), Bare(), numbered=True)
    section = EnvironmentConfig(entry="a:B", tasks="submitted", group_deadline_s=1.0)
    with pytest.raises(ConfigError, match="group_deadline_s: Bare has no method `task`"):
        check_abilities("e", section, Bare(), numbered=True)


def test_a_minimum_above_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="min_group_size must not exceed group_size"):
        EnvironmentConfig(entry="a:B", group_size=4, min_group_size=5)
