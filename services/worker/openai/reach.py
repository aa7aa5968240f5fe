"""Whether this host reaches the engines: probes beside the rollouts, and the wait without any engine in reach.

Only a call finds out that an engine is out of reach, so an environment that never asks its policy never waits here.
From then on probes ask it, which cost no rollout any time. The log tells both changes of each engine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp

from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.schemas.printable import printable
from rolloutmq.services.worker.openai.engine_choice import Engine, Engines

logger = logging.getLogger(__name__)

PROBE_S: Final = 5.0
"""Time limit of a probe."""
LOOK_S: Final = 0.25
"""Seconds between two looks for a due probe while nobody calls."""
REASON_CHARS: Final = 400
UNREACHED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors of a connection that was never made, those of TLS included."""


def reason_of(error: Exception) -> str:
    """Return in one line why a connection was not made."""
    return printable(" ".join(f"{type(error).__name__} {error}".split()))[:REASON_CHARS]


class Reach:
    """The reach of one worker. For one event loop; `close` ends its probes.

    Args:
        engines: The engines.
        find: Asks an engine for its model, returns the reason to retry; raises aiohttp's errors, and
            `PolicyRefusedError` for an answer that refuses.
    """

    def __init__(self, engines: Engines, find: Callable[[Engine], Awaitable[str]]) -> None:
        self._engines = engines
        self._find = find
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def away(self) -> dict[str, str]:
        """The engines out of reach, by name or else address, and why."""
        return self._engines.away()

    @property
    def is_lost(self) -> bool:
        """Whether no living engine has been within reach for a while: a rollout would hold its permit for nothing."""
        return self._engines.gives_up(time.monotonic())

    def missed(self, engine: Engine, error: Exception) -> bool:
        """Note a connection that was not made; return whether another engine can be asked at once."""
        is_news, why = not engine.away, reason_of(error)
        another = self._engines.missed(engine, time.monotonic(), why)
        if is_news:
            logger.warning("engine out of reach engine=%s url=%s error=%s", engine.name, engine.url, why)
        return another

    def reached(self, engine: Engine) -> None:
        """Note an answer."""
        if engine.away:
            away_s = time.monotonic() - engine.away_since
            logger.info(
                "engine within reach again engine=%s url=%s away_s=%.0f", engine.name, engine.url, away_s
            )
        self._engines.reached(engine)

    def probe(self) -> None:
        """Start the due probes. Does not block."""
        for engine in self._engines.to_probe(time.monotonic()):
            task = asyncio.create_task(self._probe(engine), name=f"probe of {engine.name or engine.url}")
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def regained(self) -> None:
        """Wait until an engine is within reach, or none is known to be out of it. May be cancelled."""
        while self.is_lost:
            self.probe()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """End the probes."""
        probes = list(self._probes)
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def pausing(self, pause: Callable[[bool], None]) -> "PausingReach":
        """Return the reach for rollouts of a producer, which `pause` pauses, or lets go on."""
        return PausingReach(self, pause)

    async def _probe(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._find(engine)
        except UNREACHED as error:
            self.missed(engine, error)
        except TimeoutError:
            self.missed(engine, TimeoutError(f"no answer within {PROBE_S:g} s"))
        except (aiohttp.ClientError, PolicyRefusedError):
            self.reached(engine)  # something answers; calls tell what is wrong with it
        else:
            self.reached(engine)
        finally:
            engine.probed = False


class PausingReach:
    """The reach for the rollouts of one producer: others get its permits while no engine is within reach."""

    def __init__(self, reach: Reach, pause: Callable[[bool], None]) -> None:
        self._reach = reach
        self._pause = pause
        self._waiting = 0

    @property
    def is_lost(self) -> bool:
        """See `Reach.is_lost`."""
        return self._reach.is_lost

    async def regained(self) -> None:
        """See `Reach.regained`. The producer pauses as long as one waits."""
        self._waiting += 1
        self._pause(True)
        try:
            await self._reach.regained()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._pause(False)
