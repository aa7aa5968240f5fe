"""The live view: the run state drawn four times a second, for `rolloutmq top` and for `rolloutmq up` in a terminal.

The view draws in the caller's loop, without a thread of its own. On a terminal it redraws in place; elsewhere it
prints progress lines. With a keyboard, `rolloutmq top` has a table with a selection, and takes orders.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.rundir import read_lives, read_run
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import OutputFailedError, RolloutMQError, WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable_lines
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.monitor.live import view
from rolloutmq.services.monitor.live.listings import TableName
from rolloutmq.services.monitor.live.panel import Panel
from rolloutmq.services.monitor.live.progress import Progress
from rolloutmq.services.monitor.live.recent import fill, recent_groups
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.live.session import Session
from rolloutmq.services.monitor.live.snapshot import snapshot
from rolloutmq.services.monitor.liveness import Fate, RunLiveness, fate_of
from rolloutmq.services.monitor.report.evaluation import Evaluations
from rolloutmq.services.monitor.report.history import read_history
from rolloutmq.services.monitor.status import record_view, waits
from rolloutmq.services.monitor.status.orchestrator_view import problem
from rolloutmq.services.monitor.status.status import heard
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
LINE_S: Final = 1.0
"""Interval between two lines of JSON."""
ALL_LINES: Final = 100_000
"""Height of a picture that shows every worker: the orchestrator allows fewer."""
SIGNALLED: Final = 128
"""Exit code of a process that a signal ended, less the number of the signal."""
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
        panel: The operator's part; None without a keyboard.
    """

    def __init__(
        self,
        board: RunState,
        console: Console | None = None,
        *,
        screen: bool = False,
        now: Callable[[], float] = time.monotonic,
        panel: Panel | None = None,
    ) -> None:
        self.board = board
        self.panel = panel
        self._frozen: tuple[RunState, float] | None = None
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
        if self.panel is None or not self.panel.is_paused:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self.board.frozen(), self._now()
        board, now = self._frozen or (self.board, self._now())
        # One line less than the height: writing into the last one would scroll.
        return view.frame(board, now, size.width, size.height - 1, self.panel)

    def refresh(self) -> None:
        """Draw the current frame, unless the screen is given back."""
        if self._live.is_started:
            self._live.refresh()

    def suspend(self) -> None:
        """Give the screen back to the shell."""
        self._live.stop()

    def resume(self) -> None:
        """Draw again, also after a change of the size."""
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)


class _Lines:
    """A view that prints lines, and changes nothing of the terminal."""

    panel: Panel | None = None

    def __init__(
        self, board: RunState, write: Callable[[str], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.board = board
        self._write = write
        self._now = now

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


class PlainView(_Lines):
    """Progress lines, for output that is not a terminal; lines of JSON for a program."""

    def __init__(
        self,
        board: RunState,
        write: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
        *,
        as_json: bool = False,
    ) -> None:
        super().__init__(board, write, now)
        self._progress = Progress(board, as_json=as_json)
        self._noticed = ""
        self._given_up: Mapping[str, str] = {}
        self._is_unheard = False

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


class StateLines(_Lines):
    """The whole state as a line of JSON, once a second."""

    def __init__(
        self, board: RunState, write: Callable[[str], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(board, write, now)
        self._due_at = float("-inf")

    def refresh(self) -> None:
        """Print a line if one is due; the first once the broker is heard."""
        now = self._now()
        if now >= self._due_at and self.board.pressure is not None:
            self._due_at = now + LINE_S
            self._write(json_line(snapshot(self.board, now, time.time())))


View = LiveView | PlainView | StateLines


def json_line(fields: Mapping[str, Any]) -> str:
    """Return a line of JSON; figures that are no numbers are null."""
    return printable_lines(msgspec.json.encode(fields).decode()) + "\n"


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
    return PlainView(RunState.of(config), _write, as_json=as_json)


def _write(line: str) -> None:
    """Write a line of `up`, whose run goes on without a reader, and on a full disk."""
    try:
        sys.stdout.write(printable_lines(line))
        sys.stdout.flush()
    except OSError as error:
        silence_output()
        logger.warning("progress lines are dropped: standard output cannot be written error=%s", error)


class _Output:
    """Standard output of `top`, which is of no use once nothing can be written to it."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()
        self._error: OSError | None = None

    def write(self, line: str) -> None:
        """Write a line; nothing more after the first failure."""
        if self._error is not None:
            return
        try:
            sys.stdout.write(printable_lines(line))
            sys.stdout.flush()
        except OSError as error:
            silence_output()
            self._error = error
            self.failed.set()

    def check(self) -> None:
        """Raise OutputFailedError if writing failed; a reader that left, as after `| head`, is no failure."""
        if self._error is not None and not isinstance(self._error, BrokenPipeError):
            raise OutputFailedError(str(self._error)) from self._error


async def watch(layout: RunLayout, live: View, until: asyncio.Event) -> None:
    """Feed and refresh an entered view until `until` is set. May start before the broker does.

    If the view fails, for example because its terminal is gone, it is logged and ends; the run continues.
    """
    try:
        await _watch(layout, live, until)
    except Exception:
        logger.exception("view failed")
        await until.wait()


async def _watch(layout: RunLayout, live: View, until: asyncio.Event) -> None:
    async with EventFeed(layout, SHOWN) as feed:
        # Subscribed first: what comes meanwhile is applied after the history, and known steps replace themselves.
        live.board.recall(await asyncio.to_thread(read_history, layout), time.monotonic())
        refresh_at = look_at = time.monotonic()
        while not until.is_set():
            if time.monotonic() >= look_at:
                _look(layout, live.board)
                if live.panel is not None and live.panel.table is TableName.GROUPS:
                    live.board.groups = recent_groups(layout)
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


def _look(layout: RunLayout, board: RunState) -> None:
    """Read what only files of the run say."""
    known = board.supervision = supervision_of(layout)
    now, wall = time.monotonic(), time.time()
    board.orchestrator = problem(layout, known, now, wall, board.decided_at)
    board.record = record_view.problem(layout, now, wall)
    board.outside = waits.outside(layout)
    board.unserved = waits.unserved(layout)
    crew = board.crew(now)
    board.hangs = {row.worker: row.hang for row in with_hangs(crew, layout) if row.hang}
    board.given_up = still_given_up(board.given_up, crew, layout)
    board.left_out = Evaluations.read(layout).left_out.text()


class Shown(NamedTuple):
    """How `rolloutmq top` shows a run.

    Attributes:
        once: Show the present state and end.
        as_json: Lines of JSON.
        no_color: No colours, also without NO_COLOR.
        program: Command line of `rolloutmq`, by which the keys give orders; empty for a view without keys.
    """

    once: bool = False
    as_json: bool = False
    no_color: bool = False
    program: Sequence[str] = ()


def top(where: Path, how: Shown = Shown()) -> int:
    """Show a run until Ctrl-C, `q` or its end; return the exit code. Blocks, with `once` for at most four seconds."""
    try:
        config, layout = read_run(where)
    except RolloutMQError as error:
        return complain(str(error), USAGE)
    found = fate_of(layout)
    if found.life is RunLiveness.ENDED and not found.broker:
        _tell_end(found, layout, how)
        return 0
    if how.once:
        return _once(config, layout, found, how)
    output = _Output()
    live = _view(config, how, output.write)
    ended: Fate | int | None = None
    with contextlib.suppress(KeyboardInterrupt), live:
        live.board.is_dead = found.life is RunLiveness.DEAD and not found.elsewhere
        ended = asyncio.run(_until_over(layout, live, how.program, output.failed))
    output.check()
    if not isinstance(ended, Fate):
        return SIGNALLED + ended if ended else 0
    _tell_end(ended, layout, how)
    return 0 if ended.life is RunLiveness.ENDED and not live.board.is_dead else FAILED


def _tell_end(fate: Fate, layout: RunLayout, how: Shown) -> None:
    """Print how a run ended."""
    text = fate.say(layout)
    if how.as_json:
        text = json_line({"event": "end", "life": fate.life, "ended": fate.told, "text": text}).rstrip("\n")
    with reader_may_leave():
        sys.stdout.write(printable_lines(text) + "\n")


def _view(config: RunConfig, how: Shown, write: Callable[[str], object]) -> View:
    """Return the view that fits standard output and the keyboard."""
    if how.as_json:
        return StateLines(RunState.of(config), write)
    console = _console(how)
    if not is_terminal(console):
        return PlainView(RunState.of(config), write)
    has_keys = bool(how.program) and sys.stdin.isatty()
    return LiveView(RunState.of(config), console, screen=True, panel=Panel() if has_keys else None)


def _console(how: Shown) -> Console:
    return Console(highlight=False, no_color=True if how.no_color else None)


def _once(config: RunConfig, layout: RunLayout, fate: Fate, how: Shown) -> int:
    """Print the present state of a run; return the exit code. FAILED if no broker replies."""
    try:
        reply = heard(layout, fate)
    except RolloutMQError as error:
        return complain(str(error), FAILED)
    if reply is None:
        return complain(fate.say(layout), FAILED)
    board, now, wall = RunState.of(config), time.monotonic(), time.time()
    fill(board, layout, reply, now, wall)
    _look(layout, board)
    board.is_dead = fate.life is RunLiveness.DEAD and not fate.elsewhere
    board.notice = fate.say(layout) if board.is_dead else ""
    with reader_may_leave():
        if how.as_json:
            sys.stdout.write(json_line(snapshot(board, now, wall)))
        else:
            console = _console(how)
            console.print(view.frame(board, now, console.width, ALL_LINES))
    return 0


async def _until_over(
    layout: RunLayout, live: View, program: Sequence[str] = (), output_failed: asyncio.Event | None = None
) -> Fate | int:
    """Show a run until it is over, and return its fate; the signal, or 0, if the operator or reader leaves before."""
    over = asyncio.Event()
    session: Session | None = None
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(live, LiveView) and live.panel is not None:
            session = await stack.enter_async_context(Session(live, live.panel, program, str(layout.root)))
        watching = asyncio.create_task(watch(layout, live, over), name="view")
        ending = asyncio.create_task(_over(layout, live.board), name="end")
        first: list[asyncio.Task[Any]] = [ending]
        for name, left in (
            ("left", None if session is None else session.left),
            ("output failed", output_failed),
        ):
            if left is not None:
                first.append(asyncio.create_task(left.wait(), name=name))
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.set()
            for task in first:
                task.cancel()
        await watching
        if ending.done() and not ending.cancelled():
            return ending.result()
    return 0 if session is None else session.signal


async def _over(layout: RunLayout, board: RunState) -> Fate:
    """Wait until the run has neither launcher nor broker. Received events outweigh the files of the run directory.

    A broker that was started by hand and has recorded its end is over at once; one that was killed is told, and may be
    started again meanwhile.
    """
    absent_at = time.monotonic()
    while True:
        fate, now = fate_of(layout), time.monotonic()
        is_killed = fate.life is RunLiveness.DEAD and not fate.elsewhere
        is_absent = fate.life is RunLiveness.ABSENT
        is_quiet = board.pressure is None or board.silent_s(now) > 0.0
        is_gone = is_absent and is_quiet and endpoints_of(layout) is not None
        board.notice = fate.say(layout) if is_killed or is_gone else ""
        # What `down` has put away since did not end in order; a new launcher starts over.
        board.is_dead = is_killed or (board.is_dead and fate.life is not RunLiveness.LIVING)
        if not (is_absent or fate.by_hand):
            absent_at = now
        is_left = (is_absent or fate.by_hand) and now - absent_at > GONE_S
        is_dead = fate.life is RunLiveness.DEAD and not fate.broker
        if _has_ended(layout, fate, board) or ((is_left or is_dead) and is_quiet):
            return fate
        await asyncio.sleep(LOOK_S)


def _has_ended(layout: RunLayout, fate: Fate, board: RunState) -> bool:
    """Return whether a run ended in order: a broker by hand that was heard has recorded its end."""
    if fate.life is not RunLiveness.ENDED:
        return False
    lives = read_lives(layout) if fate.by_hand else ()
    return not fate.by_hand or board.pressure is None or bool(lives and lives[-1].ended is not None)
