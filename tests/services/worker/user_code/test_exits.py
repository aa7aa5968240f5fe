"""Tasks that cannot end the event loop."""

import asyncio
import gc
import warnings
from collections.abc import Callable
from inspect import CORO_SUSPENDED, getcoroutinestate
from typing import Any

import pytest
import uvloop

from rolloutmq.services.worker.user_code.exits import contain_exits

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


async def leaving(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def run(main: Callable[[], Any], loop: Callable[[], asyncio.AbstractEventLoop] = LOOPS[0]) -> Any:
    async def contained() -> Any:
        contain_exits(asyncio.get_running_loop())
        return await main()

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(contained())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(4), "SystemExit: 4"),
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_exit_in_a_task_is_an_error_of_its_awaiter(
    error: BaseException, said: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> str:
        with pytest.raises(RuntimeError) as caught:
            await asyncio.gather(leaving(error))
        assert caught.value.__cause__ is error
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(leaving(error), name="mine", context=None)
        return str(caught.value)

    assert run(main, loop) == said


def test_an_exit_at_a_cancellation_is_contained_too() -> None:
    async def main() -> None:
        async def stubborn() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise SystemExit(1) from None

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(RuntimeError, match="SystemExit: 1"):
            await task

    run(main)


def test_other_errors_and_values_pass() -> None:
    async def main() -> None:
        assert await asyncio.create_task(asyncio.sleep(0, "value")) == "value"
        with pytest.raises(ValueError, match="mine"):
            await asyncio.create_task(leaving(ValueError("mine")))

    run(main)


def test_a_task_looks_like_its_coroutine() -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.Event().wait(), name="waiter")
        await asyncio.sleep(0)
        assert getcoroutinestate(task.get_coro()) == CORO_SUSPENDED  # type: ignore[arg-type]
        assert "coro=<Event.wait()" in repr(task)
        assert task.get_name() == "waiter"
        assert task.get_stack()
        task.cancel()

    run(main)


def test_a_task_cancelled_before_its_first_step_warns_of_nothing() -> None:
    async def main() -> None:
        task = asyncio.create_task(leaving(SystemExit(1)))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(main)
        gc.collect()
    assert told == []
