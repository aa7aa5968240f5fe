"""Report of an exception in the user's code, as a test runner shows it.

    sums.py:14: in score
        return 1 / (int(completion.text) - 3)
    E   ZeroDivisionError: division by zero

    task        (3, 4)
    prompt      '3+4='
    completion  '3' (2 tokens, stop)

The frames are those of the user's files: below the directory of the configuration, or else in no library. Task, prompt
and completion are the values of that moment, from the frames of the user's code and of the classes that call it.
Secrets that were hidden before are in no report.
"""

import asyncio
import linecache
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from inspect import CO_OPTIMIZED, isroutine, unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import msgspec

from rolloutmq.bus.lifecycle import without_secrets
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.printable import error_line, error_text, printable, printable_lines
from rolloutmq.services.worker.completion import Completion

ERROR_CHARS: Final = 500
"""Longest one-line error, in characters."""
FRAMES: Final = 4
"""Most frames of the user's code in a report, the innermost ones."""
VALUE_CHARS: Final = 300
"""Longest value in a report."""
ENDS: Final = 50
"""Most frames at either end of a stack that are looked at: those of a recursion are a thousand, and alike."""
FILES: Final = 1024
"""Most files whose owner is remembered."""
CHAIN: Final = 5
"""Most causes of an error that are searched for frames of the user's code."""
INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, also of another Python environment that this one sees."""
OURS: Final = Path(__file__).parents[3]
"""Directory of this package."""
CALLERS: Final = frozenset(
    f"rolloutmq.services.worker.{name}"
    for name in ("environment", "group_members", "verifiers.environment", "verifiers.tasksets.environment")
)
"""Modules of this package whose frames have the task of the user's code."""


class UserFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception in the user's code.

    Attributes:
        error: Its type and message, in one line.
        where: File and line of the user's code, `sums.py:14`; empty if there is none.
        report: Frames, task, prompt and completion, in lines.
        task: The task, as text; empty if it is not known.
    """

    error: str
    where: str = ""
    report: str = ""
    task: str = ""

    @property
    def headline(self) -> str:
        """The error and its place, in one line."""
        return f"{self.error} ({self.where})" if self.where else self.error


@dataclass(frozen=True)
class UserFiles:
    """Files of the user: those below `base_dir`, and others that belong to no library but his own.

    Attributes:
        base_dir: Directory of the configuration.
        modules: Installed modules, or packages of modules, that are the user's.
    """

    base_dir: Path
    modules: Collection[str] = ()

    @classmethod
    def of(cls, base_dir: Path, sections: Iterable[EnvironmentConfig]) -> "UserFiles":
        """Return the files of the user who wrote these environments."""
        modules = {one.module.partition(".")[0] for one in sections} - {""}
        return cls(base_dir.resolve(), frozenset(modules))

    def has(self, path: str) -> bool:
        """Return whether a file is the user's."""
        if not Path(path).is_absolute() or _is_ours(path):
            return False
        library = _library_module(path)
        return library is None or library in self.modules

    def is_near(self, path: str) -> bool:
        """Return whether a file is below the directory of the configuration."""
        return self.base_dir in Path(path).parents

    def name(self, path: str) -> str:
        """Return the path of a file as a report shows it."""
        return printable(str(Path(path).relative_to(self.base_dir)) if self.is_near(path) else path)


@lru_cache(maxsize=FILES)
def _library_module(path: str) -> str | None:
    """Return the module of Python or of an installed package that a file belongs to; None if it is of no library."""
    file = Path(path)
    folders = {*_library_folders(), *(one for one in file.parents if one.name in INSTALLED)}
    inner = max((one for one in folders if one in file.parents), key=lambda one: len(one.parts), default=None)
    return None if inner is None else Path(file.relative_to(inner).parts[0]).stem


@cache
def _library_folders() -> frozenset[Path]:
    return frozenset(
        Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib", "platstdlib")
    )


@lru_cache(maxsize=FILES)
def _is_ours(path: str) -> bool:
    """Return whether a file belongs to this package."""
    return OURS in Path(path).parents


@dataclass(frozen=True)
class _At:
    """A frame, and the line that it is at."""

    frame: FrameType
    line: int

    @property
    def code(self) -> CodeType:
        return self.frame.f_code

    @property
    def is_of_function(self) -> bool:
        """Return whether its variables are those of a call; in a class or a module they are definitions."""
        return bool(self.code.co_flags & CO_OPTIMIZED)

    def told(self, files: UserFiles) -> Iterator[str]:
        """Yield the place and the line of the source."""
        yield from _source(self.place(files), self.code, self.line)

    def place(self, files: UserFiles) -> str:
        return f"{files.name(self.code.co_filename)}:{self.line}"


def failure_of(error: BaseException, files: UserFiles, why: str = "") -> UserFailure:
    """Return the report of an exception, while its traceback has the frames.

    Args:
        error: Raised by the user's code, or about what it returned.
        files: Tell the user's frames.
        why: What to say in place of the error itself, in one line.
    """
    first = first_error(error)
    for about in _chain(first):
        stack, defined = _stack(traceback.walk_tb(about.__traceback__)), _definition(about, files)
        if defined or _users(stack, files):
            break
    else:
        stack, defined = _stack(traceback.walk_tb(first.__traceback__)), []
    ending = [why] if why else _ending(first)
    return _failure(stack, files, why or one_line(first), ending, defined)


def failure_at(frames: Sequence[FrameType], files: UserFiles, why: str) -> UserFailure:
    """Return the report of code that is still running: its frames, outermost first, and why that is a failure."""
    stack = _stack((frame, frame.f_lineno) for frame in frames)
    return _failure(stack, files, why, [why])


def place_of(function: Any, files: UserFiles) -> str:
    """Return file and line of a function of the user's; empty if it is none."""
    code = _code_of(function)
    return _place(code, files) if code is not None else ""


def first_error(error: BaseException) -> BaseException:
    """Return the error, or of an exception group its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def one_line(error: BaseException) -> str:
    """Describe an error in one short line of valid UTF-8, without secrets; of an exception group, the first error."""
    error = first_error(error)
    text = error_text(error) if isinstance(error, RolloutMQError) else error_line(error)
    return without_secrets(text.encode(errors="replace").decode())[:ERROR_CHARS]


def frames_of(frame: FrameType | None) -> list[FrameType]:
    """Return a running frame and those that called it, outermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def waiting_frames(task: "asyncio.Task[Any]") -> list[FrameType]:
    """Return the frames of a task that waits, outermost first: what awaits what."""
    found: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            if (frame := getattr(awaited, f"{kind}_frame", None)) is not None:
                found.append(frame)
                awaited = getattr(awaited, f"{kind}_await", None) or getattr(
                    awaited, f"{kind}_yieldfrom", None
                )
                break
        else:
            return found
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    found: BaseException | None = error
    for _ in range(CHAIN):
        if found is None:
            return
        found = first_error(found)
        yield found
        shown = None if found.__suppress_context__ else found.__context__
        found = found.__cause__ or shown


def _stack(frames: Iterable[tuple[FrameType, int | None]]) -> list[_At]:
    """Return frames with their lines, outermost first; of a recursion those at both ends.

    An instruction without a line, which a compiler may add, is shown at the first line of its function.
    """
    stack = [_At(frame, line or frame.f_code.co_firstlineno) for frame, line in frames]
    return stack if len(stack) <= 2 * ENDS else [*stack[:ENDS], *stack[-ENDS:]]


def _users(stack: Sequence[_At], files: UserFiles) -> list[_At]:
    """Return the frames of the user's files: near ones, or else any."""
    found = [one for one in stack if files.has(one.code.co_filename)]
    return [one for one in found if files.is_near(one.code.co_filename)] or found


def _failure(
    stack: Sequence[_At], files: UserFiles, error: str, ending: Sequence[str], defined: Sequence[str] = ()
) -> UserFailure:
    """Return a report; `defined` is the place that an error without frames is about, and its lines."""
    where, *further = defined or [""]
    shown = _users(stack, files)[-FRAMES:]
    lines = [*(line for one in shown for line in one.told(files)), *further]
    if shown and stack[-1] is not shown[-1] and not _is_ours(stack[-1].code.co_filename):
        lines += stack[-1].told(files)  # the library that raised
    lines += [f"E   {line}" for text in ending for line in text.splitlines()]
    told = dict(_values(stack, files))
    values = [f"{name:<11} {value}" for name, value in told.items()]
    report = "\n".join([*lines, *(["", *values] if values else [])])
    place = where or (shown[-1].place(files) if shown else "")
    return UserFailure(
        error=error,
        where=place,
        report=printable_lines(without_secrets(report)),
        task=without_secrets(told.get("task", "")),
    )


def _ending(error: BaseException) -> list[str]:
    if isinstance(error, RolloutMQError):
        return [error_text(error)]
    try:
        return ["".join(traceback.format_exception_only(error)).rstrip()]
    except BaseException:  # noqa: BLE001 - it reads attributes of the error, which may be the user's code
        return [error_line(error)]


def _definition(error: BaseException, files: UserFiles) -> list[str]:
    """Return the place of what no frame has, and the lines that show it.

    That is a file that is no Python, or a function that has returned: `users_function` of the error.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return [f"{files.name(error.filename)}:{error.lineno}"]
    code = _code_of(vars(error).get("users_function"))
    if code is None or not (place := _place(code, files)):
        return []
    return [place, *_source(place, code, code.co_firstlineno)]


def _place(code: CodeType, files: UserFiles) -> str:
    return f"{files.name(code.co_filename)}:{code.co_firstlineno}" if files.has(code.co_filename) else ""


def _code_of(function: Any) -> CodeType | None:
    """Return the code of a function, without what wraps it, or of an object that is called; None if it has none."""
    while isinstance(function, partial):
        function = function.func
    if not isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - its code is wanted
    code = getattr(unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _source(place: str, code: CodeType, line: int) -> Iterator[str]:
    """Yield a place and its line of the source."""
    yield f"{place}: in {code.co_name}"
    if source := linecache.getline(code.co_filename, line).strip():
        yield f"    {source}"


def _values(stack: Sequence[_At], files: UserFiles) -> Iterator[tuple[str, str]]:
    """Yield task, prompt and completion of the innermost frames that have them."""
    told: dict[str, str] = {}
    for one in reversed(stack):
        is_caller = one.frame.f_globals.get("__name__") in CALLERS
        # In a module or a class `task` is the method.
        if not one.is_of_function or not (is_caller or files.has(one.code.co_filename)):
            continue
        values = one.frame.f_locals
        for name in ("task", "prompt") if is_caller else ("task",):
            if name not in told and values.get(name) is not None:
                told[name] = _shown(values[name])
        completions = (value for value in values.values() if isinstance(value, Completion))
        if "completion" not in told and (found := next(completions, None)) is not None:
            told["completion"] = _completion(found)
    for name in ("task", "prompt", "completion"):
        if name in told:
            yield name, told[name]


def _completion(completion: Completion) -> str:
    return f"{_shown(completion.text)} ({len(completion.token_ids)} tokens, {completion.finish_reason})"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException:  # noqa: BLE001 - user code may raise anything
        text = f"<{type(value).__name__} without a repr>"
    text = printable(text)
    return text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}…"
