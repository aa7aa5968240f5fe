"""`supervision.json`: the orchestrator's view of its workers and engines, for all readers and for its successor.

The broker forgets a silent worker and never hears from one that cannot start; the orchestrator knows both. The file is
replaced at each change, so that a killed orchestrator leaves its last state, and at least once a second: it is the
heartbeat of the orchestrator. The reason for an unchanged target may change with every tick, and is written less often.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import (
    EnvironmentRecord,
    NodeRecord,
    RestartOutcome,
    RunLayout,
    Supervision,
    Target,
    WorkerRecord,
)
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.schemas.wire.control import ScaleDecision, Setting
from rolloutmq.services.orchestrator.supervision.core import (
    EarlierLife,
    EarlierStop,
    Phase,
    ProcessView,
)
from rolloutmq.services.orchestrator.supervision.supervisor import Supervisor
from rolloutmq.services.orchestrator.supervision.worker_table import env_of, number_of
from rolloutmq.services.process.identity import boot_id, identify, started_at
from rolloutmq.services.process.logbook import last_lines

logger = logging.getLogger(__name__)

LINES: Final = 8
"""Last log lines shown: the end of a traceback and the reason."""
LINES_BYTES: Final = 2000
BEAT_S: Final = 1.0
"""Interval at which the unchanged file is written again."""
REASON_S: Final = 1.0
"""Interval at which the reason for an unchanged target is written."""


class StateFile:
    """Writer of the file. Belongs to one event loop."""

    def __init__(self, layout: RunLayout, token: str) -> None:
        self._layout = layout
        self._me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), f"{token}/orchestrator")
        self._targets: dict[str, Target] = {}
        self._environments: tuple[EnvironmentRecord, ...] = ()
        self._replaced: Mapping[str, float] = {}
        self._ends: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._written: Supervision | None = None
        self._due: asyncio.Handle | None = None
        self._engines: Target | None = None
        self._engine_processes: Supervisor | None = None
        self._settings: dict[str, Setting] = {}
        self._restarts: dict[str, RestartOutcome] = {}
        self._nodes: tuple[NodeRecord, ...] = ()
        self._no_room: dict[str, str] = {}
        self._places: Mapping[str, tuple[str, str]] = {}
        self._written_at = self._reason_at = float("-inf")
        self._failed = ""

    def soon(self, workers: Supervisor) -> None:
        """Write after all events of this moment."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self.write, workers)

    async def beat(self, workers: Supervisor) -> None:
        """Write once a second until cancelled."""
        while True:
            self.write(workers)
            await asyncio.sleep(BEAT_S)

    def decided(self, decision: ScaleDecision, now: float, wanted: int | None) -> None:
        """Record a decision; the next `write` includes it if the target changed or the last reason is old.

        Args:
            decision: As published.
            now: Monotonic seconds.
            wanted: Number that an operator pinned, as the decision took it.
        """
        known = self._targets.get(decision.env)
        new = Target(
            env=decision.env,
            target=decision.target,
            current=decision.current,
            reason=decision.reason,
            wanted=wanted,
            joined=decision.joined,
        )
        moved = known is None or msgspec.structs.replace(known, reason=new.reason) != new
        if moved or now - self._reason_at >= REASON_S:
            self._targets[decision.env] = new

    def learned(self, environments: tuple[EnvironmentRecord, ...], replaced: Mapping[str, float]) -> None:
        """Record what is known of the environments, and when given-up workers are replaced, for the next `write`."""
        self._environments, self._replaced = environments, replaced

    def engines_decided(self, target: Target | None, engines: Supervisor) -> None:
        """Record the target number of engines, and who supervises them; the next `write` includes both."""
        self._engines, self._engine_processes = target, engines

    def bounded(self, settings: Mapping[str, Setting]) -> None:
        """Record the live settings in force; the next `write` includes them."""
        self._settings = dict(settings)

    def restarted(self, outcomes: dict[str, RestartOutcome]) -> None:
        """Record the outcomes of ordered restarts; the next `write` includes them."""
        self._restarts = outcomes

    def placed(
        self,
        nodes: tuple[NodeRecord, ...],
        places: Mapping[str, tuple[str, str]],
        limits: Mapping[str, str],
    ) -> None:
        """Record the nodes of the cluster, host and node of each worker, and limits by environment."""
        self._nodes, self._places, self._no_room = nodes, places, dict(limits)

    def write(self, workers: Supervisor, *, over: bool = False) -> None:
        """Replace the file if anything changed, or the heartbeat is due.

        Args:
            workers: The workers.
            over: This is the last write; the orchestrator ends in order.
        """
        now = time.monotonic()
        if self._due is not None:
            self._due.cancel()
            self._due = None
        fleets = [workers] if self._engine_processes is None else [workers, self._engine_processes]
        records = [self._records(one) for one in fleets]
        present = {one.worker for one in chain(*records)}
        self._ends = {name: ends for name, ends in self._ends.items() if name in present}
        found = Supervision(
            orchestrator=self._me,
            over=over,
            targets=tuple(self._targets.values()),
            engines=self._engines,
            engine_lives=tuple(chain(*records[1:])),
            workers=records[0],
            nodes=self._nodes,
            limits=self._no_room,
            environments=self._environments,
            settings=self._settings,
            restarts=self._restarts,
        )
        changed = found != self._written
        if not changed and now - self._written_at < BEAT_S:
            return
        if changed:
            self._reason_at = now
        try:
            write_json(self._layout.supervision, msgspec.structs.replace(found, at=now))
        except OSError as error:
            if str(error) != self._failed:
                logger.error("supervision not written path=%s error=%s", self._layout.supervision, error)
            self._failed = str(error)
            return
        if self._failed:
            logger.warning("supervision written again path=%s", self._layout.supervision)
        self._failed = ""
        self._written, self._written_at = found, now

    def _records(self, processes: Supervisor) -> tuple[WorkerRecord, ...]:
        views: Mapping[str, ProcessView] = {
            name: view for name, view in processes.views().items() if view.phase is not Phase.ENDED
        }
        ordered = sorted(views, key=lambda name: (env_of(name), number_of(name)))
        return tuple(self._record(views[name], processes.identity(name)) for name in ordered)

    def _record(self, view: ProcessView, identity: ProcessIdentity | None) -> WorkerRecord:
        host, node = self._places.get(view.name, ("", ""))
        return WorkerRecord(
            worker=view.name,
            env=env_of(view.name),
            phase=view.phase.value,
            since=view.since,
            pid=identity.pid if identity is not None else 0,
            started=_started(identity),
            start_ticks=identity.start_ticks if identity is not None else 0,
            due=self._next(view),
            crashes=view.crashes,
            restarts=view.restarts,
            reason=view.reason,
            last_lines=self._last_lines(view),
            ready=view.ready_at is not None,
            was_ready=view.was_ready,
            born=view.born,
            ends=view.ends,
            rungs=view.rungs if view.phase is Phase.STOPPING else (),
            failing=view.failing,
            returns=view.returns,
            host=host,
            node=node,
        )

    def _next(self, view: ProcessView) -> float | None:
        """Return when a process is started in this place; None if that is not known, or now."""
        if view.phase is Phase.FATAL:
            return self._replaced.get(view.name)
        return view.due if view.phase is Phase.WAITING and view.crashes else None

    def _last_lines(self, view: ProcessView) -> tuple[str, ...]:
        """Return the last log lines of a failed worker, also while it starts again; read once for each end."""
        if view.phase is Phase.RUNNING and view.crashes:
            return self._ends.get(view.name, (0.0, ()))[1]
        if not (view.phase is Phase.FATAL or (view.phase is Phase.WAITING and view.reason)):
            return ()
        known = self._ends.get(view.name)
        if known is None or known[0] != view.since:
            known = self._ends[view.name] = view.since, _shown(self._layout.log(view.name))
        return known[1]


def earlier_lives(records: Iterable[WorkerRecord], pids: Mapping[str, int] = {}) -> dict[str, EarlierLife]:
    """Return what an earlier orchestrator knew of each worker, or of each engine.

    Args:
        records: Of its last report.
        pids: Process of each; a report of how another process of it was ended says nothing about this one.
    """
    return {
        one.worker: EarlierLife(
            one.ready,
            one.was_ready,
            one.crashes,
            math.inf if one.born is None else one.born,
            _stop_of(one) if pids.get(one.worker) == one.pid else None,
        )
        for one in records
    }


def _stop_of(record: WorkerRecord) -> EarlierStop | None:
    """Return how an earlier orchestrator was ending a process; None if it was not."""
    if record.phase != Phase.STOPPING:
        return None
    return EarlierStop(record.since, record.reason, record.rungs, record.failing, record.returns)


def _started(identity: ProcessIdentity | None) -> float | None:
    """Return the start time of a process; None for one of another host, whose clock is another one."""
    return started_at(identity) if identity is not None and identity.boot_id == boot_id() else None


def _shown(log: Path) -> tuple[str, ...]:
    """Return the last lines without terminal control characters."""
    lines = last_lines(log, LINES, LINES_BYTES)
    return tuple("".join(char if char.isprintable() else " " for char in line) for line in lines)
