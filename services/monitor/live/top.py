"""The live view: the run state drawn four times a second, for `rolloutmq top` and for `rolloutmq up` in a terminal.

The view draws in the caller's loop, without a thread of its own. On a terminal it redraws in place; elsewhere it
prints progress lines.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.live import Live

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.rundir import read_run
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable_lines
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.monitor.live import view
from rolloutmq.services.monitor.live.progress import Progress
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.liveness import Fate, RunLiveness, fate_of
from rolloutmq.services.monitor.report.evaluation import Evaluations
from rolloutmq.services.monitor.report.history import read_history
from rolloutmq.services.monitor.status import record_view, waits
from rolloutmq.services.monitor.status.orchestrator_view import problem
from rolloutmq.services.monitor.status.worker_view import still_given_up, supervision_of, with_hangs
from rolloutmq.services.monitor.text.exit_codes import (
    FAILED,
    USAGE,
    complain,
    reader_may_leave,
    silence_output,
)

logger = logging.getLogger(__name__)

REFRESH_S: Final = 0.25
LOOK_S: Final = 1.0
"""Interval between two reads of the run's files."""
GONE_S: Final = 10.0
"""Time without launcher and broker after which a run is over; a broker started by hand may still be coming up."""
SHOWN: Final = (topics.PRESSURE, topics.STEP, topics.TELEMETRY)
"""Topics of a view."""


class LiveView:
    """Run state drawn in place on a terminal.

    Use it as a context manager; `feed` it with events and call `refresh` a few times a second. Standard output appears
    above the view. On exit the last frame stays on the terminal, unless the view used the whole screen.

    Args:
        board: State to draw.
        console: Console to draw on; standard output by default.
        screen: Use the whole screen, and restore it on exit.
        now: Clock.
    """

    def __init__(
        self,
        board: RunState,
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
        """Apply one event of the run."""
        if topic.startswith(SHOWN):
            self.board.feed(event, self._now())

    def render(self) -> RenderableType:
        """Return the current frame, sized for the terminal."""
        size = self._console.size
        # One line less than the height: writing into the last one would scroll.
        return view.frame(self.board, self._now(), size.width, size.height - 1)

    def refresh(self) -> None:
        """Draw the current frame."""
        self._live.refresh()


class PlainView:
    """Progress lines, for output that is not a terminal; lines of JSON for a program."""

    def __init__(
        self,
        board: RunState,
        write: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
        *,
        as_json: bool = False,
    ) -> None:
        self.board = board
        self._progress = Progress(board, as_json=as_json)
        self._write = write
        self._now = now
        self._noticed = ""
        self._given_up: Mapping[str, str] = {}
        self._is_unheard = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Do nothing; there is nothing to restore."""

    def feed(self, topic: bytes, event: Event) -> None:
        """Apply one event of the run."""
        if topic.startswith(SHOWN):
            self.board.feed(event, self._now())

    def refresh(self) -> None:
        """Print a line if one is due, a new notice once, and whether the orchestrator is heard at each change.

        An environment without a worker is a notice, once until it works again.
        """
        if self.board.notice != self._noticed:
            self._noticed = self.board.notice
            if self._noticed:
                self._write(self._progress.notice(self._noticed) + "\n")
        if bool(self.board.orchestrator) != self._is_unheard:
            self._is_unheard = not self._is_unheard
            heard = f"orchestrator {self.board.orchestrator or 'is heard again'}"
            self._write(self._progress.notice(heard) + "\n")
        for env in self.board.given_up.keys() - self._given_up.keys():
            self._write(self._progress.notice(self.board.given_up[env]) + "\n")
        self._given_up = self.board.given_up
        if (line := self._progress.line(self._now())) is not None:
            self._write(line + "\n")


def is_terminal(console: Console) -> bool:
    """Return whether this console supports redrawing in place."""
    return console.is_terminal and not console.is_dumb_terminal


def make_view(
    config: RunConfig, *, screen: bool = False, plain: bool = False, as_json: bool = False
) -> LiveView | PlainView:
    """Return the view that fits standard output.

    Args:
        config: Configuration of the run.
        screen: Let a live view use the whole screen.
        plain: Print lines even on a terminal.
        as_json: Print lines of JSON, also there.
    """
    console = Console(highlight=False)
    if not (plain or as_json) and is_terminal(console):
        return LiveView(RunState.of(config), console, screen=screen)

    def write(line: str) -> None:
        try:
            sys.stdout.write(printable_lines(line))
            sys.stdout.flush()
        except OSError as error:  # a full disk, or a reader that left: the run goes on without its lines
            silence_output()
            logger.warning("progress lines are dropped: standard output cannot be written error=%s", error)

    return PlainView(RunState.of(config), write, as_json=as_json)


async def watch(layout: RunLayout, live: LiveView | PlainView, until: asyncio.Event) -> None:
    """Feed and refresh an entered view until `until` is set. May start before the broker does.

    If the view fails, for example because its terminal is gone, it is logged and ends; the run continues.
    """
    try:
        await _watch(layout, live, until)
    except Exception:
        logger.exception("view failed")
        await until.wait()


async def _watch(layout: RunLayout, live: LiveView | PlainView, until: asyncio.Event) -> None:
    async with EventFeed(layout, SHOWN) as feed:
        # Subscribed first: what comes meanwhile is applied after the history, and known steps replace themselves.
        live.board.recall(await asyncio.to_thread(read_history, layout), time.monotonic())
        refresh_at = look_at = time.monotonic()
        while not until.is_set():
            if time.monotonic() >= look_at:
                known = live.board.supervision = supervision_of(layout)
                now, wall = time.monotonic(), time.time()
                live.board.orchestrator = problem(layout, known, now, wall, live.board.decided_at)
                live.board.record = record_view.problem(layout, now, wall)
                live.board.outside = waits.outside(layout)
                live.board.unserved = waits.unserved(layout)
                crew = live.board.crew(now)
                live.board.hangs = {row.worker: row.hang for row in with_hangs(crew, layout)}
                live.board.given_up = still_given_up(live.board.given_up, crew, layout)
                live.board.left_out = Evaluations.read(layout).left_out.text()
                look_at = time.monotonic() + LOOK_S
            event = await feed.next(max(0.0, refresh_at - time.monotonic()))
            if event is not None:
                # A message that does not decode is from another version: skip it.
                with contextlib.suppress(WireError):
                    live.feed(event[0], codec.decode_event(event[1]))
            if time.monotonic() >= refresh_at:
                live.refresh()
                refresh_at = time.monotonic() + REFRESH_S
    live.refresh()


def top(where: Path) -> int:
    """Show a run until Ctrl-C or its end; return the exit code. Blocks."""
    try:
        config, layout = read_run(where)
    except RolloutMQError as error:
        return complain(str(error), USAGE)
    if (found := fate_of(layout)).life is RunLiveness.ENDED and not found.broker:
        with reader_may_leave():
            sys.stdout.write(found.say(layout) + "\n")
        return 0
    ended: Fate | None = None
    with contextlib.suppress(KeyboardInterrupt), make_view(config, screen=True) as live:
        live.board.is_dead = found.life is RunLiveness.DEAD and not found.elsewhere
        ended = asyncio.run(_until_over(layout, live))
    if ended is None:
        return 0
    with reader_may_leave():
        sys.stdout.write(ended.say(layout) + "\n")
    return 0 if ended.life is RunLiveness.ENDED and not live.board.is_dead else FAILED


async def _until_over(layout: RunLayout, live: LiveView | PlainView) -> Fate:
    """Show a run until it is over, and return its fate."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(layout, live, over), name="view")
        fate = await _over(layout, live.board)
        over.set()
    return fate


async def _over(layout: RunLayout, board: RunState) -> Fate:
    """Wait until the run has neither launcher nor broker. Received events outweigh the files of the run directory."""
    absent_at = time.monotonic()
    while True:
        fate = fate_of(layout)
        is_killed = fate.life is RunLiveness.DEAD and not fate.elsewhere
        board.notice = fate.say(layout) if is_killed else ""
        # What `down` has put away since did not end in order; a new launcher starts over.
        board.is_dead = is_killed or (board.is_dead and fate.life is not RunLiveness.LIVING)
        now = time.monotonic()
        if fate.life is not RunLiveness.ABSENT and not fate.by_hand:
            absent_at = now
        is_quiet = board.pressure is None or board.silent_s(now) > 0.0
        is_left = (fate.life is RunLiveness.ABSENT or fate.by_hand) and now - absent_at > GONE_S
        is_dead = fate.life is RunLiveness.DEAD and not fate.broker
        has_ended = fate.life is RunLiveness.ENDED and not (fate.by_hand and board.pressure is not None)
        if has_ended or ((is_left or is_dead) and is_quiet):
            return fate
        await asyncio.sleep(LOOK_S)
