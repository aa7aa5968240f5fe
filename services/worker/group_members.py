"""Members of one group, rolled out concurrently, and the deadline that closes the group.

A group closes when all members are there, or at its deadline if at least `least` are there, or as soon after the
deadline as `least` are. A late member is counted and gets no score. The environment chooses whether late members are
cancelled or may finish; the rollout slot stays taken until they end. If a member raises before the group closes, the
whole group fails.
"""

import asyncio
import random
from inspect import isawaitable
from typing import Any

from rolloutmq.schemas.printable import error_line
from rolloutmq.schemas.wire.tasks import GIVEN
from rolloutmq.services.worker.environment import MemberEnvironment
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import Trajectory


class GroupMembers:
    """A running group.

    Attributes:
        wanted: Members started.
        late: Members missing when the group closed.
    """

    def __init__(
        self, environment: MemberEnvironment[Any], policy: Policy, task: Any, size: int, rng: random.Random
    ) -> None:
        self.wanted = size
        self.late = 0
        self._cancels = getattr(environment, "stragglers", "cancel") == "cancel"
        self._running = [
            asyncio.create_task(
                _member(environment, policy, task, random.Random(rng.getrandbits(64))),
                name=f"member {number}",
            )
            for number in range(size)
        ]

    async def closed(self, least: int, deadline_s: float) -> list[Trajectory]:
        """Wait until the group closes and return its members. On cancellation or an error, cancel all members.

        Args:
            least: Fewest members of a closed group.
            deadline_s: Seconds from now after which `least` members are enough.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        pending = set(self._running)
        try:
            while pending and (until > loop.time() or self.wanted - len(pending) < least):
                left_s = until - loop.time()
                finished, pending = await asyncio.wait(
                    pending,
                    timeout=left_s if left_s > 0 else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for member in finished:
                    member.result()
        except BaseException:
            await self.end()
            raise
        self.late = len(pending)
        if self._cancels:
            for member in pending:
                member.cancel()
        return [member.result() for member in self._running if member not in pending]

    async def end(self, patience_s: float = 0.0) -> None:
        """Wait for late members, and cancel them after `patience_s`."""
        left = {member for member in self._running if not member.done()}
        try:
            if left and patience_s > 0 and not self._cancels:
                _, left = await asyncio.wait(left, timeout=patience_s)
        finally:
            for member in left:
                member.cancel()
        if left:
            await asyncio.wait(left)
        for member in self._running:
            if not member.cancelled():
                member.exception()  # marks the error of a late member as retrieved


async def _member(
    environment: MemberEnvironment[Any], policy: Policy, task: Any, rng: random.Random
) -> Trajectory:
    """Roll out one member. A SystemExit becomes a RuntimeError: from its own task it would end the event loop."""
    try:
        return await environment.member(policy, task, rng)
    except SystemExit as error:
        raise RuntimeError(error_line(error)) from error


async def drawn(environment: MemberEnvironment[Any], rng: random.Random, index: int = GIVEN) -> Any:
    """Draw a task from the environment, or look up the one of that number."""
    task_at = getattr(environment, "task_at", None)
    task = environment.task(rng) if index == GIVEN or task_at is None else task_at(index, rng)
    return await task if isawaitable(task) else task
