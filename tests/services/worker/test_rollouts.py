"""Rollouts against environments that raise, exit, hang and return nonsense: each permit is settled exactly once."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.producer.credit import Credit, Permit
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import (
    DrainingError,
    EnvironmentFailedError,
    GroupTooLargeError,
    PolicyRefusedError,
    PolicyUnavailableError,
    SessionFencedError,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.tracing import Call
from rolloutmq.services.worker.openai.call_trace import RolloutTracer, traced_call
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.rollouts import RateLimitedLog, Rollouts
from rolloutmq.services.worker.scripted import ScriptedPolicy
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.services.worker.user_code.failures import ERROR_CHARS, one_line

Play = Callable[[int, random.Random], Awaitable[Any]]


class FakeOutlet:
    """Gives `permits` permits, then drains; keeps what it gets."""

    def __init__(self, permits: int) -> None:
        self.session = 7
        self.credit = Credit()
        self.credit.start_limit = permits
        self.groups: list[Group] = []
        self.abandoned = 0
        self.refusal: Exception | None = None
        self.most_in_hand = 0
        self.room = asyncio.Event()
        self.room.set()

    async def acquire(self) -> Permit:
        permit = self.credit.begin()
        if permit is None:
            raise DrainingError
        self.most_in_hand = max(self.most_in_hand, self.credit.in_hand)
        return permit

    async def send(self, group: Group, *, permit: Permit) -> None:
        if self.refusal is not None:
            raise self.refusal
        await self.room.wait()
        assert self.credit.arrive(permit)
        self.groups.append(group)

    def abandon(self, permit: Permit) -> None:
        assert permit.is_open
        self.credit.abandon(permit)
        self.abandoned += 1


class Scene:
    """An environment whose rollouts are one function of their number."""

    def __init__(self, play: Play) -> None:
        self.begun = 0
        self.randoms: list[float] = []
        self._play = play

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        self.begun += 1
        self.randoms.append(rng.random())
        played = await self._play(self.begun, rng)
        if played is not None:
            return played  # type: ignore[no-any-return]
        return [Trajectory.of(answer, 0.0) for answer in await policy.complete("q", n=size)]


def made(scene: Scene, outlet: FakeOutlet, *, tracer: RolloutTracer | None = None, **config: Any) -> Rollouts:
    section = EnvironmentConfig(entry="a:B", **({"group_size": 2, "concurrency": 3} | config))
    policy = ScriptedPolicy("1")
    return Rollouts("sort3-1", section, scene, policy, outlet, seed=5, clock=lambda: 4.0, tracer=tracer)


@asynccontextmanager
async def settled(outlet: FakeOutlet, rollouts: Rollouts) -> AsyncIterator[None]:
    """Check at the end that no permit is lost and that all counts agree."""
    yield
    assert outlet.credit.in_hand == 0
    assert rollouts.in_hand == 0
    assert rollouts.produced == len(outlet.groups)
    assert rollouts.abandoned == outlet.abandoned
    assert outlet.credit.begun == rollouts.produced + rollouts.abandoned


async def good(_number: int, _rng: random.Random) -> None:
    return None


async def test_groups_go_out_until_the_outlet_drains() -> None:
    outlet = FakeOutlet(10)
    rollouts = made(Scene(good), outlet)
    async with settled(outlet, rollouts):
        await rollouts.run()
    assert rollouts.produced == 10
    assert rollouts.error == ""
    assert {group.sequences for group in outlet.groups} == {2}
    assert {(group.started_at, group.finished_at) for group in outlet.groups} == {(4.0, 4.0)}


class NoReach:
    """No engine is within reach until the event is set."""

    def __init__(self) -> None:
        self.found = asyncio.Event()
        self.asked = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        return not self.found.is_set()

    async def regained(self) -> None:
        self.asked.set()
        await self.found.wait()


def reaching(outlet: FakeOutlet, scene: Scene, reach: NoReach, draining: asyncio.Event) -> Rollouts:
    section = EnvironmentConfig(entry="a:B", group_size=2, concurrency=3, failure_limit=3)
    return Rollouts("sort3-1", section, scene, ScriptedPolicy("1"), outlet, reach=reach, draining=draining)


async def test_no_permit_is_taken_while_no_engine_is_within_reach() -> None:
    """A worker behind a firewall held all permits, and those beside the engine starved."""
    outlet, reach, draining = FakeOutlet(10), NoReach(), asyncio.Event()
    rollouts = reaching(outlet, Scene(good), reach, draining)
    running = asyncio.create_task(rollouts.run())
    await reach.asked.wait()
    assert outlet.credit.in_hand == outlet.credit.begun == 0
    reach.found.set()
    await running
    assert rollouts.produced == 10


async def test_a_worker_without_an_engine_in_reach_drains() -> None:
    outlet, reach, draining = FakeOutlet(0), NoReach(), asyncio.Event()
    running = asyncio.create_task(reaching(outlet, Scene(good), reach, draining).run())
    await reach.asked.wait()
    draining.set()
    async with asyncio.timeout(30):
        await running


async def test_rollouts_that_fail_for_want_of_an_engine_are_not_the_environments_fault() -> None:
    outlet, reach, draining = FakeOutlet(9), NoReach(), asyncio.Event()
    reach.found.set()

    async def lost(number: int, _rng: random.Random) -> None:
        if number <= 6:
            reach.found.clear()
            await asyncio.sleep(0)
            raise PolicyUnavailableError("http://far", 15.0, "no route")

    async def found_again() -> None:
        while True:
            await reach.asked.wait()
            reach.asked.clear()
            reach.found.set()

    finder = asyncio.create_task(found_again())
    rollouts = reaching(outlet, Scene(lost), reach, draining)
    await rollouts.run()
    finder.cancel()
    assert (rollouts.produced, rollouts.abandoned) == (3, 6)


class Told(RolloutTracer):
    """Keeps what it tells of each rollout: its group, and the paths of its calls."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(RunLayout(run_dir), "sort3-1", "sort3", 1.0)
        self.paths: dict[str, list[str]] = {}

    def _tell(self, group_id: str, calls: list[Call]) -> None:
        self.paths[group_id] = [call.path for call in calls]


async def test_calls_are_traced_with_the_group_of_their_rollout(tmp_path: Path) -> None:
    async def calling(number: int, _rng: random.Random) -> None:
        for _ in range(2):
            with traced_call("engine", f"/{number}"):
                await asyncio.sleep(0)  # the other slots call in between

    outlet, told = FakeOutlet(6), Told(tmp_path)
    await made(Scene(calling), outlet, tracer=told).run()
    assert told.paths.keys() == {group.group_id for group in outlet.groups}
    assert sorted(told.paths.values()) == [[f"/{number}"] * 2 for number in range(1, 7)]


async def test_the_policy_at_its_begin_is_that_of_a_trajectory_without_one() -> None:
    began, sampled = PolicyVersion(0, 3), PolicyVersion(0, 9)

    async def mixed(_number: int, _rng: random.Random) -> list[Trajectory]:
        outlet.credit.policy = sampled
        plain = Trajectory(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -0.5], score=1.0)
        return [plain, replace(plain, oldest=sampled)]

    outlet = FakeOutlet(1)
    outlet.credit.policy = began
    await made(Scene(mixed), outlet).run()
    assert [(one.oldest, one.newest) for one in outlet.groups] == [(began, sampled)]


async def test_ids_are_unique_over_lives_and_randomness_over_workers_and_sessions() -> None:
    ids: set[str] = set()
    drawn: set[float] = set()
    for session in (7, 8):
        outlet, scene = FakeOutlet(5), Scene(good)
        outlet.session = session
        await made(scene, outlet).run()
        ids |= {group.group_id for group in outlet.groups}
        drawn |= set(scene.randoms)
    assert len(ids) == len(drawn) == 10
    assert all(name.startswith("sort3-1/") for name in ids)


@pytest.mark.parametrize("nested", [False, True])
async def test_turns_that_do_not_continue_each_other_are_told_with_the_texts_of_their_tokens(
    nested: bool,
) -> None:
    async def twice() -> list[Trajectory]:
        first, second = [(await ScriptedPolicy("a").complete(text))[0] for text in ("q", "qab")]
        return [Trajectory.of(first).then(second).scored(0.0)]

    async def rewritten(_number: int, _rng: random.Random) -> list[Trajectory]:
        if not nested:
            return await twice()
        async with asyncio.TaskGroup() as members:
            member = members.create_task(twice())
        return member.result()

    outlet, told = FakeOutlet(1), list[str]()
    rollouts = made(Scene(rewritten), outlet, failure_limit=2)
    rollouts._on_failure = lambda _error, why: told.append(why)
    await rollouts.run()
    assert "token 2 is 98 'b', was 0 ''; continue the sampled tokens: policy.complete(text, after" in told[0]


async def test_a_policy_that_cannot_name_tokens_hides_no_mismatch() -> None:
    async def rewritten(_number: int, _rng: random.Random) -> list[Trajectory]:
        first, second = [(await ScriptedPolicy("a").complete(text))[0] for text in ("q", "qab")]
        return [Trajectory.of(first).then(second).scored(0.0)]

    outlet, told = FakeOutlet(1), list[str]()
    rollouts = made(Scene(rewritten), outlet, failure_limit=2)
    rollouts._policy = object()  # type: ignore[assignment]
    rollouts._on_failure = lambda _error, why: told.append(why)
    await rollouts.run()
    assert "token 2 is 98" in told[0]


async def test_as_many_are_under_way_as_there_are_slots() -> None:
    gate = asyncio.Event()

    async def held(_number: int, _rng: random.Random) -> None:
        await gate.wait()

    outlet = FakeOutlet(10)
    rollouts = made(Scene(held), outlet, concurrency=4)
    running = asyncio.create_task(rollouts.run())
    await until(lambda: rollouts.in_hand == 4)
    gate.set()
    await running
    assert outlet.most_in_hand == 4
    assert rollouts.produced == 10


async def raising(_number: int, _rng: random.Random) -> None:
    raise ValueError("boom\n  again")


async def exiting(_number: int, _rng: random.Random) -> None:
    raise SystemExit(2)


async def interrupting(_number: int, _rng: random.Random) -> None:
    raise KeyboardInterrupt


async def cancelling(_number: int, _rng: random.Random) -> None:
    raise asyncio.CancelledError


async def late(_number: int, _rng: random.Random) -> None:
    await asyncio.Event().wait()


async def timing_out(_number: int, _rng: random.Random) -> None:
    raise TimeoutError("a tool")


async def refused(_number: int, _rng: random.Random) -> None:
    raise PolicyRefusedError(400, "too long")


async def empty(_number: int, _rng: random.Random) -> list[Trajectory]:
    return []


async def nonsense(_number: int, _rng: random.Random) -> str:
    return "nonsense"


class AnswerError(Exception):
    """As of a client library: its text is a field that some answers lack."""

    def __str__(self) -> str:
        return {"detail": "rate limited"}["error"]


async def textless(_number: int, _rng: random.Random) -> None:
    raise AnswerError


BAD = [
    (raising, "ValueError: boom again"),
    (exiting, "SystemExit: 2"),
    (interrupting, "KeyboardInterrupt"),
    (cancelling, "the environment cancelled its own task"),
    (late, "took longer than rollout_timeout_s (0.01 s)"),
    (timing_out, "TimeoutError: a tool"),
    (refused, "policy: request refused with status 400: too long"),
    (textless, "AnswerError: <no text, its __str__ raised KeyError>"),
    (empty, "column *: rollout must return at least one Trajectory (got none)"),
    (nonsense, "column *: rollout must return a list of Trajectory (got str)"),
]


@pytest.mark.parametrize(("play", "error"), BAD)
async def test_a_bad_rollout_is_abandoned_and_the_worker_lives_on(play: Play, error: str) -> None:
    async def every_third(number: int, rng: random.Random) -> Any:
        return await play(number, rng) if number % 3 == 0 else None

    outlet = FakeOutlet(9)
    rollouts = made(Scene(every_third), outlet, rollout_timeout_s=0.01, failure_limit=4)
    async with settled(outlet, rollouts):
        await rollouts.run()
    assert (rollouts.produced, rollouts.abandoned) == (6, 3)
    assert rollouts.error == error


@pytest.mark.parametrize(("play", "error"), BAD)
async def test_an_environment_that_only_fails_ends_the_worker(play: Play, error: str) -> None:
    outlet = FakeOutlet(1000)
    rollouts = made(Scene(play), outlet, rollout_timeout_s=0.01, failure_limit=6)
    async with settled(outlet, rollouts):
        with pytest.raises(EnvironmentFailedError) as caught:
            await rollouts.run()
    assert caught.value.env == "sort3"
    assert caught.value.last == error
    assert 6 <= rollouts.abandoned <= 6 + 3
    assert outlet.groups == []


async def test_a_group_that_cannot_be_sent_is_a_failure() -> None:
    outlet = FakeOutlet(100)
    outlet.refusal = GroupTooLargeError(10, 5)
    rollouts = made(Scene(good), outlet, failure_limit=4)
    async with settled(outlet, rollouts):
        with pytest.raises(EnvironmentFailedError, match=r"group: too large \(got 10 bytes, limit 5\)"):
            await rollouts.run()


async def test_what_the_broker_says_is_not_the_environments_doing() -> None:
    outlet = FakeOutlet(100)
    outlet.refusal = SessionFencedError("sort3-1", 7)
    rollouts = made(Scene(good), outlet)
    async with settled(outlet, rollouts):
        with pytest.raises(SessionFencedError):
            await rollouts.run()
    assert rollouts.error == ""


async def test_a_defect_beside_what_the_broker_says_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outlet = FakeOutlet(100)
    errors = [SessionFencedError("sort3-1", 7), KeyError("a defect")]

    async def acquire() -> Permit:
        raise errors.pop(0)

    monkeypatch.setattr(outlet, "acquire", acquire)
    with pytest.raises(SessionFencedError):
        await made(Scene(good), outlet, concurrency=2).run()
    assert "KeyError: 'a defect'" in caplog.text


async def test_cancelling_abandons_what_is_in_hand() -> None:
    outlet = FakeOutlet(100)
    rollouts = made(Scene(late), outlet, concurrency=5)
    async with settled(outlet, rollouts):
        running = asyncio.create_task(rollouts.run())
        await until(lambda: rollouts.in_hand == 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert rollouts.abandoned == 5
    assert rollouts.error == ""


async def test_cancelling_abandons_what_waits_for_room() -> None:
    outlet = FakeOutlet(100)
    outlet.room.clear()
    rollouts = made(Scene(good), outlet, concurrency=2)
    async with settled(outlet, rollouts):
        running = asyncio.create_task(rollouts.run())
        await until(lambda: rollouts.in_hand == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert rollouts.abandoned == 2


async def test_one_traceback_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    outlet = FakeOutlet(1000)
    rollouts = made(Scene(raising), outlet, failure_limit=200)
    with caplog.at_level(logging.ERROR), pytest.raises(EnvironmentFailedError):
        await rollouts.run()
    assert 1 <= len(caplog.records) <= 2
    assert "ValueError: boom" in caplog.text
    assert "in raising" in caplog.text


async def test_an_environment_that_never_waits_leaves_others_their_turn() -> None:
    async def canned(_number: int, _rng: random.Random) -> list[Trajectory]:
        return [Trajectory(token_ids=[1], mask=[True], logprobs=[-1.0], score=0.0)]

    outlet = FakeOutlet(500)
    rollouts = made(Scene(canned), outlet, concurrency=1)
    seen: list[int] = []

    async def watch() -> None:
        while rollouts.produced < 500:
            seen.append(rollouts.produced)
            await asyncio.sleep(0)

    await asyncio.gather(rollouts.run(), watch())
    assert len(seen) > 100


def test_one_in_an_interval_and_the_others_counted() -> None:
    gate = RateLimitedLog(5.0)
    assert [gate.due(now) for now in (0.0, 1.0, 4.9, 5.0, 6.0, 20.0, 25.0)] == [0, None, None, 2, None, 1, 0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\n\n b"), "ValueError: a b"),
        (KeyError(), "KeyError"),
        (ValueError("\udcff"), "ValueError: ?"),
        (DrainingError(), "draining: no new rollout may start; finish those in progress"),
        (ValueError("x" * 10_000), ("ValueError: " + "x" * 10_000)[:ERROR_CHARS]),
        (ExceptionGroup("of a TaskGroup", [ValueError("first"), KeyError("second")]), "ValueError: first"),
        (ExceptionGroup("", [ExceptionGroup("", [DrainingError()])]), str(DrainingError())),
    ],
)
def test_an_error_fits_in_one_line_that_can_travel(error: BaseException, text: str) -> None:
    assert one_line(error) == text
    text.encode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for lies in other objects
            await asyncio.sleep(0.001)
