"""An event loop in a thread of its own, for code that has none.

The blocking facades hold one of these and hand every call to the asynchronous object that lives in it: there is no
second implementation of anything. Calls may come from any thread. A call that is interrupted (Ctrl-C) is cancelled in
the loop and waited for before KeyboardInterrupt goes on, so that it leaves what a cancelled call leaves.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import uvloop

from rolloutmq.schemas.errors import ClosedError

T = TypeVar("T")
R = TypeVar("R")


class _Outcome(Generic[R]):
    """What a call came to: told once, in the loop's thread, and waited for in that of the caller."""

    __slots__ = ("_ended", "_error", "_result", "_told")

    def __init__(self) -> None:
        # A lock is what a Future is made of, at a third of the price.
        self._told = threading.Lock()
        self._told.acquire()
        self._ended = False
        self._result: R
        self._error: BaseException | None = None

    def succeed(self, result: R) -> None:
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._told.release()

    def wait(self, interrupted: Callable[[], None]) -> R:
        """Return the result or raise the error. Ctrl-C: calls `interrupted`, waits all the same, then goes on."""
        try:
            self._told.acquire()
        except (KeyboardInterrupt, SystemExit):
            interrupted()
            if not self._ended:  # or the interrupt came when the lock was ours already
                self._told.acquire()
            raise
        if self._error is not None:
            raise self._error
        return self._result


class LoopThread:
    """A running event loop in a daemon thread; `close` ends both."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the loop and block until it has ended.

        Raises:
            ClosedError: The loop has ended.
            KeyboardInterrupt: It was interrupted; the coroutine was cancelled and has ended.
        """
        outcome: _Outcome[R] = _Outcome()
        tasks: list[asyncio.Task[R]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _hand_over(task, outcome))

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:
            work.close()
            raise ClosedError from None
        return outcome.wait(lambda: self._cancel(tasks))

    def call(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function that waits for nothing in the loop's thread, and block until it has returned.

        Cheaper than `run`: no task is made.

        Raises:
            ClosedError: The loop has ended.
            KeyboardInterrupt: It was interrupted; the function has returned.
        """
        outcome: _Outcome[R] = _Outcome()

        def act() -> None:
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - it is raised where the function was called from
                outcome.fail(error)
            else:
                outcome.succeed(result)

        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            raise ClosedError from None
        return outcome.wait(lambda: None)

    def _cancel(self, tasks: "list[asyncio.Task[R]]") -> None:
        self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

    def close(self) -> None:
        """End the loop and its thread. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _hand_over(task: "asyncio.Task[R]", outcome: "_Outcome[R]") -> None:
    if task.cancelled():
        outcome.fail(ClosedError())
    elif (error := task.exception()) is not None:
        outcome.fail(error)
    else:
        outcome.succeed(task.result())


class Facade(Generic[T]):
    """A context manager that holds an asynchronous object in a loop thread.

    Args:
        opening: Makes the object's own context manager.
        name: Name of the thread.
    """

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        self._opening = opening
        self._name = name
        self._held: tuple[LoopThread, AbstractAsyncContextManager[T], T] | None = None

    def __enter__(self) -> Self:
        loop = LoopThread(self._name)
        opened = self._opening()

        async def enter() -> T:
            return await opened.__aenter__()

        try:
            self._held = loop, opened, loop.run(enter())
        except BaseException:
            loop.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the object's context, then end the thread. May be called twice."""
        if self._held is None:
            return
        loop, opened, _ = self._held
        self._held = None

        async def leave() -> None:
            # The error of the block stays out of the loop, which a KeyboardInterrupt would end at once.
            await opened.__aexit__(None, None, None)

        try:
            loop.run(leave())
        finally:
            loop.close()

    @property
    def _object(self) -> T:
        if self._held is None:
            raise ClosedError
        return self._held[2]

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        if self._held is None:
            work.close()
            raise ClosedError
        return self._held[0].run(work)

    def _call(self, function: Callable[..., R], *args: Any) -> R:
        if self._held is None:
            raise ClosedError
        return self._held[0].call(function, *args)
