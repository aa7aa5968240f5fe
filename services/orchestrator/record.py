"""`supervision.json`: what the orchestrator knows of its workers, for everybody who looks.

The broker forgets a worker that fell silent and never hears of one that cannot start; the orchestrator knows both. The
file is replaced whenever something in it changes, so that what a killed orchestrator leaves is what it knew last. Why a
number of workers is held may change with every tick, and is written less often.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.control import ScaleDecision
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.schemas.records import Supervision, Target, WorkerRecord
from rolloutmq.services.logbook import last_lines
from rolloutmq.services.orchestrator.identity import identify
from rolloutmq.services.orchestrator.keeper import Supervisor
from rolloutmq.services.orchestrator.roster import env_of, number_of
from rolloutmq.services.orchestrator.supervisor import Phase, View

logger = logging.getLogger(__name__)

LINES: Final = 8
"""Last lines of a log that are shown: the end of a traceback and the reason."""
LINES_BYTES: Final = 2000
REASON_S: Final = 1.0
"""How often the reason for an unchanged number is written."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Record:
    """Writes the file. Belongs to one event loop."""

    def __init__(self, layout: RunLayout, token: str) -> None:
        self._layout = layout
        self._me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), f"{token}/orchestrator")
        self._targets: dict[str, Target] = {}
        self._ends: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._written: Supervision | None = None
        self._due: asyncio.Handle | None = None
        self._reason_at = float("-inf")

    def soon(self, workers: Supervisor) -> None:
        """Write once everything has happened that happens at this moment."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self.write, workers)

    def decided(self, decision: ScaleDecision, now: float) -> None:
        """Take a decision; the next `write` says it, if it is a change or the last reason is old."""
        known = self._targets.get(decision.env)
        new = Target(
            env=decision.env, target=decision.target, current=decision.current, reason=decision.reason
        )
        moved = known is None or (known.target, known.current) != (new.target, new.current)
        if moved or now - self._reason_at >= REASON_S:
            self._targets[decision.env] = new

    def write(self, workers: Supervisor) -> None:
        """Replace the file, if anything changed."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        found = Supervision(
            orchestrator=self._me,
            targets=tuple(self._targets.values()),
            workers=self._workers(workers),
        )
        if found == self._written:
            return
        self._reason_at = time.monotonic()
        try:
            write_json(self._layout.supervision, found)
        except OSError as error:
            logger.error("supervision not written path=%s error=%s", self._layout.supervision, error)
            return
        self._written = found

    def _workers(self, workers: Supervisor) -> tuple[WorkerRecord, ...]:
        views: Mapping[str, View] = {
            name: view for name, view in workers.views().items() if view.phase is not Phase.ENDED
        }
        self._ends = {name: ends for name, ends in self._ends.items() if name in views}
        ordered = sorted(views, key=lambda name: (env_of(name), number_of(name)))
        return tuple(self._worker(views[name], workers.identity(name)) for name in ordered)

    def _worker(self, view: View, identity: ProcessIdentity | None) -> WorkerRecord:
        waits = view.phase is Phase.WAITING
        return WorkerRecord(
            worker=view.name,
            env=env_of(view.name),
            phase=view.phase.value,
            since=view.since,
            pid=identity.pid if identity is not None else 0,
            started=_started(identity) if identity is not None else None,
            due=view.due if waits and view.crashes else None,
            crashes=view.crashes,
            restarts=view.restarts,
            reason=view.reason,
            last_lines=self._last_lines(view),
        )

    def _last_lines(self, view: View) -> tuple[str, ...]:
        """Return how the log ends of one that failed; it is read once for each end."""
        if not (view.phase is Phase.FATAL or (view.phase is Phase.WAITING and view.reason)):
            return ()
        known = self._ends.get(view.name)
        if known is None or known[0] != view.since:
            known = self._ends[view.name] = view.since, _shown(self._layout.log(view.name))
        return known[1]


def _shown(log: Path) -> tuple[str, ...]:
    """Return the last lines, without what would write elsewhere on a terminal."""
    lines = last_lines(log, LINES, LINES_BYTES)
    return tuple("".join(char if char.isprintable() else " " for char in line) for line in lines)


def _started(identity: ProcessIdentity) -> float:
    """Return when a process was started, on CLOCK_MONOTONIC; the kernel counts from the boot, sleep included."""
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return round(identity.start_ticks / _TICKS - slept, 2)
