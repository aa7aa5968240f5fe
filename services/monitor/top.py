"""The live view: the board drawn four times a second, for `rolloutmq top` and for `rolloutmq up` in a terminal.

Drawing happens where the caller's loop says so; there is no thread of its own. On a terminal the picture replaces
itself in place; elsewhere plain progress lines are printed instead.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.live import Live

from rolloutmq.bus import codec, topics
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.telemetry import Event
from rolloutmq.services.monitor import view
from rolloutmq.services.monitor.board import Board
from rolloutmq.services.monitor.crew import supervision_of
from rolloutmq.services.monitor.exits import FAILED, USAGE, complain, reader_may_leave
from rolloutmq.services.monitor.life import Fate, Life, fate_of
from rolloutmq.services.monitor.progress import Progress
from rolloutmq.services.monitor.sending import unsent
from rolloutmq.services.telemetry.feed import Feed

logger = logging.getLogger(__name__)

REFRESH_S: Final = 0.25
LOOK_S: Final = 1.0
"""How often files of the run are looked at."""
GONE_S: Final = 10.0
"""How long a run without a launcher may be without a broker: one that is started by hand may be about to come."""
SHOWN: Final = (topics.PRESSURE, topics.STEP, topics.TELEMETRY)
"""Topics that a view needs."""


class LiveView:
    """A picture of the run that keeps itself in one place of the terminal.

    Use as a context manager; `feed` it with events and call `refresh` a few times a second. What is printed to standard
    output meanwhile appears above it. Leaving it leaves the last picture, unless it had the whole screen.

    Args:
        board: What is shown.
        console: Where; standard output by default.
        screen: Take the whole screen and give it back at the end.
        now: The clock.
    """

    def __init__(
        self,
        board: Board,
        console: Console | None = None,
        *,
        screen: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = board
        self._console = console or Console(highlight=False)
        self._now = now
        self._live = Live(
            console=self._console,
            screen=screen,
            auto_refresh=False,
            get_renderable=self.render,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._live.stop()

    def feed(self, topic: bytes, event: Event) -> None:
        """Take one event of the run."""
        if topic.startswith(SHOWN):
            self.board.feed(event, self._now())

    def render(self) -> RenderableType:
        """Return the picture of this moment, fit for the terminal as it is now."""
        size = self._console.size
        # One line less than there are: writing in the last one would scroll.
        return view.frame(self.board, self._now(), size.width, size.height - 1)

    def refresh(self) -> None:
        """Draw it."""
        self._live.refresh()


class PlainView:
    """The same for what is no terminal: a line of progress when one is due."""

    def __init__(
        self, board: Board, write: Callable[[str], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.board = board
        self._progress = Progress(board)
        self._write = write
        self._now = now
        self._noticed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Nothing to put away."""

    def feed(self, topic: bytes, event: Event) -> None:
        """Take one event of the run."""
        if topic.startswith(SHOWN):
            self.board.feed(event, self._now())

    def refresh(self) -> None:
        """Print a line if one is due, and once what a person should know."""
        if self.board.notice != self._noticed:
            self._noticed = self.board.notice
            if self._noticed:
                self._write(self._noticed + "\n")
        if (line := self._progress.line(self._now())) is not None:
            self._write(line + "\n")


def is_terminal(console: Console) -> bool:
    """Whether a picture can be kept in place on this console."""
    return console.is_terminal and not console.is_dumb_terminal


def make_view(config: RunConfig, *, screen: bool = False, plain: bool = False) -> LiveView | PlainView:
    """Return the view that fits standard output.

    Args:
        config: Of the run.
        screen: A live view takes the whole screen.
        plain: Lines, even on a terminal.
    """
    console = Console(highlight=False)
    if not plain and is_terminal(console):
        return LiveView(Board.of(config), console, screen=screen)

    def write(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    return PlainView(Board.of(config), write)


async def watch(layout: RunLayout, live: LiveView | PlainView, until: asyncio.Event) -> None:
    """Feed and refresh a view that was entered, until `until` is set. May start before the broker does.

    A view that fails, because its terminal went for example, is logged and ends; the run that it shows goes on.
    """
    try:
        await _watch(layout, live, until)
    except Exception:
        logger.exception("view failed")
        await until.wait()


async def _watch(layout: RunLayout, live: LiveView | PlainView, until: asyncio.Event) -> None:
    refresh_at = look_at = time.monotonic()
    async with Feed(layout, SHOWN) as feed:
        while not until.is_set():
            if time.monotonic() >= look_at:
                live.board.supervision = supervision_of(layout)
                live.board.unsent = unsent(layout)
                look_at = time.monotonic() + LOOK_S
            event = await feed.next(max(0.0, refresh_at - time.monotonic()))
            if event is not None:
                # What cannot be decoded is another version's: not shown, and not our end.
                with contextlib.suppress(WireError):
                    live.feed(event[0], codec.decode_event(event[1]))
            if time.monotonic() >= refresh_at:
                live.refresh()
                refresh_at = time.monotonic() + REFRESH_S
    live.refresh()


def top(where: Path) -> int:
    """Show a run until Ctrl-C, or until it has ended; returns the exit code. Blocks."""
    try:
        config, layout = load_run(where)
    except RolloutMQError as error:
        return complain(str(error), USAGE)
    ended: Fate | None = None
    with contextlib.suppress(KeyboardInterrupt), make_view(config, screen=True) as live:
        ended = asyncio.run(_until_over(layout, live))
    if ended is None:
        return 0
    with reader_may_leave():
        sys.stdout.write(ended.say(layout) + "\n")
    return 0 if ended.life is Life.ENDED else FAILED


async def _until_over(layout: RunLayout, live: LiveView | PlainView) -> Fate:
    """Show a run until it is over, and return how it ended."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(layout, live, over), name="view")
        fate = await _over(layout, live.board)
        over.set()
    return fate


async def _over(layout: RunLayout, board: Board) -> Fate:
    """Wait until nothing of a run can be watched any more. What is heard counts more than what the directory says."""
    absent_at = time.monotonic()
    while True:
        fate = fate_of(layout)
        board.notice = fate.say(layout) if fate.life is Life.DEAD and not fate.elsewhere else ""
        now = time.monotonic()
        if fate.life is not Life.ABSENT:
            absent_at = now
        is_quiet = board.pressure is None or board.silent_s(now) > 0.0
        is_left = fate.life is Life.ABSENT and now - absent_at > GONE_S
        is_dead = fate.life is Life.DEAD and not fate.broker
        if fate.life is Life.ENDED or ((is_left or is_dead) and is_quiet):
            return fate
        await asyncio.sleep(LOOK_S)
