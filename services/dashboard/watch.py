"""Attachment to a run while somebody looks at its page: it subscribes to the events and reads the files, nothing else.

Once a second it makes the sections of the page and hands those that changed to each stream. Without a stream and a
request there is no work. Of state that replaces itself, such as the pressure, only the newest message is decoded.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.services.dashboard.record.record_file import RecordFile
from rolloutmq.services.dashboard.record.run_record import RunRecord
from rolloutmq.services.dashboard.run_files import REMOVED, RunFiles, read_config, read_files
from rolloutmq.services.dashboard.state import Reading, Shown, sections
from rolloutmq.services.dashboard.stream import Stream, Update, encoded_json
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.report.history import History
from rolloutmq.services.monitor.status.worker_view import (
    WorkerRow,
    joined,
    still_given_up,
    with_hangs,
)

logger = logging.getLogger(__name__)

TICK_S: Final = 1.0
"""Time between two updates."""
DRAIN_S: Final = 0.25
"""Time between two looks for events: a full queue of the socket would drop some."""
FIRST_S: Final = 1.0
"""Longest wait for the first word of a living broker: without it all of its workers would seem silent."""
LINGER_S: Final = 5.0
"""Time without a viewer after which the attachment ends: a page that is reloaded finds it."""
STREAMS_LIMIT: Final = 16
LOAD_S: Final = 0.5
"""Longest reading of the record before the page is told how far it is."""
CREW_PART: Final = 50
"""The workers are looked up again after this many times the time that it took: each costs a look at its process."""
SUBJECTS_LIMIT: Final = 4096
_NAMES: Final = (*(role.value for role in Role), *(f"inference-{number}" for number in range(1, 9)))
_RANKS: Final = tuple(f"trainer.rank{number}" for number in range(1, 8))
STATES: Final = (
    topics.PRESSURE,
    *(
        topics.telemetry(what, "")
        for what in ("host", "gpu", "fleet", "engine", "scale", "curriculum", "network")
    ),
    *(topics.telemetry("process", name) for name in (*_NAMES, *_RANKS)),
)
"""Topics whose newest message replaces the ones before. Workers' processes are left out: there may be thousands."""
EVENTS: Final = (
    topics.STEP,
    *(topics.telemetry(what, "") for what in ("settled", "figures", "evaluation", "health")),
)
"""Topics of which each message counts."""


class Watch:
    """Viewers of one run, and what they see.

    Args:
        layout: The run directory.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._file = RecordFile(layout.metrics, self._take_line, self._begin_record)
        self.config: RunConfig | str = ""
        self._config_at: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._viewers = 0
        self._left_at = 0.0
        self._ticked = asyncio.Event()
        self._crew_due = 0.0
        self._encoded: dict[str, bytes] = {}
        self._newest: dict[bytes, bytes] = {}
        self._fresh: set[bytes] = set()
        self._is_loaded = False
        self._fed_lines = -1
        self._given_up: dict[str, str] = {}
        self.record = RunRecord()
        self.epoch = 0
        """Grows with each record that is read from its beginning."""
        self.board = RunState(layout.root.name, 0, 0.5, 2.0, {})
        self.files = RunFiles(REMOVED, "")
        self.crew: Sequence[WorkerRow] = ()
        self.crew_version = 0
        self.streams: set[Stream] = set()

    @asynccontextmanager
    async def viewed(self) -> AsyncIterator[None]:
        """Stay attached for the block; the state is known when it begins."""
        self._viewers += 1
        try:
            if self._task is None or self._task.done():
                self._ticked = asyncio.Event()
                self._task = asyncio.create_task(self._run(), name="watch")
            await self._ticked.wait()
            yield
        finally:
            self._viewers -= 1
            self._left_at = time.monotonic()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        """Open a stream for the block. It begins with the whole state."""
        async with self.viewed():
            stream = Stream(self.update(), self._encoded)
            self.streams.add(stream)
            try:
                yield stream
            finally:
                self.streams.discard(stream)

    def update(self) -> Update:
        """Return the series, and where they are."""
        return Update(self.epoch, self.record.series, self._end_text())

    def state(self) -> bytes:
        """Return all sections as JSON."""
        return joined_sections(self._encoded)

    async def close(self) -> None:
        """End the attachment."""
        for stream in self.streams:
            stream.leave()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        """Update until nobody has looked for a while."""
        try:
            async with EventFeed(self._layout, (*STATES, *EVENTS)) as feed:
                attached_at = time.monotonic()
                while self._viewers or time.monotonic() - self._left_at < LINGER_S:
                    began = time.monotonic()
                    try:
                        await self._tick()
                    except Exception:  # a page that shows nothing new is better than a server that ends
                        logger.exception("update failed")
                    if self._is_known(attached_at):
                        self._ticked.set()
                    pause_s = TICK_S if self._ticked.is_set() else DRAIN_S
                    until = max(began + pause_s, time.monotonic()) if self._is_loaded else time.monotonic()
                    await self._drain(feed)
                    while (left := until - time.monotonic()) > 0:
                        await asyncio.sleep(min(left, DRAIN_S))
                        await self._drain(feed)
        finally:
            self._ticked.set()
            self._newest.clear()

    def _is_known(self, attached_at: float) -> bool:
        """Return whether the state is that of now, or the broker has been silent for long."""
        now, board = time.monotonic(), self.board
        heard = board.pressure is not None and not board.silent_s(now)
        return heard or not self.files.answers or now - attached_at >= FIRST_S

    async def _drain(self, feed: EventFeed) -> None:
        """Take the events that have arrived."""
        if not self.files.answers:
            return
        event = await feed.next(0.0)
        while event is not None:
            topic, payload = event
            if topic.startswith(STATES):
                if topic in self._newest or len(self._newest) < SUBJECTS_LIMIT:
                    self._newest[topic] = payload
                    self._fresh.add(topic)
            else:
                self._feed(payload)
            event = feed.try_next()

    def _feed(self, payload: bytes) -> None:
        # A message that does not decode is from another version: skip it.
        with contextlib.suppress(WireError):
            self.board.feed(codec.decode_event(payload), time.monotonic())

    async def _tick(self) -> None:
        now, wall = time.monotonic(), time.time()
        decided_at = self.board.decided_at
        self.files = await asyncio.to_thread(read_files, self._layout, now, wall, decided_at)
        self._look_at_config()
        is_whole = await self._read_record()
        for topic in self._fresh:
            self._feed(self._newest[topic])
        self._fresh.clear()
        if is_whole and not self._is_loaded:
            self._recall()
        self._is_loaded = is_whole
        if is_whole and not self.files.answers and self._fed_lines != self.record.lines:
            self._feed_recorded()
        self.board.supervision = self.files.supervision
        if time.monotonic() >= self._crew_due or not self._ticked.is_set():
            await self._look_at_crew()
        self._publish()

    async def _read_record(self) -> bool:
        """Read on in the record; return whether the end is reached."""
        until = time.monotonic() + LOAD_S
        while not self._file.apply(await asyncio.to_thread(self._file.fetch)):
            if time.monotonic() > until:
                return False
        return True

    def _look_at_config(self) -> None:
        """Read the configuration again if another one is there: a run may begin in the same directory."""
        try:
            found = self._layout.config.stat()
            at = found.st_ino, found.st_mtime_ns
        except OSError:
            at = None
        if at == self._config_at and self.config:
            return
        self._config_at, self.config = at, read_config(self._layout.root)
        self.board = self._blank()
        self.record.set_slots(self._slots())
        self._is_loaded = False

    def _slots(self) -> dict[str, int]:
        """Return the rollout slots of a worker, by environment."""
        if isinstance(self.config, str):
            return {}
        return {name: env.concurrency for name, env in self.config.environment.items()}

    def _blank(self) -> RunState:
        if isinstance(self.config, str):
            return RunState(self._layout.root.name, 0, 0.5, 2.0, {})
        return RunState.of(self.config)

    def _recall(self) -> None:
        """Begin the state again with the history of the run, and with what came meanwhile."""
        self.board = self._blank()
        events = tuple(self.record.training())
        self.board.recall(History(self.files.ran_s, time.time(), events), time.monotonic())
        self._fed_lines = -1
        for payload in self._newest.values():
            self._feed(payload)

    def _feed_recorded(self) -> None:
        """Show the last recorded events: of a run whose broker does not answer they are the state."""
        self._fed_lines = self.record.lines
        now, wall = time.monotonic(), time.time()
        for at, event in self.record.state():
            self.board.feed(event, now - max(0.0, wall - at))

    async def _look_at_crew(self) -> None:
        began = time.monotonic()
        pressure = self.board.pressure
        heard = pressure.workers if pressure is not None else None
        slots = self._slots()

        def look() -> list[WorkerRow]:
            known = self.files.supervision if self.files.answers else None
            return with_hangs(joined(known, heard, began, slots), self._layout)

        crew = await asyncio.to_thread(look)
        if list(map(_compared, crew)) != list(map(_compared, self.crew)):
            self.crew_version += 1
        self.crew = crew
        self._given_up = (
            still_given_up(self._given_up, crew, self._layout) if self.files.answers else self._given_up
        )
        took_s = time.monotonic() - began
        self._crew_due = began + max(TICK_S, CREW_PART * took_s) - DRAIN_S

    def _publish(self) -> None:
        now, wall = time.monotonic(), time.time()
        shown = Shown(
            str(self._layout.root),
            self.config or "is not read yet",
            self.board,
            self.files,
            self.record,
            self._reading(),
            self.crew,
            self.crew_version,
            self._given_up,
        )
        encoded = {name: encoded_json(value) for name, value in sections(shown, now, wall).items()}
        changed = {name: data for name, data in encoded.items() if self._encoded.get(name) != data}
        self._encoded = encoded
        update = self.update()
        for stream in self.streams:
            stream.offer(changed, update)

    def _reading(self) -> Reading:
        file = self._file
        return Reading(
            lines=self.record.lines,
            nbytes=file.size,
            damaged=self.record.damaged + file.long_lines,
            loaded=file.offset / file.size if file.size else 1.0,
            problem=file.problem,
        )

    def _end_text(self) -> str:
        return self.files.text if not self.files.answers else ""

    def _take_line(self, line: bytes) -> None:
        self.record.take(line)

    def _begin_record(self) -> None:
        self.record = RunRecord(self._slots())
        self.epoch += 1
        self._is_loaded = False


def _compared(row: WorkerRow) -> tuple[Any, ...]:
    """Return what makes a row another one: not the times that pass for all."""
    return (row.worker, row.state, row.pid, row.in_hand, row.produced, row.abandoned, row.reason, row.crashes)


def joined_sections(encoded: dict[str, bytes]) -> bytes:
    """Return an object of encoded sections."""
    parts = (b'"%b":%b' % (name.encode(), data) for name, data in encoded.items())
    return b"{%b}" % b",".join(parts)
