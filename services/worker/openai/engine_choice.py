"""Load balancing over the inference servers: the worker asks the live engine with the fewest requests in flight.

There is no central scheduler, and load still evens out: a slow or busy engine holds its requests longer and gets fewer
new ones; a new engine gets requests until it holds as many as the others. Ties are broken at random, so that workers
that start together do not pick the same engine.

A failed engine is skipped for `PASS_S`, a silent one until its heartbeat moves, a draining one for good. If no other
engine is left, a skipped one is asked anyway, so a single engine is never excluded. Pure except for `listed`; for one
event loop.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rolloutmq.bus.engine_registry import EngineWatch
from rolloutmq.schemas.files import InferenceAddress

LOOK_S: Final = 0.5
"""Seconds between two reads of the engine files, which are few and small."""
PASS_S: Final = 1.0
"""Seconds to skip a failed engine: a restart takes seconds, and a failed attempt is cheap."""

Listed = Callable[[], Iterable[InferenceAddress]]
"""Returns the addresses of the engines; must not block for long."""


@dataclass(eq=False, slots=True)
class Engine:
    """One life of one engine, as a worker sees it."""

    url: str
    """Without a trailing slash and without `/v1`."""
    model: str = ""
    """Model it serves; empty until the worker has asked."""
    root: str = ""
    """Directory or hub name of the model, if the server says."""
    name: str = ""
    """Name in the run."""
    key: str = ""
    """Name of its key, if it is of another host."""
    in_hand: int = 0
    """Unanswered requests of this worker."""
    passed_until: float = float("-inf")
    silent: bool = False


class Engines:
    """The engines that one worker may call."""

    def __init__(self, listed: Listed, rng: random.Random) -> None:
        self._listed = listed
        self._rng = rng
        self._watch = EngineWatch()
        self._known: dict[tuple[str, int], Engine] = {}
        self._look_at = float("-inf")

    def take(self, now: float) -> Engine | None:
        """Choose an engine; None if none is registered."""
        self._look(now)
        best = min((_rank(one, now) for one in self._known.values()), default=None)
        tied = [one for one in self._known.values() if _rank(one, now) == best]
        return self._rng.choice(tied) if tied else None

    def pass_over(self, engine: Engine, now: float) -> bool:
        """Skip a failed engine for a while; return whether another one can be asked at once."""
        engine.passed_until = now + PASS_S
        self._look_at = now  # it may have moved
        self._look(now)
        return any(not one.silent and one.passed_until <= now for one in self._known.values())

    def _look(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        known = {}
        for address, silent in (
            (one.address, one.is_silent) for one in self._watch.look(self._listed(), now)
        ):
            if address.draining:
                continue
            life = address.url, address.pid
            known[life] = engine = self._known.get(life) or Engine(
                address.url.rstrip("/").removesuffix("/v1"), name=address.name, key=address.key
            )
            engine.silent = silent
        self._known = known


def _rank(engine: Engine, now: float) -> tuple[bool, bool, int]:
    return engine.silent, engine.passed_until > now, engine.in_hand
