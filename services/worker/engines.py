"""Which engine is asked next: of those that live, the one from which this worker awaits the fewest answers.

Nobody hands out turns, and it comes out even all the same: an engine that is slow, or that other workers keep busy,
keeps its answers longer and is asked less, and a new one is asked until as much is awaited from it. Ties are drawn,
so that workers that start together do not all begin with the same one.

What failed is passed over for `PASS_S`, what stands still until it moves, what drains for good. Where nothing else is
left, one that was passed over is asked again: a single engine is never out of the choice. Pure but for `listed`; for
one event loop.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rolloutmq.bus.engines import Watch
from rolloutmq.schemas.records import InferenceAddress

LOOK_S: Final = 0.5
"""How often it is looked for engines that came or went: a few small files."""
PASS_S: Final = 1.0
"""How long one that failed is passed over: a restart takes seconds, and one attempt in vain costs little."""

Listed = Callable[[], Iterable[InferenceAddress]]
"""Where engines say that they are; must not block for long."""


@dataclass(eq=False, slots=True)
class Engine:
    """One life of one engine, as a worker knows it."""

    url: str
    """Without a slash at the end, and without `/v1`."""
    model: str = ""
    """What it serves; empty until it was asked."""
    in_hand: int = 0
    """Requests of this worker that it has not answered."""
    passed_until: float = float("-inf")
    silent: bool = False


class Engines:
    """The engines that one worker may ask."""

    def __init__(self, listed: Listed, rng: random.Random) -> None:
        self._listed = listed
        self._rng = rng
        self._watch = Watch()
        self._known: dict[tuple[str, int], Engine] = {}
        self._look_at = float("-inf")

    def take(self, now: float) -> Engine | None:
        """Choose one; None if none has said where it is."""
        self._look(now)
        best = min((_rank(one, now) for one in self._known.values()), default=None)
        tied = [one for one in self._known.values() if _rank(one, now) == best]
        return self._rng.choice(tied) if tied else None

    def pass_over(self, engine: Engine, now: float) -> bool:
        """Leave one out for a while, since it failed; return whether another may be asked at once."""
        engine.passed_until = now + PASS_S
        self._look_at = now  # it may be somewhere else by now
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
                address.url.rstrip("/").removesuffix("/v1")
            )
            engine.silent = silent
        self._known = known


def _rank(engine: Engine, now: float) -> tuple[bool, bool, int]:
    return engine.silent, engine.passed_until > now, engine.in_hand
