"""Blocking facades: an event loop in its own thread, for callers without one.

A facade passes every call to the asynchronous object in its loop, so there is only one implementation. Any thread may
call. Ctrl-C cancels the call in the loop and waits for its end before KeyboardInterrupt propagates: an interrupted call
has the same effects as a cancelled one.

A forked child has no copy of the thread: there a call would wait for ever. It raises ForkedError instead, and leaving
the block does nothing, because object, sockets and leases belong to the parent. A pickle would have no copy either, so
clients refuse to be pickled.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar

import uvloop

from rolloutmq.schemas.errors import ClosedError, ForkedError, UsageError

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class OfOneProcess:
    """Something that stays in its process, because it holds sockets, threads or a lease: it refuses to be pickled."""

    __slots__ = ()
    INSTEAD: ClassVar[str] = (
        "pass a run directory or `rolloutmq.remote(...)`, and open another client in the process that uses it"
    )
    """What to pickle instead."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            UsageError: Always.
        """
        name = type(self).__name__
        raise UsageError(f"{name}: cannot be pickled or copied, it belongs to its process; {self.INSTEAD}")


class _Outcome(Generic[R]):
    """Result of a call: set once in the loop's thread, awaited in the caller's."""

    __slots__ = ("_done", "_ended", "_error", "_result")

    def __init__(self) -> None:
        # A lock costs a third of a Future, which is built on one.
        self._done = threading.Lock()
        self._done.acquire()
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
        self._done.release()

    def wait(self, interrupted: Callable[[], None]) -> R:
        """Return the result or raise the error.

        Ctrl-C: call `interrupted`, wait for the end, then re-raise, with a note about an error of the call.
        """
        try:
            self._done.acquire()
        except (KeyboardInterrupt, SystemExit) as interrupt:
            interrupted()
            if not self._ended:  # otherwise the interrupt came after the lock was acquired
                self._done.acquire()
            if self._error is not None and not isinstance(self._error, ClosedError):
                logger.error("interrupted call failed error=%s", self._error)
                interrupt.add_note(
                    f"the interrupted call failed, too: {type(self._error).__name__}: {self._error}"
                )
            raise
        if self._error is not None:
            raise self._error
        return self._result


class LoopThread:
    """A running event loop in a daemon thread; `close` ends both."""

    def __init__(self, name: str) -> None:
        self._owner = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one with the thread."""
        return os.getpid() != self._owner

    def _require_thread(self) -> None:
        if self.forked:
            raise ForkedError(self._thread.name, self._owner)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the loop and block until it ends.

        Raises:
            ClosedError: The loop has ended.
            ForkedError: This process is a forked child.
            KeyboardInterrupt: Ctrl-C; the coroutine was cancelled and has ended.
        """
        if self.forked:
            work.close()
            self._require_thread()
        outcome: _Outcome[R] = _Outcome()
        tasks: list[asyncio.Task[None]] = []

        async def carry() -> None:
            outcome.succeed(await work)  # not in a callback of the task, which costs a turn of the loop

        def start() -> None:
            tasks.append(self._loop.create_task(carry()))
            tasks[0].add_done_callback(lambda task: _end(task, work, outcome))

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:
            work.close()
            raise ClosedError from None
        return outcome.wait(lambda: self._cancel(tasks))

    def start(self, work: Coroutine[Any, Any, R]) -> "StartedCall[R]":
        """Start a coroutine in the loop, and return at once.

        Raises:
            ClosedError: The loop has ended.
            ForkedError: This process is a forked child.
        """
        started: StartedCall[R] = StartedCall(self)
        try:
            self.post(lambda: started._begin(self._loop.create_task(work)))
        except BaseException:
            work.close()
            raise
        return started

    def future(self, work: Coroutine[Any, Any, R]) -> "Future[R]":
        """Start a coroutine in the loop, and return at once. Another loop awaits it with `asyncio.wrap_future`.

        Cancelling the future cancels the coroutine.

        Raises:
            ClosedError: The loop has ended.
            ForkedError: This process is a forked child.
        """
        if self.forked:
            work.close()
            self._require_thread()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise ClosedError from None

    def call(self, function: Callable[..., R], *args: Any) -> R:
        """Run a non-waiting function in the loop's thread, and block until it returns.

        Cheaper than `run`: it needs no task.

        Raises:
            ClosedError: The loop has ended.
            ForkedError: This process is a forked child.
            KeyboardInterrupt: Ctrl-C; the function has returned.
        """
        outcome: _Outcome[R] = _Outcome()

        def act() -> None:
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                outcome.fail(error)
            else:
                outcome.succeed(result)

        self.post(act)
        return outcome.wait(lambda: None)

    def post(self, function: Callable[[], None]) -> None:
        """Make the loop call a function soon, and return at once. Functions run in the order of the calls.

        Raises:
            ClosedError: The loop has ended.
            ForkedError: This process is a forked child.
        """
        self._require_thread()
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            raise ClosedError from None

    def _cancel(self, tasks: "list[asyncio.Task[None]]") -> None:
        self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

    def close(self) -> None:
        """End the loop and its thread; a forked child has neither. May be called twice."""
        if self.forked:
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class StartedCall(Generic[R]):
    """A coroutine that runs in a loop thread while its starter goes on. For one thread."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._task: asyncio.Task[R] | None = None
        self._ended = threading.Event()

    def _begin(self, task: "asyncio.Task[R]") -> None:
        self._task = task
        task.add_done_callback(lambda _: self._ended.set())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it has ended, after at most `timeout_s`; None waits without a limit."""
        return self._ended.wait(timeout_s)

    def result(self) -> R:
        """Return its result once it has ended, or raise its error; ClosedError if it was cancelled."""
        assert self._task is not None
        if self._task.cancelled():
            raise ClosedError
        return self._task.result()

    def cancel(self) -> None:
        """Cancel it and wait for its end: only then its sockets are closed."""

        def cancel() -> None:
            assert self._task is not None
            self._task.cancel()

        self._loop.call(cancel)
        self.wait()


def _end(task: "asyncio.Task[None]", work: Coroutine[Any, Any, R], outcome: "_Outcome[R]") -> None:
    """Hand over the failure of a task that carries `work`, which may have ended before its first turn."""
    work.close()
    if task.cancelled():
        outcome.fail(ClosedError())
    elif (error := task.exception()) is not None:
        outcome.fail(error)


class Facade(OfOneProcess, Generic[T]):
    """A context manager around an asynchronous object in a loop thread.

    Args:
        opening: Makes the object's asynchronous context manager.
        name: Name of the thread.
    """

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        self._opening = opening
        self._name = name
        self._held: tuple[LoopThread, AbstractAsyncContextManager[T], T] | None = None
        self._was_open = False

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
        self._was_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            note_failed_close(error, failure)

    def close(self) -> None:
        """Close the object, then end its thread; blocks until both are done. May be called twice.

        A forked child leaves both alone.
        """
        if self._held is None or self._held[0].forked:
            return
        loop, opened, _ = self._held
        self._held = None

        async def leave() -> None:
            # The error of the block does not enter the loop: a KeyboardInterrupt would end the loop at once.
            await opened.__aexit__(None, None, None)

        try:
            loop.run(leave())
        finally:
            loop.close()

    def _closed(self) -> ClosedError:
        name = type(self).__name__
        if self._was_open:
            return ClosedError(f"{name}: closed; open a new one")
        return ClosedError(f"{name}: not open; use it in a `with` statement")

    @property
    def _object(self) -> T:
        if self._held is None:
            raise self._closed()
        return self._held[2]

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        if self._held is None:
            work.close()
            raise self._closed()
        return self._held[0].run(work)

    def _post(self, function: Callable[[], None]) -> None:
        if self._held is None:
            raise self._closed()
        self._held[0].post(function)

    def _call(self, function: Callable[..., R], *args: Any) -> R:
        if self._held is None:
            raise self._closed()
        return self._held[0].call(function, *args)


def note_failed_close(error: BaseException, failure: Exception) -> None:
    """Add to the error that ended a block how closing failed afterwards, and log it; the error stays the one raised."""
    logger.error("closing failed, too error=%s", failure)
    error.add_note(f"closing failed, too: {type(failure).__name__}: {failure}")


def with_arguments_of(
    _open: Callable[[], Callable[P, AbstractAsyncContextManager[T]]],
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function, for type checkers, the parameters of the `open` that it forwards to.

    Args:
        _open: Returns that `open`; a function, because its class is not complete yet.
    """

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        return function

    return decorate
