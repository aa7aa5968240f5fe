"""An environment that waits for a slow tool, to show autoscaling: throughput grows with the number of workers.

It does not sample from the policy, so only the tool limits a worker: with `concurrency = 4` and half a second for each
call, one worker makes eight groups a second.
"""

import asyncio
import random
from collections.abc import Sequence

from rolloutmq import Policy, Trajectory


class SlowTool:
    """Calls a simulated tool and scores its result. A call takes `seconds`, plus or minus a tenth."""

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
