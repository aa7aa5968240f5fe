"""The session of an operator with the live view: keys of the terminal to the panel, its orders to commands.

Every key is drawn at once, and all keys that have arrived together once. An order runs beside the view, and its answer
comes into the status line. The session ends by `q`, or when its terminal is gone.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self

from rolloutmq.services.monitor.live.orders import Order, carry_out
from rolloutmq.services.monitor.live.panel import Panel
from rolloutmq.services.monitor.live.terminal import Terminal

KEYS_AT_ONCE: Final = 1024
"""Most keys that are taken together: a pasted text is cut."""


class Drawn(Protocol):
    """The view that the session is drawn by."""

    def refresh(self) -> None:
        """Draw the current frame."""

    def suspend(self) -> None:
        """Give the screen back to the shell."""

    def resume(self) -> None:
        """Draw again, also after a change of the size."""


class Session:
    """Keys and orders of one operator, within a running event loop. Use it as an async context manager.

    Args:
        live: The view.
        panel: State of the operator's part.
        program: Command line of `rolloutmq`, without arguments.
        run_dir: Run directory.
        now: Clock.
    """

    def __init__(
        self,
        live: Drawn,
        panel: Panel,
        program: Sequence[str],
        run_dir: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._panel = panel
        self._program = program
        self._run_dir = run_dir
        self._now = now
        self._order: asyncio.Task[None] | None = None
        self.left = asyncio.Event()
        """The operator has left, or the terminal is gone."""
        self.signal = 0
        """Signal that ended the session; 0 if none did."""

    async def __aenter__(self) -> Self:
        self._terminal = Terminal(self._live, self.press, self._ended).__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._terminal.__exit__(kind, error, at)
        if self._order is not None:
            self._order.cancel()
            with suppress(asyncio.CancelledError):
                await self._order

    def press(self, keys: Sequence[str]) -> None:
        """Take keys that arrived together, and draw."""
        for key in keys[:KEYS_AT_ONCE]:
            order = self._panel.press(key, self._now())
            if order is not None:
                self._order = asyncio.create_task(self._carry_out(order), name="order")
            if self._panel.is_over:
                self.left.set()
                return
        self._live.refresh()

    async def _carry_out(self, order: Order) -> None:
        answer = await carry_out(self._program, self._run_dir, order)
        self._panel.take(order, answer, self._now())
        self._live.refresh()

    def _ended(self, number: int) -> None:
        self.signal = number
        self.left.set()
