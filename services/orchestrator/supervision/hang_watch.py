"""Workers that hang: they send no heartbeat for longer than their environment allows. Pure.

Only silence that was witnessed counts. After a pause of the broker, of its messages or of the orchestrator itself,
every worker looks silent: silence counts from the end of the last pause.
"""

import math
from collections.abc import Mapping
from typing import Final

from rolloutmq.schemas.wire.control import WorkerState, WorkerStatus

PAUSE_S: Final = 2.0
"""Time without a message of the broker, which sends four a second, from which it counts as a pause."""
_ENDS: Final = frozenset({WorkerState.GONE, WorkerState.FAILED})


class HangWatch:
    """The witnessed silence of all workers.

    Args:
        limits_s: Longest silence of a worker, by environment; an environment without one is not watched.
    """

    def __init__(self, limits_s: Mapping[str, float]) -> None:
        self._limits_s = limits_s
        self._heard_at = self._since = -math.inf

    def look(self, heard: Mapping[str, WorkerStatus], heard_at: float) -> dict[str, str]:
        """Return the workers that hang, with the reason.

        Args:
            heard: The broker's last status of the running processes.
            heard_at: Arrival time of the message with it.
        """
        if heard_at - self._heard_at > PAUSE_S:
            self._since = heard_at
        self._heard_at = heard_at
        hanging = {}
        for name, status in heard.items():
            limit_s = self._limits_s.get(status.env, math.inf)
            silent_s = min(status.silent_s, heard_at - self._since)
            if silent_s > limit_s and status.state not in _ENDS:
                hanging[name] = (
                    f"hangs: no heartbeat for {silent_s:.0f} s (environment.{status.env}.liveness_s: {limit_s:g})"
                )
        return hanging
