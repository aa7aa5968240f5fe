"""The log throttle: a lasting condition is logged when it changes and then at intervals."""

from typing import Final

EVERY_S: Final = 30.0
"""Default interval: a stuck run repeats its reason that often."""


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
