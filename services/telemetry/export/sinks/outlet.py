"""One sink: a bounded queue, and the process that empties it.

Each sink has a process of its own, since a library of a tracker may block, crash or take a core: it costs its own
points and nothing else. A process that ends is started again, later after each time. Points that find no room, that the
tracker refuses, or that were in a process that ended are dropped and counted. Each reason is logged once.
"""

import asyncio
import contextlib
import logging
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.sinks.points import Point
from rolloutmq.services.telemetry.export.sinks.protocol import LINE_LIMIT_BYTES, line_of, told_decoder

logger = logging.getLogger(__name__)

CAPACITY: Final = 1000
"""Points that wait for a process."""
IN_HAND: Final = 100
"""Points that a process has and has not told of."""
FINISH_S: Final = 12.0
"""Time of a process to upload the rest at the end; the launcher waits a little longer for telemetry."""
HANG_S: Final = 300.0
"""Time in which a process that is full takes no point, after which it is killed and started again."""
EXIT_S: Final = 0.5
"""Time from the closed output of a process to its end."""
RESTART_S: Final = (1.0, 5.0, 30.0, 120.0)
"""Times until a process is started again: one for each in a row that took no point, the last for all further ones."""


class SinkOutlet:
    """Queue and process of one sink, for one event loop.

    Args:
        name: Name of the sink.
        command: Command of its process.
        capacity: Points that wait for it.
        restart_s: Times until it is started again.
        finish_s: Time of the process at the end.
        hang_s: Time without a taken point after which it is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        capacity: int = CAPACITY,
        restart_s: Sequence[float] = RESTART_S,
        finish_s: float = FINISH_S,
        hang_s: float = HANG_S,
    ) -> None:
        self.name = name
        self._command = command
        self._capacity = capacity
        self._restart_s = restart_s
        self._finish_s = finish_s
        self._hang_s = hang_s
        self._queue: deque[Point] = deque()
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._in_hand = 0
        self._failures = 0
        self._whys: set[str] = set()
        self.taken = 0
        """Points that the tracker took."""
        self.dropped = 0
        """Points that it did not take."""

    def put(self, point: Point) -> None:
        """Queue a point; drop the oldest one if there is no room. Never waits."""
        if len(self._queue) >= self._capacity:
            self._queue.popleft()
            self._drop(1, "it is too slow")
        self._queue.append(point)
        self._more.set()

    async def run(self, stop: Stop) -> None:
        """Keep a process until `stop`, then let it finish. Raises nothing, and leaves no process behind."""
        waking = asyncio.create_task(self._wake(stop))
        try:
            while not stop.event.is_set():
                try:
                    await self._serve(stop)
                except Exception as error:  # noqa: BLE001 - the border of the sink: telemetry goes on without it
                    self._tell(f"{type(error).__name__}: {error}")
                at = min(self._failures, len(self._restart_s) - 1)
                self._failures += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.event.wait(), self._restart_s[at])
        finally:
            waking.cancel()
        if self._queue:
            self._drop(len(self._queue), "the run ended before it took them")
            self._queue.clear()

    async def _wake(self, stop: Stop) -> None:
        """Let the writer notice the end."""
        await stop.event.wait()
        self._more.set()

    async def _serve(self, stop: Stop) -> None:
        """Serve one life of the process. Returns once it has ended."""
        child = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, limit=LINE_LIMIT_BYTES
        )
        self._in_hand = 0
        self._room.set()
        listening = asyncio.create_task(self._listen(child))
        others = [asyncio.create_task(one) for one in (self._write(child, stop), self._deadline(stop))]
        try:
            # The writer ends first at the end of the run; then the process has its time to finish.
            await asyncio.wait({listening, others[1]}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(child, (listening, *others))
        if self._in_hand:
            self._drop(self._in_hand, "its process ended with them")
        if not stop.event.is_set():
            self._tell(f"its process ended with exit code {child.returncode}; it is started again")

    async def _deadline(self, stop: Stop) -> None:
        await stop.event.wait()
        await asyncio.sleep(self._finish_s)

    async def _write(self, child: Process, stop: Stop) -> None:
        """Write points until `stop`, then the rest, and close the input. A process that hangs is killed."""
        assert child.stdin is not None
        try:
            while self._queue or not stop.event.is_set():
                if not self._queue:
                    self._more.clear()
                    await self._more.wait()
                    continue
                async with asyncio.timeout(self._hang_s):
                    await self._room.wait()
                    line = line_of(self._queue.popleft())
                    self._in_hand += 1
                    if self._in_hand >= IN_HAND:
                        self._room.clear()
                    child.stdin.write(line)
                    await child.stdin.drain()
        except (ConnectionError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._tell(f"its process took no point for {self._hang_s:g} s")
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        finally:
            child.stdin.close()

    async def _listen(self, child: Process) -> None:
        """Count the outcomes until the process closes its output."""
        assert child.stdout is not None
        async for line in child.stdout:
            try:
                told = told_decoder.decode(line)
            except msgspec.DecodeError:  # a library printed something
                continue
            self._in_hand = max(0, self._in_hand - 1)
            self._room.set()
            if told.why:
                self._drop(1, told.why)
            else:
                self.taken += 1
                self._failures = 0

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        self._tell(f"points are dropped: {why}")

    def _tell(self, why: str) -> None:
        """Log a reason, once. What a tracker says may differ each time, so the number of reasons is bounded."""
        if why not in self._whys and len(self._whys) < 20:
            self._whys.add(why)
            logger.warning("sink troubled sink=%s reason=%s", self.name, why)


async def _end(child: Process, tasks: Sequence["asyncio.Task[None]"]) -> None:
    """End the process, if it has not ended by itself, and the tasks."""
    try:
        await asyncio.wait_for(child.wait(), EXIT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
