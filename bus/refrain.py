"""What a log says as long as it is so: at once when it changes, then now and then. It neither floods nor is lost."""

from typing import Final

EVERY_S: Final = 30.0
"""As often as a stuck run says so in plain lines."""


class Refrain:
    """One thing that is said for as long as it is so. Pure.

    Args:
        every_s: How often it is said while it stays the same.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._said = ""
        self._said_at = 0.0

    def is_due(self, what: str, now: float) -> bool:
        """Tell whether to say something now, which then counts as said; nothing is never due."""
        due = bool(what) and (what != self._said or now - self._said_at >= self._every_s)
        if due or not what:
            self._said, self._said_at = what, now
        return due
