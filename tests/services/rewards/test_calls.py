"""Calls of a rater that fails, hangs, returns nonsense or is too popular: missing ratings, never zeros, never waits."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from math import isnan, nan
from typing import Any

import numpy as np
import pytest

from rolloutmq.schemas.config.rewards import RaterConfig
from rolloutmq.services.rewards import calls as calls_module
from rolloutmq.services.rewards.builtin import Exact
from rolloutmq.services.rewards.calls import RaterCalls
from rolloutmq.services.rewards.raters import Rater, Rating


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "RETRY_S", 0.001)


def calls_of(rater: Rater, **settings: Any) -> RaterCalls:
    return RaterCalls(rater, RaterConfig(rater="tested", **settings))


async def in_loop(task: Any, answer: Any) -> float:
    del task
    await asyncio.sleep(0)
    return float(answer)


def in_thread(task: Any, answer: Any) -> float:
    assert task == "task"
    assert threading.current_thread() is not threading.main_thread()
    return float(answer)


@pytest.mark.parametrize("rater", [in_loop, in_thread, lambda task, answer: in_loop(task, answer)])
async def test_every_kind_of_function_rates(rater: Rater) -> None:
    calls = calls_of(rater)
    assert await asyncio.gather(*[calls.rate("task", n) for n in range(20)]) == [float(n) for n in range(20)]
    assert (calls.cost.calls, calls.cost.missing) == (20, 0)
    assert calls.cost.seconds > 0


async def test_a_waiting_thread_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "IDLE_S", 0.5)
    idents = set()

    def rater(*_: Any) -> float:
        idents.add(threading.get_ident())
        return 1.0

    calls = calls_of(rater)
    for _ in range(20):
        await calls.rate(None, None)
        await asyncio.sleep(0.001)
    assert len(idents) < 20


async def test_no_call_is_lost_to_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "IDLE_S", 0.0005)
    calls = calls_of(in_thread, concurrency=4, timeout_s=20.0)
    for _ in range(300):
        assert await asyncio.gather(*[calls.rate("task", n) for n in range(4)]) == [0.0, 1.0, 2.0, 3.0]
        await asyncio.sleep(0.0005)
    assert calls.cost.timed_out == 0


async def test_a_built_in_rater_needs_no_thread() -> None:
    before = threading.active_count()
    assert await calls_of(Exact()).rate("a", "a") == 1.0
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("returned", "value"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (1e308, 1e308), (-3, -3.0), (np.array(2.0), 2.0)],
)
async def test_numbers_are_ratings(returned: Any, value: float) -> None:
    calls = calls_of(lambda *_: returned)
    assert await calls.rate(None, None) == value
    assert calls.cost.missing == 0


@pytest.mark.parametrize(
    "returned", [nan, float("inf"), -float("inf"), "1.0", b"1", [1.0, 2.0], {}, 10**400, object()]
)
async def test_anything_else_is_missing_and_not_asked_again(returned: Any) -> None:
    calls = calls_of(lambda *_: returned, retries=3)
    assert isnan(await calls.rate(None, None))
    assert (calls.cost.calls, calls.cost.invalid, calls.cost.missing) == (1, 1, 1)
    assert "returned no finite number" in calls.cost.error


async def test_no_opinion_is_missing_without_an_error() -> None:
    calls = calls_of(lambda *_: None)
    assert isnan(await calls.rate(None, None))
    assert (calls.cost.invalid, calls.cost.missing, calls.cost.error) == (0, 1, "")


async def test_costs_add_up() -> None:
    calls = calls_of(lambda *_: Rating(0.5, cost=0.25))
    assert [await calls.rate(None, None) for _ in range(4)] == [0.5] * 4
    assert calls.cost.cost == 1.0
    nothing = calls_of(lambda *_: Rating(None, cost=nan))
    assert isnan(await nothing.rate(None, None))
    assert nothing.cost.cost == 0.0


def failing(kind: type[BaseException]) -> Rater:
    def rate(_task: Any, _answer: Any) -> float:
        raise kind("broken")

    return rate


def failing_in_loop(kind: type[BaseException]) -> Rater:
    async def rate(_task: Any, _answer: Any) -> float:
        raise kind("broken")

    return rate


@pytest.mark.parametrize("make", [failing, failing_in_loop])
@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, StopIteration, TimeoutError, asyncio.CancelledError]
)
async def test_a_rater_that_raises_is_asked_again_and_then_missing(
    make: Any, kind: type[BaseException]
) -> None:
    calls = calls_of(make(kind), retries=2)
    assert isnan(await calls.rate(None, None))
    assert (calls.cost.calls, calls.cost.retries, calls.cost.failed) == (3, 2, 3)
    assert (calls.cost.timed_out, calls.cost.missing) == (0, 1)
    assert calls.cost.error


async def test_an_immediate_rater_may_raise_too() -> None:
    calls = calls_of(Exact("key"))
    assert isnan(await calls.rate({}, "answer"))
    assert calls.cost.error == "KeyError: 'key'"


async def test_a_second_attempt_may_succeed() -> None:
    attempts: Iterator[Any] = iter([ValueError("not yet"), 0.75])

    def rate(task: Any, answer: Any) -> float:
        del task, answer
        found = next(attempts)
        if isinstance(found, Exception):
            raise found
        return float(found)

    calls = calls_of(rate, retries=1)
    assert await calls.rate(None, None) == 0.75
    assert (calls.cost.failed, calls.cost.missing) == (1, 0)


async def test_a_coroutine_that_hangs_is_cancelled() -> None:
    ended = asyncio.Event()

    async def hang(task: Any, answer: Any) -> float:
        del task, answer
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    calls = calls_of(hang, timeout_s=0.02)
    assert isnan(await calls.rate(None, None))
    await asyncio.wait_for(ended.wait(), 10)
    assert (calls.cost.timed_out, calls.cost.failed) == (1, 0)
    assert "took longer than timeout_s (0.02 s)" in calls.cost.error


async def test_hung_threads_hold_their_slots_and_nobody_waits_for_them() -> None:
    released = threading.Event()
    started = 0

    def hang(task: Any, answer: Any) -> float:
        nonlocal started
        del task
        started += 1
        if answer:
            released.wait(60)
        return 1.0

    calls = calls_of(hang, timeout_s=0.05, concurrency=2)
    try:
        # Four wait for a slot while two hang; the slots are never free, and the four are missing, too.
        found = await asyncio.gather(*[calls.rate(None, True) for _ in range(6)])
        assert all(map(isnan, found))
        assert started == 2
        assert isnan(await calls.rate(None, False))  # at once
        assert (calls.cost.timed_out, calls.cost.refused, calls.cost.calls) == (2, 5, 2)
        assert calls.cost.seconds < 2 * 10, "without the wait for a slot"
    finally:
        released.set()
    async with asyncio.timeout(30):
        while isnan(await calls.rate(None, False)):  # noqa: ASYNC110 - the threads end when they end
            await asyncio.sleep(0.01)
    assert started >= 3


def test_a_hung_thread_does_not_keep_a_program_alive() -> None:
    released = threading.Event()
    calls = calls_of(lambda *_: released.wait(60), timeout_s=0.02)
    try:
        assert isnan(asyncio.run(calls.rate(None, None)))
        assert isnan(asyncio.run(calls.rate(None, None)))  # another loop has slots of its own
    finally:
        released.set()


async def test_no_more_calls_at_once_than_allowed() -> None:
    running = most = 0

    async def rate(task: Any, answer: Any) -> float:
        nonlocal running, most
        del task, answer
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 1.0

    calls = calls_of(rate, concurrency=3)
    assert await asyncio.gather(*[calls.rate(None, None) for _ in range(20)]) == [1.0] * 20
    assert most == 3


async def test_a_cancelled_rating_cancels_its_coroutine() -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def hang(task: Any, answer: Any) -> float:
        del task, answer
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    calls = calls_of(hang)
    rating = asyncio.ensure_future(calls.rate(None, None))
    await running.wait()
    rating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rating
    await asyncio.wait_for(ended.wait(), 10)


async def test_calls_that_time_out_together_free_their_slots() -> None:
    asked = 0

    async def stalls(task: Any, answer: Any) -> float:
        nonlocal asked
        del task
        asked += 1
        if asked <= 4:
            await asyncio.Event().wait()
        return float(answer)

    calls = calls_of(stalls, timeout_s=0.05, concurrency=4)
    found = await asyncio.gather(*[calls.rate(None, 1.0) for _ in range(16)])
    assert (sum(map(isnan, found)), asked) == (4, 16)
    assert (calls.cost.timed_out, calls.cost.refused) == (4, 0)


async def test_a_coroutine_that_survives_its_cancellation_counts_as_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "GRACE_S", 0.01)
    over = asyncio.Event()

    async def stubborn(task: Any, answer: Any) -> float:
        del task, answer
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()
        return 1.0

    calls = calls_of(stubborn, timeout_s=0.02, concurrency=1)
    assert isnan(await calls.rate(None, None))
    async with asyncio.timeout(30):
        assert isnan(await calls.rate(None, None))
    assert (calls.cost.timed_out, calls.cost.refused) == (1, 1)
    over.set()


async def test_a_cancelled_rating_leaves_a_hung_thread_that_nobody_waits_for() -> None:
    released = threading.Event()
    calls = calls_of(lambda _, answer: released.wait(60) if answer else 0.5, concurrency=1)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await calls.rate(None, True)
        async with asyncio.timeout(30):
            assert isnan(await calls.rate(None, False))
        assert calls.cost.refused == 1
    finally:
        released.set()


async def test_a_call_that_cannot_start_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def takes_one(_task: Any) -> float:
        return 1.0

    wrong = calls_of(takes_one, concurrency=1)  # type: ignore[arg-type]
    for _ in range(3):
        async with asyncio.timeout(30):
            assert isnan(await wrong.rate(None, None))
    assert wrong.cost.failed == 3
    assert "TypeError" in wrong.cost.error

    calls = calls_of(lambda *_: 1.0, concurrency=1)
    with monkeypatch.context() as patch:

        def none_left(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", none_left)
        assert isnan(await calls.rate(None, None))
    assert await calls.rate(None, None) == 1.0


class Odd:
    """Raises whatever is asked of it."""

    def __float__(self) -> float:
        raise KeyError("no number")

    def __repr__(self) -> str:
        raise ValueError("no text")


class OddError(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("cost", [None, "1", 10**400, Odd()])
async def test_a_cost_that_is_no_number_costs_nothing_and_spares_the_rating(cost: Any) -> None:
    calls = calls_of(lambda *_: Rating(0.5, cost))
    assert await calls.rate(None, None) == 0.5
    assert calls.cost.cost == 0.0


async def test_a_value_or_error_that_cannot_be_shown_is_missing() -> None:
    odd = calls_of(lambda *_: Odd())  # type: ignore[arg-type]
    assert isnan(await odd.rate(None, None))
    assert odd.cost.invalid == 1

    def raises(_task: Any, _answer: Any) -> float:
        raise OddError

    calls = calls_of(raises)
    assert isnan(await calls.rate(None, None))
    assert calls.cost.error == "OddError"
