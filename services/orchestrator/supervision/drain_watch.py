"""Drains that are about to abandon rollouts, each told once. Pure.

A drain ends with SIGTERM: rollouts unfinished by then cost their groups. It is told `TELL_S` before, or at once where
less is left.
"""

from collections.abc import Mapping
from typing import Final

from rolloutmq.schemas.wire.control import WorkerStatus
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView

TELL_S: Final = 30.0
"""Time before the end of a drain at which its unfinished rollouts are told."""


class DrainWatch:
    """Knows which of the present drains were told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(
        self, views: Mapping[str, ProcessView], heard: Mapping[str, WorkerStatus], now: float
    ) -> list[str]:
        """Return a log line for each drain that is about to abandon rollouts, once for each drain.

        Args:
            views: The supervisor's view.
            heard: The broker's last status of the running processes.
            now: Time on the clock of the views.
        """
        ending = {
            name: view.ends
            for name, view in views.items()
            if view.phase is Phase.STOPPING and view.ends is not None
        }
        self._told &= ending.keys()
        lines = []
        for name, ends in ending.items():
            status = heard.get(name)
            is_due = ends - now <= TELL_S and name not in self._told
            if status is None or not status.in_hand or not is_due:
                continue
            self._told.add(name)
            lines.append(
                f"worker={name} in_hand={status.in_hand} draining_s={now - views[name].since:.0f} "
                f"abandoned_in_s={max(0.0, ends - now):.0f}"
            )
        return lines
