"""The waiters for credit of one producer, served in order of arrival. No socket; one event loop.

There are two queues: tasks waiting for a permit, and groups waiting for room in the spool. `serve` distributes the
credit whenever it may have grown; nothing polls. If a waiter is cancelled just when it is served, its permit goes to
the next one; a group that is in the spool stays there. A time limit fails the waiter instead of cancelling it, so a
waiter is either served or late.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from rolloutmq.bus.producer.credit import Permit
from rolloutmq.bus.producer.send_inbox import SendInbox
from rolloutmq.bus.producer.session import SessionState, StagedGroup
from rolloutmq.schemas.errors import ClosedError, DrainingError, ForkedError, UsageError, WaitTimeoutError
from rolloutmq.schemas.group import Group


class _Sending(NamedTuple):
    group: Group
    laid: StagedGroup
    permit: Permit
    done: "asyncio.Future[None]"


class CreditWaiters:
    """Queues of the tasks and groups that wait for credit."""

    def __init__(self, session: SessionState) -> None:
        self.draining = asyncio.Event()
        """No new rollout may start."""
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        """Calls that wait until the group of this ordinal, and all before it, are acked."""
        self.failure: Exception | None = None
        """Error that every further call raises, once there is one."""
        self.problem: Callable[[], str] = lambda: ""
        """Returns what the waiters wait for, for the error of a late one."""
        self.inbox: SendInbox | None = None
        """What other threads send to a blocking producer."""
        self._session = session
        self._owner = os.getpid()
        self._starters: deque[asyncio.Future[Permit]] = deque()
        self._senders: deque[_Sending] = deque()
        self._acks: dict[str, asyncio.Future[None]] = {}
        """Futures of awaited acks, by group id."""
        self._handed_over: dict[str, asyncio.Future[None]] = {}
        """Those whose group is in the spool, until its sender has fetched the future."""
        self._waiters = 0
        self._served_at = 0.0
        """When a waiter last got something, or the first of the present ones began to wait."""
        self._refused_at = 0.0
        """Since when the first group of the inbox lacks credit; 0 if it does not."""
        self._waited_s = 0.0
        self._counted_at = 0.0

    @property
    def waits_s(self) -> float:
        """Seconds that all tasks have waited in total, current waits included."""
        self._count()
        return self._waited_s

    def stuck_s(self) -> float:
        """Return for how many seconds tasks or groups have waited and none got anything; 0 if none waits."""
        now = time.monotonic()
        if self._starters or self._senders:
            return now - self._served_at
        return now - self._refused_at if self.inbox_groups and self._refused_at else 0.0

    @property
    def waiting(self) -> bool:
        """Whether a task or a group waits for credit."""
        return bool(self._starters or self._senders or self.inbox_groups)

    @property
    def flushing(self) -> bool:
        """Whether a call waits until every group is acked."""
        return bool(self._flushes)

    async def flushed(self, timeout_s: float | None) -> bool:
        """Wait until every group that is sent by now is acked; False after `timeout_s`, or if the producer ends."""
        session = self._session
        last = session.spool.added + self.inbox_groups
        if session.spool.done(last):
            return True
        flush = last, _future()
        self._flushes.append(flush)
        try:
            async with asyncio.timeout(timeout_s):
                await flush[1]
        except TimeoutError:
            pass
        finally:
            self._flushes.remove(flush)
        return session.spool.done(last)

    def take(self) -> Permit | None:
        """Return a permit if one is available and no task waits; otherwise None."""
        self.require_open()
        if self._session.draining:
            raise DrainingError
        return None if self._starters else self._session.credit.begin()

    async def acquire(self, timeout_s: float | None = None, what: str = "acquire") -> Permit:
        """Wait for a permit. Cancelled: the next waiter gets it.

        Raises:
            WaitTimeoutError: There was none within `timeout_s`; `what` is the name of the call.
        """
        if permit := self.take():
            return permit
        waiter: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        self._starters.append(waiter)
        self._count(+1)
        try:
            with self._limited(waiter, what, timeout_s):
                return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.put_back(waiter.result())
            raise
        finally:
            self._count(-1)
            with suppress(ValueError):
                self._starters.remove(waiter)

    def admit(self, group: Group, laid: StagedGroup, permit: Permit | None) -> bool:
        """Put the group into the spool and end its permit, if that needs no waiting; otherwise do nothing.

        Without a permit it takes one.

        Returns:
            Whether the group is in the spool.

        Raises:
            UsageError: The permit has ended already.
            DrainingError: No permit was given, and no new rollout may start.
        """
        if self.failure is not None:
            self.require_open()
        session, credit = self._session, self._session.credit
        if permit is not None:
            if not permit.is_open:
                raise UsageError(
                    "permit: already ended, its group was sent or it was abandoned; acquire a new one"
                )
        elif session.draining:
            raise DrainingError
        elif self._starters or credit.begun >= credit.start_limit or credit.paused:
            return False
        if self._senders or not session.may_spool(laid.encoded.nbytes):
            return False
        self._take_in(group, laid, permit)
        return True

    def may_take(self, groups: int, nbytes: int) -> bool:
        """Whether so many more groups, the last of so many bytes, would not wait. Any thread may ask."""
        session = self._session
        return (
            self.failure is None
            and not session.draining
            and not (self._starters or self._senders)
            and session.credit.may_begin_all(groups)
            and session.may_spool(nbytes)
        )

    def may_take_now(self, nbytes: int) -> bool:
        """Whether a group of the inbox may enter the spool, before all that wait; note since when it may not."""
        may = self._session.credit.may_begin and self._session.may_spool(nbytes)
        self._refused_at = 0.0 if may else self._refused_at or time.monotonic()
        return may

    def take_in(self, group: Group, laid: StagedGroup) -> None:
        """Put a group of the inbox into the spool. Without credit it is saved or reported with the others."""
        self._refused_at = 0.0
        self._take_in(group, laid, None)

    async def hand_over(
        self, group: Group, laid: StagedGroup, permit: Permit | None, timeout_s: float | None = None
    ) -> None:
        """Wait for a permit if none is given, then for room in the spool.

        Cancelled or late: either the group is in the spool and the permit has ended, or neither. A permit taken here is
        put back.

        Raises:
            UsageError: The permit has ended already.
            DrainingError: No permit was given, and no new rollout may start.
            WaitTimeoutError: The group is not in the spool after `timeout_s`.
        """
        began = time.monotonic()
        held = permit or await self.acquire(timeout_s, "send")
        try:
            if not self.admit(group, laid, held):
                left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
                await self._admitted(_Sending(group, laid, held, _future()), left_s, timeout_s)
        finally:
            if permit is None and held.is_open:
                self.put_back(held)

    async def _admitted(self, sending: _Sending, left_s: float | None, timeout_s: float | None) -> None:
        self._senders.append(sending)
        self._count(+1)
        try:
            with self._limited(sending.done, "send", left_s, timeout_s):
                await sending.done
        finally:
            self._count(-1)
            if sending in self._senders:
                self._senders.remove(sending)
                self.serve()

    @contextmanager
    def _limited(
        self, waiter: "asyncio.Future[Any]", what: str, left_s: float | None, timeout_s: float | None = None
    ) -> Iterator[None]:
        """Fail a waiter that is not served within `left_s`, the rest of `timeout_s`."""
        if left_s is None:
            yield
            return

        def late() -> None:
            _fail(waiter, WaitTimeoutError(what, left_s if timeout_s is None else timeout_s, self.problem()))

        timer = asyncio.get_running_loop().call_later(left_s, late)
        try:
            yield
        finally:
            timer.cancel()

    def expect(self, group_id: str) -> "asyncio.Future[None]":
        """Return a future that ends with the group's ack, or fails with the producer."""
        self.require_open()
        return self._acks.setdefault(group_id, asyncio.get_running_loop().create_future())

    def handed_over(self, group_id: str) -> "asyncio.Future[None] | None":
        """Return the future of `expect` if the group is in the spool or acked; otherwise forget it. Call it once."""
        ack = self._handed_over.pop(group_id, None)
        if ack is None:
            self._acks.pop(group_id, None)
        return ack

    def acked(self, group_ids: Iterable[str]) -> None:
        """End the futures of these groups."""
        if not self._acks:
            return
        for group_id in group_ids:
            ack = self._acks.pop(group_id, None)
            if ack is not None and not ack.done():
                ack.set_result(None)

    def _count(self, change: int = 0) -> None:
        """Add the waited time since the last call; `change` is added to the number of waiters."""
        now = time.monotonic()
        self._waited_s += self._waiters * (now - self._counted_at)
        self._counted_at = now
        if not self._waiters or change < 0:
            self._served_at = now
        self._waiters += change

    def _take_in(self, group: Group, laid: StagedGroup, permit: Permit | None) -> None:
        credit = self._session.credit
        if self._acks and (ack := self._acks.get(group.group_id)) is not None:
            self._handed_over[group.group_id] = ack
        if permit is None:
            self._session.take_in(group, laid, credit.policy)
            credit.spend()
        else:
            self._session.take_in(group, laid, permit.policy)
            credit.arrive(permit)

    def put_back(self, permit: Permit) -> None:
        """Give an unused permit to the next waiter."""
        self._session.credit.put_back(permit)
        self.serve()

    def serve(self) -> None:
        """Distribute the available credit. Call it whenever it may have grown."""
        session = self._session
        if session.draining:
            self.draining.set()
        self._pour(session.draining)
        while self._starters and session.draining:
            _fail(self._starters.popleft(), DrainingError())
        while self._starters and (permit := session.credit.begin()):
            waiter = self._starters.popleft()
            if waiter.done():
                session.credit.put_back(permit)
            else:
                waiter.set_result(permit)
        while self._senders and session.may_spool(self._senders[0].laid.encoded.nbytes):
            sending = self._senders.popleft()
            if not sending.done.done():
                self._take_in(sending.group, sending.laid, sending.permit)
                sending.done.set_result(None)
        for last, flush in self._flushes:
            if not flush.done() and session.spool.done(last):
                flush.set_result(None)

    @property
    def inbox_groups(self) -> int:
        """Number of groups in the inbox."""
        return 0 if self.inbox is None else len(self.inbox)

    def _pour(self, whole: bool) -> None:
        """Take groups from the inbox before anybody who waits: they were sent first."""
        if self.inbox is None or not len(self.inbox):
            return
        if whole:
            self.inbox.pour_all()
        else:
            self.inbox.pour()

    def shut(self, failure: Exception | None) -> None:
        """Fail all waiting and later calls, with ClosedError if there was no failure."""
        if self.inbox is not None:
            self.inbox.seal()
        self.failure = failure or ClosedError()
        while self._starters:
            _fail(self._starters.popleft(), self.failure)
        while self._senders:
            _fail(self._senders.popleft().done, self.failure)
        if failure is not None:
            self.fail_acks(failure)

    def fail_acks(self, failure: Exception) -> None:
        """Fail the futures of awaited acks, and end all waits for them. Groups in the spool may still be saved."""
        for _, flush in self._flushes:
            if not flush.done():
                flush.set_result(None)
        while self._acks:
            _fail(self._acks.popitem()[1], failure)

    def require_open(self) -> None:
        """Raise the error of the producer, if it has one, and refuse a forked child."""
        if os.getpid() != self._owner:
            raise ForkedError(f"producer {self._session.register.producer}", self._owner)
        if self.failure is not None:
            # The same error is raised many times: without this its traceback would grow with each of them.
            raise self.failure.with_traceback(None)


def _future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


def _fail(waiter: "asyncio.Future[Any]", error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
