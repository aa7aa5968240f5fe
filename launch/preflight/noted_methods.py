"""The method that runs, noted before it is called: code that ends its process can tell nothing afterwards.

The trial notes in a file that both processes have mapped; what is there when the process dies is what it did last.
"""

import mmap
from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from rolloutmq.services.worker.user_code.failures import UserFiles, place_of

METHODS: Final = frozenset(
    {
        *("task", "task_at", "eval_task_at", "submitted", "prompt", "score", "member"),
        *("rollout", "rollout_task", "rollout_at", "rollout_eval", "__aenter__", "__aexit__"),
    }
)
NOTES: Final = "notes"
"""Name of the file, beside the result of the trial."""
FAULTS: Final = "faults"
"""Name of the file beside it, with the stacks of a process that a fatal signal ended."""
NOTE_BYTES: Final = 512
OURS: Final = "rolloutmq."
"""First part of the modules of this package, whose methods are not noted."""

Note = Callable[[str], str]
"""Notes what begins now, and returns what was noted before."""


def silent(_what: str) -> str:
    """Note nothing."""
    return ""


class NoteFile:
    """Notes of a process in a file, which exists for as long as the other process reads it.

    Attributes:
        current: What was noted last.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(NOTE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), NOTE_BYTES)
        self.current = ""

    def note(self, what: str) -> str:
        """Note what begins now; return what was noted before."""
        before, self.current = self.current, what
        self._map[:] = what.encode(errors="replace")[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")
        return before


def noted(path: Path) -> str:
    """Return what the process noted last; empty if it noted nothing."""
    return path.read_bytes().rstrip(b"\0").decode(errors="ignore") if path.exists() else ""


def note_methods(kind: type[Any], files: UserFiles, note: Note) -> None:
    """Let the methods of a class, and of those it derives from, note that they run. The user's own only.

    The methods are replaced in their classes, for the rest of the process: an environment with other attributes could
    not be pickled, for example for a pool of processes.
    """
    for each in kind.__mro__:
        for name, method in [*vars(each).items()] if not each.__module__.startswith(OURS) else ():
            if name in METHODS and isinstance(method, FunctionType):
                place = place_of(method, files)
                what = f"`{kind.__name__}.{name}`{f' ({place})' if place else ''}"
                setattr(each, name, _noting(method, what, note))


def _noting(method: Callable[..., Any], what: str, note: Note) -> Callable[..., Any]:
    if iscoroutinefunction(method):

        @wraps(method)
        async def awaited(*args: Any, **options: Any) -> Any:
            before = note(what)
            try:
                return await method(*args, **options)
            finally:
                note(before)

        return awaited

    @wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        before = note(what)
        try:
            return method(*args, **options)
        finally:
            note(before)

    return called
