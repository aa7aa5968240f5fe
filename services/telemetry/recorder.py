"""`metrics.jsonl`: every published event, one JSON object a line.

A line is `{"t": wall clock at arrival, "topic": ..., ...fields of the event}`. Acks and drains have one receiver and
are not recorded, nor is `network_status`, of which only the newest counts. `pressure` is thinned out in a long run,
and latency samples of many processes are merged, see `sample_merger`. `pressure` carries `worker_states`, the number of
workers by state, which stays when a line is trimmed to its limit. Events are written once a second: a killed recorder
loses the last second, and the next one cuts off a torn line. While the file cannot be written, for example because the
disk is full, events are dropped and counted.
"""

import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.files import append_whole, private_file
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.schemas.wire.latency import LatencySample
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.telemetry.sample_merger import SampleMerger

logger = logging.getLogger(__name__)

RECORDED: Final = (topics.PRESSURE, topics.STEP, topics.POLICY, topics.TELEMETRY)
"""Subscribed prefixes: all topics but those with one receiver."""
LINE_LIMIT_BYTES: Final = 64 << 10
"""Maximum line length: a pressure message with 10,000 workers is 3 MB; four a second would fill a disk."""
TOPIC_LIMIT_BYTES: Final = 256
DENSE_S: Final = 600.0
"""Time in which every `pressure` is recorded: short runs are examined closely."""
DENSE_GAP_S: Final = 0.2
SPARSE_GAP_S: Final = 1.0
"""Interval between recorded pressures after that."""


class Recorder:
    """Events in, lines out. Owns no socket; only `flush` touches the disk.

    Args:
        path: File to append to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._merger = SampleMerger()
        self._first_at: float | None = None
        self._pressure_at = 0.0
        self.malformed = 0
        """Events that failed to decode."""
        self.lost = 0
        """Events that could not be written."""
        self._why = ""
        self._lost_before = 0
        try:
            if cut := _cut_torn_line(path):
                logger.warning("torn line cut path=%s bytes=%d", path, cut)
        except OSError as error:
            self._lose(0, str(error))

    def record(self, topic: bytes, payload: bytes, now: float) -> Event | None:
        """Record one event at wall clock `now`, and return it. None for one that does not decode: it is counted."""
        try:
            event = codec.decode_event(payload)
        except WireError as error:
            self.malformed += 1
            logger.warning("event not decoded topic=%r error=%s", topic, error)
            return None
        if isinstance(event, LatencySample):
            if (due := self._merger.take(topic, event, now)) is not None:
                self._lines.append(line_of(*due))
        elif not isinstance(event, NetworkStatus) and (not isinstance(event, Pressure) or self._is_due(now)):
            self._lines.append(line_of(topic, event, now))
        return event

    def _is_due(self, now: float) -> bool:
        first = self._first_at = now if self._first_at is None else self._first_at
        gap_s = DENSE_GAP_S if now - first < DENSE_S else SPARSE_GAP_S
        # A wall clock set back must not stop the record.
        if 0 <= now - self._pressure_at < gap_s:
            return False
        self._pressure_at = now
        return True

    def flush(self) -> None:
        """Append the events since the last flush as whole lines, or drop and count them. Call it once a second.

        Raises nothing.
        """
        self._lines += (line_of(*due) for due in self._merger.flushed())
        self._write()

    def close(self) -> None:
        """Append all that is left, see `flush`."""
        self._lines += (line_of(*due) for due in self._merger.rest())
        self._write()

    def _write(self) -> None:
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            if self._why:
                _cut_torn_line(self._path)
            append_whole(self._path, b"".join(lines))
        except OSError as error:
            self._lose(len(lines), str(error))
            return
        if self._why:
            logger.warning("events recorded again path=%s lost=%d", self._path, self.lost - self._lost_before)
            self._why, self._lost_before = "", self.lost

    def _lose(self, events: int, why: str) -> None:
        """Count dropped events; log each reason once."""
        self.lost += events
        if why != self._why:
            logger.warning("events not recorded, they are dropped path=%s error=%s", self._path, why)
        self._why = why


def line_of(topic: bytes, event: Event, now: float) -> bytes:
    """Return the line of one event, at most `LINE_LIMIT_BYTES` long.

    A longer line loses its largest fields and names them in `trimmed`.
    """
    fields: dict[str, Any] = msgspec.to_builtins(event)
    if isinstance(event, Pressure):
        fields["worker_states"] = dict(Counter(worker.counts_as for worker in event.workers))
    stamp = {"t": round(now, 4), "topic": topic[:TOPIC_LIMIT_BYTES].decode(errors="replace")}
    line = msgspec.json.encode(stamp | fields)
    trimmed: list[str] = []
    while len(line) >= LINE_LIMIT_BYTES:
        largest = max(fields, key=lambda name: len(msgspec.json.encode(fields[name])))
        del fields[largest]
        trimmed.append(largest)
        line = msgspec.json.encode(stamp | fields | {"trimmed": trimmed})
    return line + b"\n"


def _cut_torn_line(path: Path) -> int:
    """Truncate the file after its last newline, and return the cut bytes: a killed writer may have left a torn line."""
    if not path.exists():
        return 0
    with private_file(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - LINE_LIMIT_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)
        return size - end
