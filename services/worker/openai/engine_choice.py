"""Load balancing over the inference servers: the worker asks the live engine with the fewest requests in flight.

There is no central scheduler, and load still evens out: a slow or busy engine holds its requests longer and gets fewer
new ones; a new engine gets requests until it holds as many as the others. Ties are broken at random, so that workers
that start together do not pick the same engine.

An engine whose weights have not moved for `STUCK_S`, and are older than a group may be, is not asked: every group of it
would be dropped. If all are like this, the worker waits and says for which one.

A failed engine is skipped for `PASS_S`, a silent one until its heartbeat moves, a draining one for good. One that this
host cannot reach (a firewall, a wrong address, a certificate without its name) is `away` until a probe reaches it: each
rollout would lose seconds at it. Probes are due after `PASS_S`, then after twice as long each, up to `PROBE_MAX_S`. If
no other engine is left, a skipped one is asked anyway, so a single engine is never excluded. Pure except for `listed`;
for one event loop.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rolloutmq.bus.engine_registry import EngineWatch
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion

LOOK_S: Final = 0.5
"""Seconds between two reads of the engine files, which are few and small."""
PASS_S: Final = 1.0
"""Seconds to skip a failed engine: a restart takes seconds, and a failed attempt is cheap."""
PROBE_MAX_S: Final = 15.0
"""Longest pause between two probes of an engine that cannot be reached."""
GIVEN_UP_S: Final = 15.0
"""Seconds without a way to any engine after which a worker gives its permits back; an engine that has ended is silent
before, and rollouts wait for the next one."""

STUCK_S: Final = 5.0
"""Seconds without another version after which an engine that is behind counts as stuck: it tells its version once a
second, and a fast trainer takes many steps until then."""

NO_ENGINE: Final = "no inference server has published its address yet"
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
    away: str = ""
    """Why this host does not reach it; empty if it does, or nobody has tried."""
    away_since: float = 0.0
    misses: int = 0
    """Attempts in a row that did not reach it; those of one pause count once."""
    probed: bool = False
    """A probe is under way."""
    silent: bool = False
    beats: bool = False
    """It sends heartbeats, so one that ends is known to."""
    version: PolicyVersion | None = None
    """Version of its weights; None if it does not tell."""
    moved_at: float = 0.0
    """When the version was first seen."""


class Engines:
    """The engines that one worker may call.

    Args:
        listed: Returns their addresses.
        rng: Breaks ties.
        policy: Returns the newest version that the worker knows of.
        max_staleness: Steps by which an engine may be behind it; None for any number.
    """

    def __init__(
        self,
        listed: Listed,
        rng: random.Random,
        policy: Callable[[], PolicyVersion] = PolicyVersion,
        max_staleness: int | None = None,
    ) -> None:
        self.missing = NO_ENGINE
        """Why the last `take` found none."""
        self._policy = policy
        self._max_staleness = max_staleness
        self._listed = listed
        self._rng = rng
        self._watch = EngineWatch()
        self._known: dict[tuple[str, int], Engine] = {}
        self._look_at = float("-inf")

    def take(self, now: float) -> Engine | None:
        """Choose an engine; None if none is registered, or all are stuck, see `missing`."""
        self._look(now)
        usable = [one for one in self._known.values() if not self._is_stuck(one, now)]
        if not usable:
            self.missing = self._why_none(now)
            return None
        best = min(_rank(one, now) for one in usable)
        return self._rng.choice([one for one in usable if _rank(one, now) == best])

    def _behind(self, engine: Engine) -> int:
        """Return the steps by which an engine is behind; across resumes of the trainer that is not known here."""
        policy, version = self._policy(), engine.version
        if version is None or version.incarnation != policy.incarnation:
            return 0
        return policy.step - version.step

    def _is_stuck(self, engine: Engine, now: float) -> bool:
        if self._max_staleness is None or now - engine.moved_at <= STUCK_S:
            return False
        return self._behind(engine) > self._max_staleness

    def _why_none(self, now: float) -> str:
        if not self._known:
            return NO_ENGINE
        one = min(self._known.values(), key=self._behind)
        assert one.version is not None
        return (
            f"engine {one.name} serves version {one.version.incarnation}.{one.version.step}, {self._behind(one)} steps "
            f"behind the trainer, and no other for {now - one.moved_at:.0f} s; its groups would be too stale: see to "
            "the relay of its host"
        )

    def pass_over(self, engine: Engine, now: float) -> bool:
        """Skip a failed engine for a while; return whether another one can be asked at once."""
        engine.passed_until = now + PASS_S
        self._look_at = now  # it may have moved
        self._look(now)
        return any(
            not one.silent and not one.away and one.passed_until <= now and not self._is_stuck(one, now)
            for one in self._known.values()
        )

    def missed(self, engine: Engine, now: float, why: str) -> bool:
        """Skip an engine that this host does not reach; return whether another one can be asked at once."""
        if not engine.away:
            engine.away_since = now
        if now >= engine.passed_until:
            engine.misses += 1
        engine.away = why
        pause_s = min(PASS_S * 2 ** min(engine.misses - 1, 8), PROBE_MAX_S)
        another = self.pass_over(engine, now)
        engine.passed_until = now + pause_s
        return another

    def reached(self, engine: Engine) -> None:
        """Note that an engine has answered, whatever it said."""
        engine.away, engine.misses, engine.passed_until = "", 0, float("-inf")

    def to_probe(self, now: float) -> list[Engine]:
        """Return the engines whose probes are due, each once until `probed` is false again."""
        self._look(now)
        due = [one for one in self._known.values() if one.away and not one.probed and one.passed_until <= now]
        for one in due:
            one.probed = True
        return due

    def away(self) -> dict[str, str]:
        """Return the engines that this host does not reach, by name or else address, and why."""
        return {one.name or one.url: one.away for one in self._known.values() if one.away}

    def gives_up(self, now: float) -> bool:
        """Return whether every engine is alive and has been out of reach for `GIVEN_UP_S`."""
        alive = [one for one in self._known.values() if not one.silent]
        return bool(alive) and all(
            one.beats and one.away and now - one.away_since >= GIVEN_UP_S for one in alive
        )

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
            engine.silent, engine.beats = silent, address.number > 0
            if engine.version != address.version:
                engine.version, engine.moved_at = address.version, now
        self._known = known


def _rank(engine: Engine, now: float) -> tuple[bool, bool, int]:
    return engine.silent, bool(engine.away) or engine.passed_until > now, engine.in_hand
