"""The log throttle: a lasting condition is logged when it changes and then at intervals."""

from typing import Final

EVERY_S: Final = 30.0
"""Default interval: a stuck run repeats its reason that often."""
AFTER_S: Final = 2.0
"""Default time before a wait is logged: nobody wonders about a shorter one."""


class LogThrottle:
    """Decides when one lasting condition is logged. Pure.

    Args:
        every_s: Interval between two log lines of the same text, in seconds.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._logged = ""
        self._logged_at = 0.0

    def is_due(self, text: str, now: float) -> bool:
        """Return whether to log the text now, and count it as logged. An empty text ends the condition."""
        due = bool(text) and (text != self._logged or now - self._logged_at >= self._every_s)
        if due or not text:
            self._logged, self._logged_at = text, now
        return due


class WaitLog:
    """Decides when a wait is logged: once it has lasted, and then at intervals or with another reason. Pure.

    Args:
        after_s: Time before the first log line, in seconds.
        every_s: Interval between two log lines with the same reason, in seconds, also of different waits.
    """

    def __init__(self, after_s: float = AFTER_S, every_s: float = EVERY_S) -> None:
        self._after_s = after_s
        self._throttle = LogThrottle(every_s)
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Begin the wait, unless it has begun."""
        if self._since is None:
            self._since = now

    def is_due(self, reason: str, now: float) -> bool:
        """Return whether to log that the wait goes on for this reason, and count it as logged."""
        self.begin(now)
        return self.waited_s(now) >= self._after_s and self._throttle.is_due(reason, now)

    def waited_s(self, now: float) -> float:
        """Return how long the wait has lasted; 0 if there is none."""
        return 0.0 if self._since is None else now - self._since

    def over(self) -> None:
        """End the wait."""
        self._since = None
