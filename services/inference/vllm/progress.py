"""Whether vLLM gets on with what it was asked: its steps are counted, and it stands still where none comes. Pure.

How long an honest answer takes nobody knows, so no request has a deadline. But a vLLM that lives takes one step after
the other as long as it has something to do. One that takes none for `limit_s`, and answers nothing, hangs: it was
stopped, waits for what never comes, or has lost what it was asked.
"""


class Progress:
    """What is known of the steps of one vLLM. Times are in seconds, of a monotonic clock."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._moved_at = now
        self._steps = -1

    def moved(self, now: float) -> None:
        """Note that it answered, or that it had nothing to do until now."""
        self._moved_at = now

    def counted(self, steps: int, now: float) -> None:
        """Note how many steps it says that it took in its life."""
        if steps != self._steps:
            self._steps = steps
            self._moved_at = now

    def still_s(self, now: float) -> float:
        """Return for how long it stands still."""
        return now - self._moved_at

    def left_s(self, now: float) -> float:
        """Return how long it may stand still from now on; 0 where that is over."""
        return max(0.0, self._limit_s - self.still_s(now))
