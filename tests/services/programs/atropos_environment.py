"""An environment of Atropos as a worker, run by Atropos' interpreter: rollouts take a while, and numbers are unique."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway" / "atropos"))

from environment import Counting  # type: ignore[import-not-found]

LIVES = 100_000
"""Groups of one process."""
ROLLOUT_S = 0.5
"""Seconds of one rollout."""


class Slow(Counting):  # type: ignore[misc]
    """Takes `ROLLOUT_S` for a group, whose first token is a number that no other process gives."""

    async def collect_group(self) -> Any:
        group = await super().collect_group()
        await asyncio.sleep(ROLLOUT_S)
        number = os.getpid() * LIVES + group["generation_params"]["n"]
        for row in group["tokens"]:
            row[0] = number
        return group


if __name__ == "__main__":
    Slow.cli()
