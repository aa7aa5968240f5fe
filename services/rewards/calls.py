"""Calls of one rater: time-out, retries, bound of concurrency, and cost.

A rating is a finite number, or missing. It is missing if the rater raises, takes too long, has no opinion (None) or
returns anything but a finite number. Nothing of that reaches the caller as an exception, and nothing becomes a zero.

    async def            runs in the event loop; cancelled at its time-out, and then its slot is free
    `is_immediate`       is called in the event loop and must not block: the built-in raters
    any other function   runs in a daemon thread, one call at a time

A thread cannot be ended: after its time-out its rating is missing, and it keeps its slot until it returns. So does a
coroutine that goes on for `GRACE_S` after it was cancelled. While such hung calls hold all slots, further ratings are
missing at once, so neither threads nor waits pile up.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, Final

from rolloutmq.schemas.config.rewards import RaterConfig
from rolloutmq.schemas.printable import printable
from rolloutmq.services.rewards.raters import Rater, Rating

RETRY_S: Final = 0.05
"""Pause before the first further attempt, in seconds; doubles up to `RETRY_MAX_S`."""
RETRY_MAX_S: Final = 5.0
GRACE_S: Final = 1.0
"""Time in which a cancelled coroutine must end, in seconds."""
ERROR_CHARS: Final = 200
IDLE_S: Final = 1.0
"""Time after which an idle thread ends, in seconds."""


@dataclass(slots=True)
class RaterCost:
    """What a rater was asked, and what it cost.

    Attributes:
        calls: Calls, retries included.
        retries: Further attempts.
        failed, timed_out, invalid: Calls that raised, took too long, or returned no finite number.
        refused: Ratings that were not asked for, because hung calls held all slots.
        rated: Ratings that were given.
        missing: Ratings that stayed missing, also those without an opinion.
        seconds: Time of all calls, added up; not the time in which they waited for a slot.
        cost: Sum of the costs that the rater reported.
        error: Last failure in one line.
    """

    calls: int = 0
    retries: int = 0
    failed: int = 0
    timed_out: int = 0
    invalid: int = 0
    refused: int = 0
    rated: int = 0
    missing: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    error: str = ""


class RaterFaultError(Exception):
    """The rating is missing, and the rater raised nothing.

    Attributes:
        users_function: The rater.
    """

    def __init__(self, problem: str, users_function: Any) -> None:
        super().__init__(problem)
        self.users_function = users_function


class RaterLateError(RaterFaultError, TimeoutError):
    """The rater took longer than its time-out."""


class RaterCalls:
    """Calls one rater. For one event loop at a time.

    Attributes:
        cost: Counters since the start.
        fault: Why the last rating is missing: what the rater raised, or a RaterFaultError. None if it is there, or if
            the rater had no opinion.
    """

    def __init__(self, rater: Rater, config: RaterConfig) -> None:
        self._rater: Callable[[Any, Any], Any] = rater
        self._config = config
        self._is_immediate = bool(getattr(rater, "is_immediate", False))
        self._is_async = any(map(inspect.iscoroutinefunction, (rater, getattr(rater, "__call__", None))))  # noqa: B004
        self._slots = _Slots(config.concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.cost = RaterCost()
        self.fault: BaseException | None = None

    async def rate(self, task: Any, answer: Any) -> float:
        """Return the rating of an answer, NaN if it is missing. Waits up to the time-out for each attempt."""
        pause_s, value = RETRY_S, nan
        for left in range(self._config.retries, -1, -1):
            value, again = await self._attempt(task, answer)
            if isfinite(value) or not (again and left):
                break
            self.cost.retries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)
        self.cost.rated += isfinite(value)
        self.cost.missing += not isfinite(value)
        return value

    async def _attempt(self, task: Any, answer: Any) -> tuple[float, bool]:
        """Call the rater once. Return the rating, and whether another attempt may help."""
        self.cost.calls += 1
        try:
            returned = await self._returned(task, answer)
        except _HungError:
            self.cost.calls -= 1
            self.cost.refused += 1
            self.cost.error = f"{self._config.concurrency} calls hang, as many as concurrency allows"
            return nan, False
        except TimeoutError:
            self.cost.timed_out += 1
            self.cost.error = f"took longer than timeout_s ({self._config.timeout_s:g} s)"
            self.fault = RaterLateError(self.cost.error, self._rater)
            return nan, True
        except _RaisedError as error:
            self.cost.failed += 1
            self.cost.error = _one_line(error.cause)
            self.fault = error.cause
            return nan, True
        return self._value(returned), False

    async def _returned(self, task: Any, answer: Any) -> Any:
        if self._is_immediate:
            with self._timed():
                try:
                    return self._rater(task, answer)
                except (Exception, SystemExit) as error:
                    raise _RaisedError(error) from error
        if self._is_async:
            return await self._ended(lambda: asyncio.ensure_future(_guarded(self._rater(task, answer))))
        threads = self._slots_here().threads
        returned = await self._ended(lambda: _threaded(threads, self._rater, task, answer))
        if inspect.isawaitable(returned):  # of a function that wraps a coroutine
            return await self._ended(lambda: asyncio.ensure_future(_guarded(returned)))
        return returned

    async def _ended(self, start: Callable[[], asyncio.Future[Any]]) -> Any:
        """Start a call in a slot and return its result."""
        slots = self._slots_here()
        await slots.take()
        with self._timed():
            try:
                call = start()
            except (Exception, SystemExit) as refused:
                slots.free()
                raise _RaisedError(refused) from refused
            call.add_done_callback(slots.release)
            try:
                done, _ = await asyncio.wait({call}, timeout=self._config.timeout_s)
            except asyncio.CancelledError:
                slots.leave(call)
                raise
            if not done:
                slots.leave(call)
                raise TimeoutError
        if call.cancelled():
            raise _RaisedError(RuntimeError("the rater cancelled its own call"))
        if error := call.exception():
            raise _RaisedError(error)
        return call.result()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time of a call."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.cost.seconds += time.perf_counter() - started

    def _slots_here(self) -> "_Slots":
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._slots = loop, _Slots(self._config.concurrency)
        return self._slots

    def _value(self, returned: Any) -> float:
        value, cost = returned if isinstance(returned, Rating) else (returned, 0.0)
        spent = _number(cost)
        self.fault = None
        self.cost.cost += spent if isfinite(spent) else 0.0
        if value is None:
            return nan
        number = _number(value)
        if not isfinite(number):
            self.cost.invalid += 1
            shown = printable(_text(value, repr))
            self.cost.error = f"returned no finite number ({type(value).__name__} {shown:.40})"
            self.fault = RaterFaultError(self.cost.error, self._rater)
        return number if isfinite(number) else nan


class _RaisedError(Exception):
    """The user's code raised `cause`."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class _HungError(Exception):
    """Hung calls hold all slots."""


class _Slots:
    """Slots for the calls of one event loop.

    Attributes:
        threads: Threads of those calls that need one.
    """

    def __init__(self, count: int) -> None:
        self.threads = _Threads()
        self._count = count
        self._taken = 0
        self._hung: set[asyncio.Future[Any]] = set()
        self._changed = asyncio.Event()

    async def take(self) -> None:
        """Wait for a slot. Raises _HungError while hung calls hold all of them."""
        while self._taken >= self._count:
            if len(self._hung) >= self._count:
                raise _HungError
            await self._changed.wait()
        self._taken += 1

    def leave(self, call: asyncio.Future[Any]) -> None:
        """Cancel a call that nobody waits for any more. One that does not end keeps its slot, and counts as hung."""
        if isinstance(call, asyncio.Task):
            call.cancel()
            asyncio.get_running_loop().call_later(GRACE_S, self._hangs, call)
        else:
            self._hangs(call)  # a thread cannot be cancelled

    def _hangs(self, call: asyncio.Future[Any]) -> None:
        if not call.done():
            self._hung.add(call)
            self._pulse()

    def release(self, call: asyncio.Future[Any]) -> None:
        """Free the slot of an ended call, and retrieve its error."""
        self._hung.discard(call)
        if not call.cancelled():
            call.exception()
        self.free()

    def free(self) -> None:
        """Free the slot of a call that was never made, or has ended."""
        self._taken -= 1
        self._pulse()

    def _pulse(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _guarded(returned: Any) -> Any:
    """Await a call. A SystemExit becomes a RuntimeError: from its own task it would end the event loop."""
    try:
        return await returned
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


class _Threads:
    """Daemon threads for calls: as many as there are calls at once. An idle one ends after `IDLE_S`.

    The start of a thread costs more than a short function. The executors of the standard library have no daemon
    threads: a hung rater would keep the process alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Thread] = []

    def run(self, call: Callable[[], None]) -> None:
        """Run a call, which must not raise, in an idle thread or in a new one."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            _Thread(self, call)
        else:
            thread.give(call)

    def returns(self, thread: "_Thread") -> None:
        """Count a thread as idle: it may be given a call from now on."""
        with self._lock:
            self._idle.append(thread)

    def ends(self, thread: "_Thread") -> bool:
        """Return whether an idle thread may end; False if a call for it is about to come."""
        with self._lock:
            if thread in self._idle:
                self._idle.remove(thread)
                return True
            return False


class _Thread:
    """One thread of `_Threads`."""

    def __init__(self, threads: _Threads, call: Callable[[], None]) -> None:
        self._threads = threads
        self._call = call
        self._given = threading.Lock()
        self._given.acquire()
        threading.Thread(target=self._work, name="rater", daemon=True).start()

    def give(self, call: Callable[[], None]) -> None:
        """Hand a call to this thread, which is idle."""
        self._call = call
        self._given.release()

    def _work(self) -> None:
        while True:
            self._call()
            self._call = _nothing  # keeps no answer alive
            self._threads.returns(self)
            if not self._given.acquire(timeout=IDLE_S):
                if self._threads.ends(self):
                    return
                self._given.acquire()


def _nothing() -> None:
    """Be the call of an idle thread."""


def _threaded(
    threads: _Threads, rater: Callable[[Any, Any], Any], task: Any, answer: Any
) -> asyncio.Future[Any]:
    """Start a function in a daemon thread; return the future of its result."""
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = rater(task, answer)
        except (
            StopIteration,
            SystemExit,
        ) as raised:  # a future refuses the first, and the second ends the loop
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        except BaseException as raised:  # noqa: BLE001 - carried to the event loop
            error = raised
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(_deliver, returned, result, error)

    threads.run(run)
    return returned


def _deliver(returned: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if error is not None:
        returned.set_exception(error)
    else:
        returned.set_result(result)


def _number(value: Any) -> float:
    """Return a value as a number; NaN if it is none."""
    if isinstance(value, str | bytes | bytearray):
        return nan
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - `__float__` is the user's code
        return nan


def _text(value: Any, show: Callable[[Any], str] = str) -> str:
    try:
        return show(value)
    except Exception:  # noqa: BLE001 - `__str__` and `__repr__` are the user's code
        return ""


def _one_line(error: BaseException) -> str:
    text = printable(" ".join(_text(error).split()))
    return f"{type(error).__name__}: {text}"[:ERROR_CHARS] if text else type(error).__name__
