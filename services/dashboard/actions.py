"""Actions of a page: each is the command of the same name, in a process of its own.

So the page does exactly what the command line does, with its checks and its texts, and what an action costs or breaks
is not the server's. Words of a page come after `--` and are never options.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.process import python_command

PATIENCE_S: Final = 30.0
"""Longest time of an action; the commands wait for a confirmation for ten seconds."""
OUTPUT_LIMIT_BYTES: Final = 1 << 16
LINES_LIMIT: Final = 200
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
COMMAND_LINE: Final = "rolloutmq.launch.cli"

Text = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request."""


class Drain(_Body):
    """Drain a worker."""

    worker: Text

    def words(self) -> list[str]:
        return ["drain", "--", self.worker]


class Restart(_Body):
    """Replace a worker or an engine; `now` kills it."""

    worker: Text
    now: bool = False

    def words(self) -> list[str]:
        return ["restart", *(["--now"] if self.now else []), "--", self.worker]


class Scale(_Body):
    """Pin a number of workers; None returns it to autoscaling."""

    env: Text
    count: Count | None

    def words(self) -> list[str]:
        return ["scale", "--", self.env, "auto" if self.count is None else str(self.count)]


class Cordon(_Body):
    """Keep new workers off a GPU."""

    gpu: Text
    reason: Annotated[str, Meta(max_length=200)] = ""

    def words(self) -> list[str]:
        return ["cordon", *([f"--reason={self.reason}"] if self.reason else []), "--", self.gpu]


class Uncordon(_Body):
    """Allow new workers on a GPU."""

    gpu: Text

    def words(self) -> list[str]:
        return ["uncordon", "--", self.gpu]


class Set(_Body):
    """Change live settings, all or none."""

    values: Annotated[dict[Text, bool | int | float | Text], Meta(min_length=1, max_length=64)]

    def words(self) -> list[str]:
        return ["set", "--", *(f"{key}={json.dumps(value)}" for key, value in self.values.items())]


class Requeue(_Body):
    """Queue dead groups again: those named, or all."""

    groups: Annotated[list[Text], Meta(max_length=100)] = []
    all: bool = False

    def words(self) -> list[str]:
        return ["dead", "requeue", *(["--all"] if self.all else []), "--", *self.groups]


Body = Drain | Restart | Scale | Cordon | Uncordon | Set | Requeue
ACTIONS: Final[Mapping[str, type[Any]]] = {
    "drain": Drain,
    "restart": Restart,
    "scale": Scale,
    "cordon": Cordon,
    "uncordon": Uncordon,
    "set": Set,
    "requeue": Requeue,
}
"""Body of each action, by name."""


class Outcome(NamedTuple):
    """End of an action: exit code and lines of its command."""

    code: int
    lines: list[str]


def words_of(name: str, body: bytes) -> list[str]:
    """Return the words of a command.

    Raises:
        UsageError: The body is not that of the action.
    """
    try:
        asked: Body = msgspec.json.decode(body, type=ACTIONS[name])
        words = asked.words()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{name}: {_unencodable(body) or error}") from None
    if any("\0" in word for word in words):
        raise UsageError(f"{name}: a text must have no NUL character")
    return words


def _unencodable(body: bytes) -> str:
    """Return which key of a body has a lone surrogate: a decoder says only that its text is cut off."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    for key, value in asked.items() if isinstance(asked, dict) else ():
        parts = value if isinstance(value, list) else (value,)
        parts = (*value, *value.values()) if isinstance(value, dict) else parts
        for text in (key, *parts):
            if isinstance(text, str) and _SURROGATE.search(text):
                return f"{printable(key[:40])}: must be text that UTF-8 can encode (got {text[:40]!a})"
    return ""


def command_of(root: Path, words: list[str]) -> tuple[str, ...]:
    """Return the command line of an action on a run."""
    at = words.index("--")
    options = [f"--run-dir={root}", "--json"]
    return python_command(sys.executable, COMMAND_LINE, *words[:at], *options, *words[at:])


class Actions:
    """Carries out one action at a time.

    Args:
        root: The run directory.
        command: Makes the command line.
        patience_s: Longest time of an action.
    """

    def __init__(
        self,
        root: Path,
        command: Callable[[Path, list[str]], tuple[str, ...]] = command_of,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._root = root
        self._command = command
        self._patience_s = patience_s
        self.is_busy = False

    async def carry_out(self, words: list[str]) -> Outcome:
        """Run a command, and return its end.

        Raises:
            TimeoutError: It did not end in time; it was killed.
        """
        self.is_busy = True
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(self._root, words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=OUTPUT_LIMIT_BYTES,
            )
            try:
                async with asyncio.timeout(self._patience_s):
                    output, errors = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        finally:
            self.is_busy = False
        return Outcome(process.returncode or 0, _lines(output, errors))


def _lines(output: bytes, errors: bytes) -> list[str]:
    """Return the lines of a command: `--json` prints one object with them; its errors are text."""
    try:
        told = msgspec.json.decode(output, type=dict[str, Any]).get("text", [])
        lines = [str(line) for line in told] if isinstance(told, list) else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        lines = output[:OUTPUT_LIMIT_BYTES].decode(errors="replace").splitlines()
    return [*lines, *errors[-OUTPUT_LIMIT_BYTES:].decode(errors="replace").splitlines()][:LINES_LIMIT]
