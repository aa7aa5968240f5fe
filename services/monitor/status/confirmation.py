"""Confirmation of an operator's order by the orchestrator, which alone can carry it out.

The broker keeps an order and answers at once. The orchestrator reads it from `pressure`, and its next report shows it.
A hung orchestrator writes no report: the order is kept, and the command says that nobody carries it out yet.
"""

import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

from rolloutmq.bus.rundir import read_run
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.services.monitor.status import orchestrator_view
from rolloutmq.services.monitor.status.worker_view import supervision_of
from rolloutmq.services.monitor.text.exit_codes import UNCONFIRMED, complain
from rolloutmq.services.process.identity import alive, started_at

CONFIRM_S: Final = 10.0
"""Longest wait for a report: the orchestrator hears four updates a second, and decides once."""
LOOK_S: Final = 0.05

_T = TypeVar("_T")


def confirmed(layout: RunLayout, look: Callable[[Supervision], _T | None]) -> _T | None:
    """Wait for a report that shows the order, and return what it shows; None without one. Blocks up to `CONFIRM_S`.

    Call it after the broker's answer. Returns at once if no orchestrator runs and no launcher would start one.

    Args:
        layout: Run directory.
        look: Returns what a report shows of the order; None if it does not show it yet.
    """
    asked_at = time.monotonic()
    while time.monotonic() < asked_at + CONFIRM_S:
        known = supervision_of(layout)
        if not _is_expected(layout, known):
            return None
        if known is not None and (known.at or 0.0) > asked_at and (found := look(known)) is not None:
            return found
        time.sleep(LOOK_S)
    return None


def _is_expected(layout: RunLayout, known: Supervision | None) -> bool:
    """Return whether an orchestrator runs that has not said its last, or a launcher that would start one."""
    if (launcher := orchestrator_view.launcher_of(layout)) is None:
        return known is not None and not known.over and alive(known.orchestrator)
    ended = known is not None and known.over and (known.at or 0.0) > started_at(launcher)
    return _is_enabled(layout) and not ended


def _is_enabled(layout: RunLayout) -> bool:
    return read_run(layout.root)[0].orchestrator.enabled


def unconfirmed(layout: RunLayout, order: str, kept: str = "kept") -> int:
    """Print that an order is kept, and not confirmed, with the reason; return the exit code.

    For a run of another host that is all that can be said: the report of its orchestrator stays there.
    """
    if layout.connection.exists():
        sys.stdout.write(
            f"{order}: {kept} by the broker; the orchestrator of the run's host carries it out\n"
        )
        return 0
    known = supervision_of(layout)
    heard_at = orchestrator_view.listen(layout, known)
    silence = orchestrator_view.problem(layout, known, time.monotonic(), time.time(), heard_at)
    if silence:
        why = f"the orchestrator is {silence}"
    elif not _is_expected(layout, known):
        why = "no orchestrator runs" + ("" if _is_enabled(layout) else " (orchestrator.enabled is false)")
    else:
        why = f"the orchestrator did not carry it out within {CONFIRM_S:g} s"
    return complain(f"{order}: {kept}, but not confirmed: {why}", UNCONFIRMED)
