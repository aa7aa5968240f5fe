"""The terminal of a live view: its keys, its size, its stops, and its state afterwards.

Keys arrive without Enter and without an echo; Ctrl-C and Ctrl-Z stay signals. Whatever ends the block, the terminal has
its own settings again. A view that Ctrl-Z stops gives the terminal back first, and takes it again when it continues.
"""

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rolloutmq.services.monitor.live.keys import ESCAPE_S, KeyDecoder

READ_BYTES: Final = 4096
_LOCAL_FLAGS: Final = 3
_CONTROL_CHARACTERS: Final = 6


class Screen(Protocol):
    """Drawing on the terminal, which a stop interrupts."""

    def suspend(self) -> None:
        """Give the screen back to the shell."""

    def resume(self) -> None:
        """Draw again."""


class Terminal:
    """Keys and signals of a terminal, within a running event loop. Use it as a context manager.

    Args:
        screen: What is drawn.
        press: Called with each key.
        ended: Called once when the terminal is gone, or the process is asked to end by SIGTERM or SIGHUP.
        fd: Descriptor of the keyboard.
    """

    def __init__(
        self,
        screen: Screen,
        press: Callable[[list[str]], None],
        ended: Callable[[int], None],
        fd: int | None = None,
    ) -> None:
        self._screen = screen
        self._press = press
        self._ended = ended
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._keys = KeyDecoder()
        self._flush: asyncio.TimerHandle | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._before = termios.tcgetattr(self._fd)
        self._set_up()
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._loop.add_signal_handler(signal.SIGCONT, self._continue)
        self._loop.add_signal_handler(signal.SIGWINCH, self._screen.resume)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._ended, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self._loop.remove_reader(self._fd)
        for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
            self._loop.remove_signal_handler(number)
        self._give_back()

    def _set_up(self) -> None:
        """Let keys arrive one by one and unseen."""
        wanted = termios.tcgetattr(self._fd)
        wanted[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
        wanted[_CONTROL_CHARACTERS][termios.VMIN] = 1
        wanted[_CONTROL_CHARACTERS][termios.VTIME] = 0
        termios.tcsetattr(self._fd, termios.TCSANOW, wanted)

    def _give_back(self) -> None:
        """Restore the settings; quietly, since the terminal may be gone."""
        try:
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
        except termios.error:
            return

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            self._ended(signal.SIGHUP)
            return
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        keys = self._keys.feed(data)
        if self._keys.is_waiting:
            self._flush = self._loop.call_later(ESCAPE_S, self._flush_escape)
        if keys:
            self._press(keys)

    def _flush_escape(self) -> None:
        self._flush = None
        if keys := self._keys.flush():
            self._press(keys)

    def _stop(self) -> None:
        """Stop as the shell expects it, and continue here."""
        self._screen.suspend()
        self._give_back()
        # The default action, not SIGSTOP: it stops no process without a shell that could continue it.
        self._loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        self._loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._continue()

    def _continue(self) -> None:
        self._set_up()
        self._screen.resume()
