"""The method that runs, noted before it is called: code that ends its process can tell nothing afterwards.

The trial notes in a file that both processes have mapped; what is there when the process dies is what it did last.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    running = _Running(note)
    for each in kind.__mro__:
        for name, method in [*vars(each).items()] if not each.__module__.startswith(OURS) else ():
            if name in METHODS and isinstance(method, FunctionType):
                place = place_of(method, files)
                what = f"`{kind.__name__}.{name}`{f' ({place})' if place else ''}"
                setattr(each, name, _noting(method, what, running))


class _Running:
    """Methods that run now. Coroutines overlap and end in any order; the one that began last is noted."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._around = ""
        self._methods: dict[object, str] = {}

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Note a method within the block, and behind it the last one that still runs."""
        before, call = self._note(what), object()
        if not self._methods:
            self._around = before
        self._methods[call] = what
        try:
            yield
        finally:
            del self._methods[call]
            left = [*self._methods.values()]
            self._note(left[-1] if left else self._around)


def _noting(method: Callable[..., Any], what: str, running: _Running) -> Callable[..., Any]:
    if iscoroutinefunction(method):

        @wraps(method)
        async def awaited(*args: Any, **options: Any) -> Any:
            with running.noted(what):
                return await method(*args, **options)

        return awaited

    @wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        with running.noted(what):
            return method(*args, **options)

    return called
