"""An environment that waits for a tool: what a rollout costs is time, and more workers bring more of them.

No policy is asked, so nothing but the tool bounds a worker: with `concurrency = 4` and half a second a call, one makes
eight groups a second.
"""

import asyncio
import random
from collections.abc import Sequence

from rolloutmq import Policy, Trajectory


class SlowTool:
    """Calls a tool and scores what it says; a call takes `seconds`, a tenth more or less."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._seconds = seconds

    async def rollout(self, _policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        await asyncio.sleep(self._seconds * rng.uniform(0.9, 1.1))
        answers = [rng.randrange(10) for _ in range(size)]
        return [
            Trajectory(
                token_ids=[1, 2, 3 + answer],
                mask=[False, False, True],
                logprobs=[0.0, 0.0, -2.3],
                score=float(answer > 4),
            )
            for answer in answers
        ]
