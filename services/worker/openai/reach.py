"""Whether this host reaches an engine of the run. A worker that reaches none holds no permits, which others can use.

A worker opens its session with the broker once an engine has answered, and gives it up when no living engine has
answered for `AWAY_S`, such as behind a firewall. Living engines send heartbeats, by way of the broker. All workers
wait alike for a dead engine, or one that starts again, so each keeps its rollouts for it.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines

PROBE_S: Final = 2.0
"""Seconds without an answer after which engines are asked whether they answer."""
PAUSE_S: Final = 1.0
"""Seconds between two such rounds."""
FIRST_S: Final = 0.05
"""Pause after the first round: an engine tells its address just before it answers."""


async def until_reached(policy: OpenAIPolicy, waits: Callable[[str], None]) -> None:
    """Wait until an engine answers. May be cancelled.

    Args:
        policy: Client of the engines.
        waits: Called again and again with the reason of the wait.
    """
    pause_s = FIRST_S
    while why := await policy.probe():
        waits(why)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S)


async def until_away(policy: OpenAIPolicy, engines: Engines) -> str:
    """Wait until no living engine has answered for long; return why. May be cancelled."""
    while True:
        await asyncio.sleep(PAUSE_S)
        if time.monotonic() - engines.answered_at < PROBE_S:
            continue
        await policy.probe()
        if why := engines.away(time.monotonic()):
            return why
