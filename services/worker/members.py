"""The members of one group, rolled out side by side, and the deadline at which the group goes without the rest.

The law: a group closes when all its members are there, or at its deadline with at least `least` of them, or as soon
after it as that many are. A member that is late then is no part of it: it is counted, never given a score that it did
not get. Whether it is cancelled or may come to its end is the environment's choice; either way its slot waits for it.
A member that raises before the group is closed takes the group with it, as in any rollout.
"""

import asyncio
import random
from inspect import isawaitable
from typing import Any

from rolloutmq.services.worker.environment import MemberEnvironment
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import Trajectory


class Members:
    """One group under way.

    Attributes:
        wanted: Members that were begun.
        late: Members that the group was closed without.
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
        """Wait until the group can be closed, and return who is in it. Cancelled, or if a member raises: all end.

        Args:
            least: Fewest members.
            deadline_s: Seconds from now after which those are enough.
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
        """Wait for the members that are left, and cancel them after `patience_s`."""
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
                member.exception()  # a late one may have raised, which concerns nobody


async def _member(
    environment: MemberEnvironment[Any], policy: Policy, task: Any, rng: random.Random
) -> Trajectory:
    """Roll one member out; a SystemExit would end the event loop from a task of its own."""
    try:
        return await environment.member(policy, task, rng)
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


async def drawn(environment: MemberEnvironment[Any], rng: random.Random) -> Any:
    """Draw a task of the environment's own."""
    task = environment.task(rng)
    return await task if isawaitable(task) else task
