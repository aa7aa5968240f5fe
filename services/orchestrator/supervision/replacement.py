"""The replacement of given-up workers of one environment. Pure; the caller passes the clock.

A given-up worker holds no process, but nobody is started in its place at once: the cause may last.

    environment never worked   no replacement; once all workers are given up, the run ends with the reason
    some workers are ready     all given-up ones are replaced after the pause
    none is left               one is tried again after the pause, the canary; once it is ready, the others follow

The pause is `FIRST_S`. It doubles up to `LONGEST_S` each time a worker that was started after the last failure is given
up as well, and starts anew once such a worker has been ready for `stable_s`. A restart by an operator ends it: one is
tried at once. The next orchestrator continues it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts, WorkerRoom
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView

FIRST_S: Final = 10.0
LONGEST_S: Final = 600.0
GIVEN_UP: Final = "given_up"
"""Bound of an environment without a ready worker after some were given up."""


class Replacement:
    """When the given-up workers of one environment are replaced.

    Args:
        stable_s: Time a worker must be ready before earlier failures are forgotten.
    """

    def __init__(self, stable_s: float) -> None:
        self._stable_s = stable_s
        self._seen: set[str] = set()
        self._failed_at = float("-inf")
        self._pause_s = 0.0
        self._is_limited = False
        self._due: dict[str, float] = {}

    def resume(self, failed_at: float | None, pause_s: float) -> None:
        """Continue after the last failure that an earlier orchestrator saw, and its pause."""
        self._failed_at = float("-inf") if failed_at is None else failed_at
        self._pause_s = pause_s

    @property
    def failed_at(self) -> float | None:
        """Return the time of the last failure; None without one."""
        return None if math.isinf(self._failed_at) else self._failed_at

    @property
    def pause_s(self) -> float:
        """Return the pause after it."""
        return self._pause_s

    @property
    def due(self) -> Mapping[str, float]:
        """Return the times at which given-up workers are replaced, by name; those behind a canary have none."""
        return self._due

    def look(self, crew: Sequence[ProcessView], now: float, *, proven: bool) -> list[str]:
        """Return the given-up workers to replace now; the caller forgets them.

        Args:
            crew: The workers of the environment, without the ended ones.
            now: Time, on the supervisor's clock.
            proven: One of its workers has done work.
        """
        failed = sorted((view for view in crew if view.phase is Phase.FATAL), key=lambda view: view.since)
        if any(self._is_recovery(view, now) for view in crew):
            self._pause_s = 0.0
        for view in failed:
            if view.name not in self._seen:
                self._note_failure(view)
        self._seen = {view.name for view in failed}
        has_ready = any(view.phase is Phase.RUNNING and view.ready_at is not None for view in crew)
        has_others = len(failed) < len(crew)
        self._is_limited = proven and self._pause_s > 0.0 and not has_ready
        names = [view.name for view in failed] if proven else []
        if not has_ready:
            names = [] if has_others else names[:1]
        due = self._failed_at + self._pause_s
        self._due = dict.fromkeys(names, due)
        return names if now >= due else []

    def retry(self, now: float) -> None:
        """End the pause of an environment without a ready worker: an operator ordered a start."""
        if self._is_limited:
            self._pause_s, self._failed_at = FIRST_S, min(self._failed_at, now - FIRST_S)

    def pauses(self, now: float) -> bool:
        """Return whether nobody may be started now: none is ready, and the pause is not over."""
        return self._is_limited and now < self._failed_at + self._pause_s

    def room(self, counts: WorkerCounts, now: float) -> WorkerRoom | None:
        """Return the limit without a ready worker: the present ones, or one; None without a limit."""
        if not self._is_limited:
            return None
        wait_s = self._failed_at + self._pause_s - now
        when = "one is tried now" if counts.current or wait_s <= 0.0 else f"one is tried in {wait_s:.0f} s"
        details = f"{GIVEN_UP}: workers were given up and none is ready; {when}"
        return WorkerRoom(max(1, counts.current), GIVEN_UP, details)

    def _is_recovery(self, view: ProcessView, now: float) -> bool:
        ready_at = view.ready_at
        return view.born > self._failed_at and ready_at is not None and now - ready_at >= self._stable_s

    def _note_failure(self, view: ProcessView) -> None:
        if not self._pause_s:
            self._pause_s = FIRST_S
        elif view.born > self._failed_at:
            self._pause_s = min(2.0 * self._pause_s, LONGEST_S)
        # One that was started before the last failure has the same cause: the pause only starts again.
        self._failed_at = max(self._failed_at, view.since)
