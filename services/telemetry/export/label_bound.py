"""The bound of a label: so many names have series of their own, and the others share the series of `_other`. Pure.

A name keeps its place while it is heard. One that was silent for `IDLE_S` gives it up as soon as another wants it.
"""

from typing import Final

OTHER: Final = "_other"
"""Label of all names beyond the bound. No name of an environment, a worker or an engine begins like this."""
IDLE_S: Final = 600.0
TEXT_LIMIT: Final = 128
"""Longest value of a label, in characters."""


class LabelBound:
    """The names with series of their own.

    Args:
        limit: Number of them.
        idle_s: Silence after which a name may be replaced, in seconds.
    """

    def __init__(self, limit: int, idle_s: float = IDLE_S) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._heard_at: dict[str, float] = {}
        self._merged: dict[str, None] = {}
        self._full_until = 0.0

    def label(self, name: str, now: float) -> str:
        """Return the label of a name that is heard now: the name itself, or `OTHER`."""
        if name in self._heard_at or len(self._heard_at) < self._limit or self._makes_room(now):
            self._heard_at[name] = now
            self._merged.pop(name, None)
            return name
        if len(self._merged) < self._limit:
            self._merged[name] = None
        return OTHER

    def holds(self, name: str) -> bool:
        """Return whether a name still has series of its own. `OTHER` always has."""
        return name == OTHER or name in self._heard_at

    @property
    def merged(self) -> int:
        """Names under `OTHER`, counted up to the limit."""
        return len(self._merged)

    def _makes_room(self, now: float) -> bool:
        if not self._limit or now < self._full_until:
            return False
        idlest = min(self._heard_at, key=lambda name: self._heard_at[name])
        self._full_until = self._heard_at[idlest] + self._idle_s
        if now < self._full_until:
            return False
        del self._heard_at[idlest]
        return True


def text_of(value: str) -> str:
    """Return a text that fits a label: bounded, and valid in UTF-8."""
    cut = value if len(value) <= TEXT_LIMIT else value[: TEXT_LIMIT - 1] + "…"
    return cut.encode(errors="replace").decode()
