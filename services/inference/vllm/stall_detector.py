"""Stall detector: vLLM is stalled if it has requests and takes no step for `limit_s`. Pure.

Requests have no timeout, because nobody knows how long a valid answer takes. But a healthy vLLM with work takes one
step after the other. One that takes none and answers nothing hangs: it was stopped, waits forever, or lost its
requests.
"""


class StallDetector:
    """Progress of one vLLM. Times are in seconds, of a monotonic clock."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._moved_at = now
        self._steps = -1

    def moved(self, now: float) -> None:
        """Record that vLLM answered, or was idle until now."""
        self._moved_at = now

    def counted(self, steps: int, now: float) -> None:
        """Record the step counter of vLLM."""
        if steps != self._steps:
            self._steps = steps
            self._moved_at = now

    def still_s(self, now: float) -> float:
        """Return the seconds without progress."""
        return now - self._moved_at

    def left_s(self, now: float) -> float:
        """Return the seconds left until vLLM counts as stalled; 0 if it does."""
        return max(0.0, self._limit_s - self.still_s(now))
