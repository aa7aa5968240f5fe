"""The engines beyond the first: started, adopted, drained and put away as the law of `engines` decides.

The first engine is the launcher's, which needs no orchestrator for it; here it is only counted. The others are kept
like workers, under a supervisor of their own: adopted after this process was killed, ended when it ends, which is
after the workers. An engine that goes is drained by SIGUSR1: it answers what it has in hand, and what is asked
meanwhile is asked of another. One that crashes again and again is given up; it keeps its place, with the reason, until
an operator asks for fewer.

It is ready once its own address says so, with its own pid, and as long as that moves.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rolloutmq.bus.engines import FIRST, Seen, Watch, engine_name, engine_number, engines_of
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.schemas.telemetry import EngineDecision
from rolloutmq.services.orchestrator.engines import Bound, PoolRule, PoolSample
from rolloutmq.services.orchestrator.keeper import Supervisor, identities_of
from rolloutmq.services.orchestrator.pressure import Crew
from rolloutmq.services.orchestrator.processes import end_strays
from rolloutmq.services.orchestrator.supervisor import (
    OVER,
    Backoff,
    Ladder,
    Phase,
    Rung,
    Step,
    View,
    term_ladder,
)

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""How often the last decision is published again: events are lost."""

Command = Callable[[str], tuple[str, ...]]
"""Program and arguments of the engine of a name."""


def engine_command(run_dir: Path) -> Command:
    """Return how the engines of a run are started."""
    start = (sys.executable, "-m", "rolloutmq.launch.cli", "inference", "--run-dir", str(run_dir))
    return lambda name: (*start, "--engine", name)


class EnginePool:
    """The engines of one run. An async context; `look` is called once a tick.

    Args:
        config: The run. With one engine at most, or an external server, the pool does nothing.
        layout: The run directory.
        token: Run token.
        publish: Carries decisions to whoever looks.
        command: How an engine is started.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        token: str,
        publish: Callable[[EngineDecision], None],
        command: Command | None = None,
    ) -> None:
        limits = config.orchestrator
        self._layout = layout
        self._token = token
        self._publish = publish
        self._command = command or engine_command(layout.root)
        self._grace_s = limits.term_grace_s
        self._supervisor = Supervisor(
            token,
            Backoff(limits.backoff_s, limits.backoff_max_s, limits.crash_limit, limits.stable_s),
            identities=layout.engines,
            seed=config.run.seed,
        )
        self._ladder = engine_ladder(limits.drain_deadline_s, limits.term_grace_s)
        self._watch = Watch()
        self._may_grow = config.inference.max_engines > 1
        self._rule = PoolRule.of(config.inference)
        self._state = self._rule.initial()
        self._ready = self._serving = 1
        self._said: int | None = None
        self._said_at = float("-inf")

    @property
    def ready(self) -> int:
        """Engines that are ready."""
        return self._ready

    @property
    def serving(self) -> int:
        """Engines for the law of the workers: where this changes, the knee is another.

        One that is silent or comes back for a moment changes nothing: there are more when one is ready that was not
        there before, and fewer when there are to be fewer.
        """
        return self._serving

    async def __aenter__(self) -> Self:
        previous = identities_of(self._layout.engines)
        addresses = engines_of(self._layout)
        await self._supervisor.__aenter__()
        mine = f"{self._token}/"
        ours = [
            (one, self._spec(one.name)) for one in previous if one.marker.startswith(mine) and self._may_grow
        ]
        adopted = self._supervisor.adopt(ours)
        if others := [one for one in previous if one.name not in adopted]:
            await asyncio.to_thread(end_strays, others, self._grace_s)
        for address in addresses:
            if address.name not in adopted:
                self._put_away(address.name)
        self._state = self._rule.initial(1 + len(adopted))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """End the engines: nobody asks them any more. Takes no longer than the ladder."""
        try:
            names = list(self._supervisor.views())
            await self._supervisor.stop(names, term_ladder(self._grace_s), "the orchestrator ends")
            for name in names:
                self._put_away(name)
        finally:
            await self._supervisor.__aexit__(kind, error, at)

    def kill(self) -> None:
        """Kill all engines now: for a second signal."""
        self._supervisor.kill()

    def look(self, bounds: Mapping[str, Bound], now: float, wanted: int | None = None) -> None:
        """Decide, and do it.

        Args:
            bounds: What the law of the workers says, by environment; empty if nothing was heard of them.
            now: Monotonic.
            wanted: Number of engines that an operator asked for.
        """
        if not self._may_grow:
            return
        self._forget_ended()
        seen = {one.address.name: one for one in self._watch.look(engines_of(self._layout), now)}
        views = self._supervisor.views()
        crew = self._crew(views, seen)
        self._ready = crew.ready
        busy = sum(one.address.busy for name, one in seen.items() if self._is_ready(name, views, seen))
        failure = next((view.reason for view in views.values() if view.failing), "")
        before = self._state.target
        sample = PoolSample(crew, bounds, busy, wanted, failure)
        self._state, decision = self._rule.decide(self._state, sample, now)
        self._serving = min(max(self._serving, crew.ready), decision.target)
        if decision.target != before or self._said is None:
            logger.info("scale engines target=%d reason=%s", decision.target, decision.reason)
            logger.info("scale engines sample=%s", sample)
        for _ in range(decision.target - crew.current):
            self._supervisor.start(self._spec(self._free_name()))
        self._let_go(crew.current - decision.target, seen, decision.reason)
        if decision.target != self._said or now - self._said_at >= REPEAT_S:
            self._said, self._said_at = decision.target, now
            self._publish(
                EngineDecision(
                    at=time.time(),
                    busy=busy,
                    current=crew.current,
                    target=decision.target,
                    reason=decision.reason,
                )
            )

    def _crew(self, views: Mapping[str, View], seen: Mapping[str, Seen]) -> Crew:
        """Count the engines; the first is there or about to come back, the launcher sees to that."""
        first = self._is_ready(FIRST, views, seen)
        crew = Crew(ready=int(first), starting=int(not first))
        for name, view in views.items():
            if view.failing:
                crew = replace(crew, failed=crew.failed + 1)
            elif view.phase is Phase.STOPPING:
                crew = replace(crew, draining=crew.draining + 1)
            elif self._is_ready(name, views, seen):
                crew = replace(crew, ready=crew.ready + 1)
            elif view.phase is not Phase.ENDED:
                crew = replace(crew, starting=crew.starting + 1)
        return crew

    def _is_ready(self, name: str, views: Mapping[str, View], seen: Mapping[str, Seen]) -> bool:
        found = seen.get(name)
        if found is None or found.is_silent or found.address.draining:
            return False
        if name == FIRST:
            return True
        identity = self._supervisor.identity(name)
        view = views.get(name)
        is_running = view is not None and view.phase is Phase.RUNNING
        return is_running and identity is not None and identity.pid == found.address.pid

    def _let_go(self, number: int, seen: Mapping[str, Seen], reason: str) -> None:
        """End so many: the given up first, then those not ready yet, then the youngest."""
        views = dict(self._supervisor.views())
        number -= sum(view.failing and view.phase is Phase.STOPPING for view in views.values())
        candidates = [view for view in views.values() if view.phase not in {Phase.STOPPING, Phase.ENDED}]
        candidates.sort(
            key=lambda view: (
                view.phase is not Phase.FATAL,
                self._is_ready(view.name, views, seen),
                -engine_number(view.name),
            )
        )
        for view in candidates[: max(0, number)]:
            if view.phase is Phase.FATAL:
                self._supervisor.forget(view.name)
            else:
                self._supervisor.retire(view.name, self._ladder, reason)

    def _forget_ended(self) -> None:
        for name, view in list(self._supervisor.views().items()):
            if view.phase in OVER:
                self._put_away(name)
            if view.phase is Phase.ENDED:
                self._supervisor.forget(name)

    def _put_away(self, name: str) -> None:
        """Remove the address of an engine that lives no more; the first keeps its port by it."""
        if name != FIRST:
            self._layout.engine(name).unlink(missing_ok=True)

    def _free_name(self) -> str:
        views = self._supervisor.views()
        return next(name for name in map(engine_name, range(1, len(views) + 2)) if name not in views)

    def _spec(self, name: str) -> ProcessSpec:
        log = str(self._layout.log(name))
        return ProcessSpec(name=name, role=Role.INFERENCE, argv=self._command(name), log=log)


def engine_ladder(deadline_s: float, grace_s: float) -> Ladder:
    """Return how an engine is drained: SIGUSR1 at once; what takes longer than the deadline is asked of another."""
    return Rung(0.0, Step.USR1), Rung(deadline_s, Step.TERM), Rung(deadline_s + grace_s, Step.KILL)
