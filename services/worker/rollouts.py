"""Rollouts of one worker: as many at once as it has slots, each with a permit, each ending in a group or in nothing.

A permit is settled exactly once: by sending a group, or by giving it back. Whatever the user's code does (raise, exit,
hang, cancel itself, return nonsense), it costs that rollout and no more; only `failure_limit` of them in a row, over
all slots, end the worker, since then nothing will ever come of it. What the broker says (draining, fenced) is not the
environment's doing and passes through.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol

from rolloutmq.bus.credit import Permit
from rolloutmq.schemas.config import EnvironmentConfig
from rolloutmq.schemas.errors import (
    DrainingError,
    EnvironmentFailedError,
    RolloutMQError,
    UsageError,
)
from rolloutmq.schemas.trajectory import Group
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import group_of

logger = logging.getLogger(__name__)

TRACEBACK_EVERY_S: Final = 5.0
"""A failing environment may fail a thousand times a second: one traceback in so many seconds tells as much."""
ERROR_CHARS: Final = 500
"""Longest one-line error that is reported."""


class Outlet(Protocol):
    """What a rollout needs of a `Producer`."""

    @property
    def session(self) -> int:
        """Number of the session, issued by the broker."""
        ...

    async def acquire(self) -> Permit:
        """Wait until another rollout may begin; DrainingError if none may any more."""
        ...

    async def send(self, group: Group, *, permit: Permit) -> None:
        """Take the group over; from here on it is the producer's to deliver."""
        ...

    def abandon(self, permit: Permit) -> None:
        """Give a permit back that came to nothing."""
        ...


class Rollouts:
    """Runs the rollouts of one worker in one event loop.

    Attributes:
        in_hand: Rollouts under way.
        produced: Groups handed to the producer.
        abandoned: Rollouts that came to nothing.
        error: The last reason why one did, in one line.
    """

    def __init__(
        self,
        worker: str,
        config: EnvironmentConfig,
        environment: Environment,
        policy: Policy,
        outlet: Outlet,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.worker = worker
        self.env = worker.rpartition("-")[0] or worker
        self.config = config
        self._environment = environment
        self._policy = policy
        self._outlet = outlet
        self._seed = seed
        self._clock = clock
        self._life = secrets.token_hex(4)
        self._numbers = count(1)
        self._tracebacks = Occasionally(TRACEBACK_EVERY_S)
        self._failures = 0
        self.in_hand = 0
        self.produced = 0
        self.abandoned = 0
        self.error = ""

    async def run(self) -> None:
        """Roll out until the outlet drains and what was in hand is handed over.

        Cancelled: what is in hand is abandoned.

        Raises:
            EnvironmentFailedError: Too many rollouts in a row came to nothing.
            GivenUpError: The outlet can take no more, for example because a newer worker has its name.
        """
        try:
            async with asyncio.TaskGroup() as slots:
                for slot in range(self.config.concurrency):
                    slots.create_task(self._slot(), name=f"{self.worker} slot {slot}")
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others say the same, or are defects for their own day

    async def _slot(self) -> None:
        while True:
            try:
                permit = await self._outlet.acquire()
            except DrainingError:
                return
            self.in_hand += 1
            try:
                await self._settled(permit)
            finally:
                self.in_hand -= 1
            await asyncio.sleep(0)  # an environment that never waits must not keep the others waiting

    async def _settled(self, permit: Permit) -> None:
        """Do one rollout and settle its permit."""
        try:
            group = await self._group(next(self._numbers))
            if group is not None:
                await self._sent(group, permit)
        finally:
            if permit.is_open:
                self.abandoned += 1
                self._outlet.abandon(permit)
            else:
                self.produced += 1
                self._failures = 0
        if self._failures >= self.config.failure_limit:
            raise EnvironmentFailedError(self.env, self._failures, self.error)

    async def _group(self, number: int) -> Group | None:
        """Run the user's code once; None if nothing came of it. The border behind which anything may happen."""
        rng = random.Random(f"{self._seed}/{self.worker}/{self._outlet.session}/{number}")
        limit_s = self.config.rollout_timeout_s
        started_at = self._clock()
        timer = asyncio.timeout(limit_s)
        try:
            async with timer:
                returned = await self._environment.rollout(self._policy, self.config.group_size, rng)
            return group_of(
                f"{self.worker}/{self._life}-{number}",
                returned,
                started_at=started_at,
                finished_at=self._clock(),
            )
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._failed(error, "the environment cancelled itself")
        except TimeoutError as error:
            late = f"took longer than {limit_s:g} s" if timer.expired() else one_line(error)
            self._failed(error, late)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code: it costs the rollout only
            self._failed(error, one_line(error))
        return None

    async def _sent(self, group: Group, permit: Permit) -> None:
        try:
            await self._outlet.send(group, permit=permit)
        except UsageError as error:  # too large, or a value that cannot travel
            self._failed(error, one_line(error))

    def _failed(self, error: BaseException, why: str) -> None:
        self._failures += 1
        self.error = why
        unsaid = self._tracebacks.due(time.monotonic())
        if unsaid is not None:
            logger.error(
                "rollout abandoned env=%s in_a_row=%d unlogged=%d error=%s",
                self.env,
                self._failures,
                unsaid,
                why,
                exc_info=None if isinstance(error, RolloutMQError) else error,
            )


class Occasionally:
    """Lets one event through in an interval and counts the others. Pure: the clock is passed in."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next = float("-inf")
        self._unsaid = 0

    def due(self, now: float) -> int | None:
        """Return how many were held back since the last one, or None if this one is held back too."""
        if now < self._next:
            self._unsaid += 1
            return None
        unsaid, self._unsaid = self._unsaid, 0
        self._next = now + self._every_s
        return unsaid


def one_line(error: BaseException) -> str:
    """Describe an error in one short line that can travel, whatever its text is."""
    text = " ".join(str(error).split()).encode(errors="replace").decode()
    kind = type(error).__name__
    if not isinstance(error, RolloutMQError):
        text = f"{kind}: {text}" if text else kind
    return text[:ERROR_CHARS]
