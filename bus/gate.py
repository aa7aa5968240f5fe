"""Who waits for credit, in the order in which they came, and what wakes them. No socket; one event loop.

Two queues: tasks that want to begin a rollout, and groups that want to come into the spool. `serve` is called
whenever credit may have grown and gives out what there is; nobody polls. A waiter that is cancelled in the moment in
which it was served gives its permit to the next; a group that was taken in stays taken in.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from rolloutmq.bus.credit import Permit
from rolloutmq.bus.session import Laid, Session
from rolloutmq.schemas.errors import ClosedError, DrainingError, UsageError
from rolloutmq.schemas.trajectory import Group


class _Sending(NamedTuple):
    group: Group
    laid: Laid
    permit: Permit
    done: "asyncio.Future[None]"


class Gate:
    """The waiting of one producer."""

    def __init__(self, session: Session) -> None:
        self.draining = asyncio.Event()
        """Nothing new may be begun."""
        self.empty = asyncio.Event()
        """Every group that was handed over is acked."""
        self.empty.set()
        self.failure: Exception | None = None
        """Why nothing goes through any more, if so."""
        self._session = session
        self._starters: deque[asyncio.Future[Permit]] = deque()
        self._senders: deque[_Sending] = deque()
        self._acks: dict[str, asyncio.Future[None]] = {}
        """Who waits for the ack of which group."""
        self._handed_over: dict[str, asyncio.Future[None]] = {}
        """Those of them whose group is in the spool, until its sender has been told."""
        self._waiters = 0
        self._waited_s = 0.0
        self._counted_at = 0.0

    @property
    def waits_s(self) -> float:
        """Seconds that tasks have waited, all of them together, those that wait now included."""
        self._count()
        return self._waited_s

    @property
    def waiting(self) -> bool:
        """Whether anybody waits for credit."""
        return bool(self._starters or self._senders)

    async def emptied(self, timeout_s: float | None) -> bool:
        """Wait until every group that was handed over is acked; False if that took longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.empty.wait()
        return self.empty.is_set()

    def take(self) -> Permit | None:
        """Return a permit if there is one now that nobody waits for."""
        self.require_open()
        if self._session.draining:
            raise DrainingError
        return None if self._starters else self._session.credit.begin()

    async def acquire(self) -> Permit:
        """Wait for a permit. Cancelled: it goes to the next who waits."""
        if permit := self.take():
            return permit
        waiter: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        self._starters.append(waiter)
        self._count(+1)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.put_back(waiter.result())
            raise
        finally:
            self._count(-1)
            with suppress(ValueError):
                self._starters.remove(waiter)

    def admit(self, group: Group, laid: Laid, permit: Permit | None) -> bool:
        """Put the group into the spool, which ends the permit, if nothing must be waited for. False: nothing happened.

        Without a permit one is taken.

        Raises:
            UsageError: The permit has ended already.
            DrainingError: No permit was given, and none is given any more.
        """
        self.require_open()
        session = self._session
        if permit is not None:
            if not permit.is_open:
                raise UsageError("the permit has ended: its group was sent, or it was abandoned")
        elif session.draining:
            raise DrainingError
        elif self._starters or not session.credit.may_begin:
            return False
        if self._senders or not session.may_spool(laid.encoded.nbytes):
            return False
        self._take_in(group, laid, permit)
        return True

    async def hand_over(self, group: Group, laid: Laid, permit: Permit | None) -> None:
        """Wait for a permit, if there is none, then until the group is in the spool, which ends it.

        Cancelled: the group is in the spool and the permit has ended, or neither; one that was not given is put back.

        Raises:
            UsageError: The permit has ended already.
            DrainingError: No permit was given, and none is given any more.
        """
        held = permit or await self.acquire()
        try:
            if not self.admit(group, laid, held):
                await self._admitted(group, laid, held)
        finally:
            if permit is None and held.is_open:
                self.put_back(held)

    async def _admitted(self, group: Group, laid: Laid, permit: Permit) -> None:
        sending = _Sending(group, laid, permit, asyncio.get_running_loop().create_future())
        self._senders.append(sending)
        self.empty.clear()
        self._count(+1)
        try:
            await sending.done
        finally:
            self._count(-1)
            if sending in self._senders:
                self._senders.remove(sending)
                self.serve()

    def expect(self, group_id: str) -> "asyncio.Future[None]":
        """Return what is done once the group is acked, or fails when nothing goes through any more."""
        self.require_open()
        return self._acks.setdefault(group_id, asyncio.get_running_loop().create_future())

    def handed_over(self, group_id: str) -> "asyncio.Future[None] | None":
        """Return what `expect` returned, if the group is in the spool or was acked; once. Else expect it no longer."""
        ack = self._handed_over.pop(group_id, None)
        if ack is None:
            self._acks.pop(group_id, None)
        return ack

    def acked(self, group_ids: Iterable[str]) -> None:
        """Tell those who wait for the acks of these groups."""
        if not self._acks:
            return
        for group_id in group_ids:
            ack = self._acks.pop(group_id, None)
            if ack is not None and not ack.done():
                ack.set_result(None)

    def _count(self, change: int = 0) -> None:
        """Bring the time that was waited up to date; from now on so many more wait."""
        now = time.monotonic()
        self._waited_s += self._waiters * (now - self._counted_at)
        self._counted_at = now
        self._waiters += change

    def _take_in(self, group: Group, laid: Laid, permit: Permit | None) -> None:
        credit = self._session.credit
        if (ack := self._acks.get(group.group_id)) is not None:
            self._handed_over[group.group_id] = ack
        if permit is None:
            self._session.take_in(group, laid, credit.policy)
            credit.spend()
        else:
            self._session.take_in(group, laid, permit.policy)
            credit.arrive(permit)
        self.empty.clear()

    def put_back(self, permit: Permit) -> None:
        """Give a permit that nothing was begun with to the next who waits."""
        self._session.credit.put_back(permit)
        self.serve()

    def serve(self) -> None:
        """Give out what credit there is. Call it whenever there may be more."""
        session = self._session
        if session.draining:
            self.draining.set()
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
        if not self._senders and not len(session.spool):
            self.empty.set()

    def shut(self, failure: Exception | None) -> None:
        """Fail whoever waits or comes, with ClosedError if there was no failure."""
        self.failure = failure or ClosedError()
        while self._starters:
            _fail(self._starters.popleft(), self.failure)
        while self._senders:
            _fail(self._senders.popleft().done, self.failure)
        if failure is not None:
            self.fail_acks(failure)
        if failure is not None or not len(self._session.spool):
            self.empty.set()

    def fail_acks(self, failure: Exception) -> None:
        """Tell those who wait for acks that none will come; what is in the spool may be saved all the same."""
        while self._acks:
            _fail(self._acks.popitem()[1], failure)

    def require_open(self) -> None:
        """Raise why nothing goes through any more, if so."""
        if self.failure is not None:
            raise self.failure


def _fail(waiter: "asyncio.Future[Permit] | asyncio.Future[None]", error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
