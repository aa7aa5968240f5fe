"""The engine pool: starts, adopts, drains and cleans up the engines beyond the first, as `scaling` decides.

The launcher runs the first engine; the pool only counts it. A supervisor of its own runs the others like workers, on
this host or where a cluster has room, and ends them after the workers. After a restart of the orchestrator it adopts
them: their number, their drains and the given-up ones stay. SIGUSR1 drains an engine: it finishes its running requests,
and clients send new ones to another engine. An engine that crashes repeatedly is given up. It keeps its place and the
reason, until an operator scales down.

An engine is ready while its address file has its own pid and keeps changing.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from msgspec.structs import replace

from rolloutmq.bus.engine_registry import (
    FIRST,
    EngineSighting,
    EngineWatch,
    engine_name,
    engine_number,
    engines_of,
    placed_name,
)
from rolloutmq.schemas.config.orchestrator import END_S
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout, Supervision, Target
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role, Step, python_command
from rolloutmq.schemas.wire.telemetry import EngineDecision
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, WorkerCounts
from rolloutmq.services.orchestrator.engines.scaling import EngineBound, EngineScalingRule, PoolSample
from rolloutmq.services.orchestrator.state_file import earlier_lives
from rolloutmq.services.orchestrator.supervision.core import (
    OVER,
    Backoff,
    Ladder,
    Phase,
    ProcessView,
    Rung,
    term_ladder,
)
from rolloutmq.services.orchestrator.supervision.supervisor import Change, Supervisor, identities_of
from rolloutmq.services.orchestrator.supervision.worker_table import number_of
from rolloutmq.services.process.child import Spawner, end_marked, end_strays
from rolloutmq.services.process.identity import find_names, marker_of

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""Interval at which an unchanged decision is published again: events may be lost."""

Command = Callable[[str], tuple[str, ...]]
"""Returns program and arguments of an engine, by name."""


def engine_command(run_dir: Path) -> Command:
    """Return the command that starts an engine of a run."""
    module, words = "rolloutmq.launch.service_process", ("inference", "--run-dir", str(run_dir))
    return lambda name: python_command(sys.executable, module, *words, "--engine", name)


def placed_command(name: str) -> tuple[str, ...]:
    """Return the arguments of an engine on another host, which has its own interpreter and run directory."""
    return "inference", "--engine", name


class Placement(NamedTuple):
    """Where a cluster runs the engines.

    Attributes:
        spawner: Orders them.
        refusal: Returns why none may be ordered now; empty if one may.
    """

    spawner: Spawner
    refusal: Callable[[], str]


class EnginePool:
    """The engines of one run. An async context manager; call `take_over` first, and then `look` once a tick.

    Args:
        config: Configuration. With at most one engine, or an external server, the pool does nothing.
        layout: Run directory.
        token: Run token.
        publish: Publishes decisions.
        command: Start command of an engine.
        on_change: Called with each engine whose phase or reason changed; must not block or raise.
        placement: Where a cluster runs them; None for this host.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        token: str,
        publish: Callable[[EngineDecision], None],
        command: Command | None = None,
        on_change: Change | None = None,
        placement: Placement | None = None,
    ) -> None:
        limits = config.orchestrator
        self._placement = placement
        self._name = engine_name if placement is None else placed_name
        self._layout = layout
        self._token = token
        self._publish = publish
        here = engine_command(layout.root) if placement is None else placed_command
        self._command = command or here
        self._grace_s = limits.term_grace_s
        self._supervisor = Supervisor(
            token,
            Backoff(limits.backoff_s, limits.backoff_max_s, limits.crash_limit, limits.stable_s),
            identities=layout.engines,
            on_change=on_change,
            seed=config.run.seed,
            spawner=None if placement is None else placement.spawner,
        )
        longest_s = max((env.rollout_timeout_s for env in config.environment.values()), default=END_S)
        self._ladder = engine_ladder(limits.drain_s(longest_s), limits.term_grace_s)
        self._watch = EngineWatch()
        self._may_grow = config.inference.max_engines > 1
        self._rule = EngineScalingRule.of(config.inference)
        self._state = self._rule.initial()
        self._ready = self._serving = 1
        self.target: Target | None = None
        """The last decision; None if the number cannot change."""
        self.no_room = ""
        """Why a wanted engine is not started; empty if none is missing."""
        self._said: int | None = None
        self._said_at = float("-inf")

    @property
    def processes(self) -> Supervisor:
        """Return the supervisor of the engines beyond the first."""
        return self._supervisor

    @property
    def is_placed(self) -> bool:
        """Return whether a cluster runs the engines beyond the first."""
        return self._placement is not None

    def ladder(self, _name: str) -> Ladder:
        """Return the drain ladder of an engine."""
        return self._ladder

    @property
    def ready(self) -> int:
        """Return the number of ready engines."""
        return self._ready

    @property
    def serving(self) -> int:
        """Return the number of engines for the saturation detector, which discards the capacity when it changes.

        An engine that is briefly silent or restarts changes nothing. The number grows when a new engine is ready, and
        falls when the target does.
        """
        return self._serving

    async def __aenter__(self) -> Self:
        await self._supervisor.__aenter__()
        return self

    async def take_over(self, earlier: Supervision | None) -> None:
        """Continue with the engines of an earlier orchestrator of this run, and end all others.

        Args:
            earlier: Its last report; None without one.
        """
        previous, addresses = identities_of(self._layout.engines), engines_of(self._layout)
        adopted = self._adopt(previous, earlier) if self._may_grow else []
        if others := [one for one in previous if one.name not in adopted]:
            await asyncio.to_thread(end_strays, others, self._grace_s)
        await asyncio.to_thread(self._end_unknown, set(adopted))
        for address in addresses:
            if address.name not in adopted:
                self._put_away(address.name)
        views = self._supervisor.views()
        lives = [name for name, view in views.items() if view.phase is not Phase.STOPPING]
        known = earlier.engines if earlier is not None else None
        self._state = self._rule.initial(known.target if known is not None else 1 + len(lives))
        seen = {one.address.name: one for one in self._watch.look(addresses, time.monotonic())}
        self._serving = 1 + sum(self._is_ready(name, views, seen) for name in lives)

    def _adopt(self, previous: list[ProcessIdentity], earlier: Supervision | None) -> list[str]:
        """Adopt the engines of an earlier life with their drains, and keep those that it gave up."""
        records = earlier.engine_lives if earlier is not None else ()
        mine = [one for one in previous if one.marker.startswith(f"{self._token}/")]
        lives = earlier_lives(records, {one.name: one.pid for one in mine})
        adopted = self._supervisor.adopt([(one, self._spec(one.name)) for one in mine], lives)
        for one in records:
            if one.phase == Phase.FATAL and one.worker not in adopted:
                self._supervisor.keep_fatal(self._spec(one.worker), one.since, one.reason, lives[one.worker])
        return adopted

    def _end_unknown(self, known: set[str]) -> None:
        """End engines of this run without an identity on file: their orchestrator was killed before it wrote one."""
        for name in find_names(self._token) - known:
            if engine_number(name) > 0:
                end_marked(marker_of(self._token, name))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """End the engines."""
        try:
            await self.stop()
        finally:
            await self._supervisor.__aexit__(kind, error, at)

    async def stop(self) -> None:
        """End the engines, which have no clients left. Takes no longer than the ladder."""
        names = list(self._supervisor.views())
        await self._supervisor.stop(names, term_ladder(self._grace_s), "the orchestrator ends")
        for name in names:
            self._put_away(name)

    def kill(self) -> None:
        """Kill all engines now, after a second signal."""
        self._supervisor.kill()

    def look(self, bounds: Mapping[str, EngineBound], now: float, wanted: int | None = None) -> None:
        """Decide, and apply the decision.

        Args:
            bounds: Saturation of the workers, by environment; empty if unknown.
            now: Monotonic seconds.
            wanted: Number of engines set by an operator.
        """
        if not self._may_grow:
            return
        self._forget_ended()
        seen = {one.address.name: one for one in self._watch.look(engines_of(self._layout), now)}
        self._follow_drains(seen)
        views = self._supervisor.views()
        crew = self._crew(views, seen)
        self._ready = crew.ready
        busy = sum(one.address.busy for name, one in seen.items() if self._is_ready(name, views, seen))
        failure = next((view.reason for view in views.values() if view.failing), "")
        before = self._state.target
        sample = PoolSample(crew, bounds, busy, wanted, failure, self.no_room)
        self._state, decision = self._rule.decide(self._state, sample, now)
        self._serving = min(max(self._serving, crew.ready), decision.target)
        present = crew.current + crew.failed
        decision = self._start(decision.target - present, decision)
        self.target = Target(
            env=FIRST, target=decision.target, current=crew.current, reason=decision.reason, wanted=wanted
        )
        if decision.target != before or self._said is None:
            logger.info("scale engines target=%d reason=%s", decision.target, decision.reason)
            logger.info("scale engines sample=%s", sample)
        self._let_go(present - decision.target, seen, decision.reason)
        if decision.target != self._said or now - self._said_at >= REPEAT_S:
            self._said, self._said_at = decision.target, now
            self._publish(
                EngineDecision(
                    at=time.time(),
                    busy=busy,
                    current=present,
                    target=decision.target,
                    reason=decision.reason,
                )
            )

    def _start(self, number: int, decision: Decision) -> Decision:
        """Start this many engines, as far as there is room; return the decision with the reason of the others."""
        self.no_room = ""
        for _ in range(number):
            if self._placement is not None and (refusal := self._placement.refusal()):
                self.no_room = refusal
                return replace(decision, reason=f"{decision.reason}; {refusal}")
            self._supervisor.start(self._spec(self._free_name()))
        return decision

    def _follow_drains(self, seen: Mapping[str, EngineSighting]) -> None:
        """Give a deadline to the engines that somebody else drains, such as an orchestrator killed meanwhile."""
        for name, view in list(self._supervisor.views().items()):
            if view.phase is Phase.RUNNING and self._is_own(name, seen) and seen[name].address.draining:
                self._supervisor.retire(name, self._ladder, "drained by somebody else")

    def _is_own(self, name: str, seen: Mapping[str, EngineSighting]) -> bool:
        """Return whether an address is that of the present process of an engine."""
        identity = self._supervisor.identity(name)
        return name in seen and identity is not None and identity.pid == seen[name].address.pid

    def _crew(self, views: Mapping[str, ProcessView], seen: Mapping[str, EngineSighting]) -> WorkerCounts:
        """Count the engines; the launcher runs or restarts the first."""
        first = self._is_ready(FIRST, views, seen)
        crew = WorkerCounts(ready=int(first), starting=int(not first))
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

    def _is_ready(
        self, name: str, views: Mapping[str, ProcessView], seen: Mapping[str, EngineSighting]
    ) -> bool:
        found = seen.get(name)
        if found is None or found.is_silent or found.address.draining:
            return False
        if name == FIRST:
            return True
        view = views.get(name)
        return view is not None and view.phase is Phase.RUNNING and self._is_own(name, seen)

    def _let_go(self, number: int, seen: Mapping[str, EngineSighting], reason: str) -> None:
        """End this many engines: given-up ones first, then those not ready, then the youngest."""
        views = dict(self._supervisor.views())
        candidates = [view for view in views.values() if view.phase not in {Phase.STOPPING, Phase.ENDED}]
        candidates.sort(
            key=lambda view: (
                view.phase is not Phase.FATAL,
                self._is_ready(view.name, views, seen),
                -number_of(view.name),
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
        """Remove the address of an ended engine; the first keeps its port through its address."""
        if name != FIRST:
            self._layout.engine(name).unlink(missing_ok=True)

    def _free_name(self) -> str:
        views = self._supervisor.views()
        return next(name for name in map(self._name, range(1, len(views) + 2)) if name not in views)

    def _spec(self, name: str) -> ProcessSpec:
        log = str(self._layout.log(name))
        return ProcessSpec(name=name, role=Role.INFERENCE, argv=self._command(name), log=log)


def engine_ladder(deadline_s: float, grace_s: float) -> Ladder:
    """Return the drain ladder of an engine: SIGUSR1 at once; requests beyond the deadline go to another engine."""
    return Rung(0.0, Step.USR1), Rung(deadline_s, Step.TERM), Rung(deadline_s + grace_s, Step.KILL)
