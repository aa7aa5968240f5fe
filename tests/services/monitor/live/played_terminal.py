"""A terminal of a test: a command in a real pseudo-terminal, and the screen that its output draws."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

LIMIT_S: Final = 60.0
"""Longest wait for something to appear, on a loaded machine."""
HAS_TERMINAL: Final = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Takes the terminal of standard input for its session, then becomes the command."""
SEQUENCE: Final = re.compile(r"\x1b(?:\[([?0-9;]*)([@-~])|[\]][^\x07]*\x07|[=>78MH])")
COLOUR: Final = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")
"""A style with a colour of the text or of the ground."""


class Screen:
    """Cells of a terminal: what a person sees. Knows the sequences that the view uses."""

    def __init__(self, width: int, height: int) -> None:
        self._main: list[list[str]] = []
        self.is_alternate = False
        self.is_cursor_shown = True
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        """Change the size; the cells are empty then, since the program draws all of them again."""
        self.width, self.height = width, height
        self.cells = [[" "] * width for _ in range(height)]
        self._x = self._y = 0

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]

    def feed(self, text: str) -> str:
        """Draw; return the begin of a sequence that is not whole yet."""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = SEQUENCE.match(text, at)
                if found is None:
                    if len(text) - at < 16:
                        return text[at:]
                    raise AssertionError(f"unknown sequence {text[at : at + 16]!r}")
                self._obey(found[1] or "", found[2] or "")
                at = found.end()
            else:
                self._draw(text[at])
                at += 1
        return ""

    def _obey(self, arguments: str, name: str) -> None:
        count = int(arguments) if arguments.isdecimal() else 1
        match name:
            case "H":
                row, _, column = arguments.partition(";")
                self._y, self._x = int(row or 1) - 1, int(column or 1) - 1
            case "A":
                self._y = max(0, self._y - count)
            case "J" if arguments == "2":
                self.cells = [[" "] * self.width for _ in range(self.height)]
            case "K":
                self.cells[self._y] = [" "] * self.width
            case "h" | "l" if arguments == "?1049":
                self._switch(name == "h")
            case "h" | "l" if arguments == "?25":
                self.is_cursor_shown = name == "h"

    def _switch(self, alternate: bool) -> None:
        if alternate and not self.is_alternate:
            self._main = self.cells
        if alternate:
            self.cells = [[" "] * self.width for _ in range(self.height)]
        elif self.is_alternate and len(self._main) == self.height:
            self.cells = self._main
        self.is_alternate = alternate

    def _draw(self, char: str) -> None:
        if char == "\r":
            self._x = 0
        elif char == "\n":
            self._down()
        elif char == "\b":
            self._x = max(0, self._x - 1)
        elif char >= " ":
            if self._x >= self.width:
                self._x = 0
                self._down()
            self.cells[self._y][self._x] = char
            self._x += 1

    def _down(self) -> None:
        if self._y + 1 < self.height:
            self._y += 1
        else:
            self.cells = [*self.cells[1:], [" "] * self.width]


class PlayedTerminal:
    """A command in a terminal of its own, with keys, sizes and signals. Use it as a context manager."""

    def __init__(
        self, command: Sequence[str], width: int = 80, height: int = 24, env: Mapping[str, str] | None = None
    ) -> None:
        self._command = [sys.executable, "-c", HAS_TERMINAL, *command]
        own = {
            name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "LINES"}
        }
        self._env = {**own, "TERM": "xterm-256color", **(env or {})}
        self.screen = Screen(width, height)
        self.output = ""
        self._rest = ""
        self._bytes = b""

    def __enter__(self) -> Self:
        self._fd, theirs = pty.openpty()
        self._set_size(self.screen.width, self.screen.height)
        self.before = termios.tcgetattr(self._fd)
        self.process = subprocess.Popen(
            self._command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=self._env
        )
        os.close(theirs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        os.close(self._fd)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def hang_up(self) -> None:
        """Take the terminal away, as a lost connection does."""
        os.close(self._fd)
        self._fd = os.open(os.devnull, os.O_RDONLY)

    def modes(self) -> list[Any]:
        """Return the settings of the terminal."""
        return termios.tcgetattr(self._fd)

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window; the kernel sends SIGWINCH."""
        self.screen.resize(width, height)
        self._set_size(width, height)

    def _set_size(self, width: int, height: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._fd, keys.encode())

    def until(self, holds: Callable[[list[str]], bool], what: str) -> list[str]:
        """Wait until the lines of the screen fulfil a condition; return them."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(lines := self.screen.lines()):
            assert time.monotonic() < deadline, f"no {what}:\n" + "\n".join(lines)
            if not self._read(0.2) and self.process.poll() is not None and not self._read(0.0):
                lines = self.screen.lines()
                assert holds(lines), f"ended without {what}:\n" + "\n".join(lines)
        return lines

    def shows(self, text: str) -> list[str]:
        """Wait until the screen has a text; return its lines."""
        return self.until(lambda lines: any(text in line for line in lines), repr(text))

    def ended(self) -> int:
        """Wait until the command has ended; return its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "does not end:\n" + "\n".join(self.screen.lines())
            self._read(0.1)
        while self._read(0.0):
            pass
        return self.process.wait()

    def _read(self, timeout_s: float) -> bool:
        """Draw what has come; return whether something has."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):  # the command has ended
            data = os.read(self._fd, 1 << 16)
        if not data:
            return False
        text = (self._bytes + data).decode(errors="ignore")
        # A character may be cut: its bytes are drawn with those that follow.
        self._bytes = (self._bytes + data)[len(text.encode()) :]
        self.output += text
        self._rest = self.screen.feed(self._rest + text)
        return True
