"""One stream of updates to a page, as server-sent events. Pure: it owns no socket.

A stream keeps what its reader has not taken yet, each section once: a slow reader gets the newest state, not the ones
between, and costs no more memory than a fast one.
"""

import asyncio
from collections.abc import Mapping
from json import dumps
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.schemas.statistics.series import SeriesBook

RETRY_MS: Final = 1000
"""Time after which a browser opens a broken stream again."""


class Update(NamedTuple):
    """The series of a run, and whether it has ended.

    Attributes:
        epoch: Another one means another record: what a reader has is void.
        series: The series.
        ended: How the run ended; empty while it goes on.
    """

    epoch: int
    series: SeriesBook
    ended: str


class Stream:
    """Pending events of one reader.

    Args:
        update: What it begins with.
        sections: All sections, encoded.
    """

    def __init__(self, update: Update, sections: Mapping[str, bytes]) -> None:
        self._pending = dict(sections)
        self._is_whole = True
        self._update = update
        self._cursor: tuple[int, int] | None = None
        self._ended = ""
        self._wake = asyncio.Event()
        self._wake.set()
        self.is_leaving = False

    def offer(self, changed: Mapping[str, bytes], update: Update) -> None:
        """Add the sections that changed, and the present series."""
        self._pending.update(changed)
        self._update = update
        if changed or self._has_series() or update.ended != self._ended:
            self._wake.set()

    def leave(self) -> None:
        """Say that the server ends."""
        self.is_leaving = True
        self._wake.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for something to send; return False after `timeout_s` without."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> bytes:
        """Return the pending events, encoded; nothing if there are none."""
        self._wake.clear()
        events = []
        if self._pending:
            parts = b",".join(b'"%b":%b' % (name.encode(), data) for name, data in self._pending.items())
            whole = b"true" if self._is_whole else b"false"
            events.append(_event(b"state", b'{"full":%b,"sections":{%b}}' % (whole, parts)))
            self._pending, self._is_whole = {}, False
        if self._has_series():
            events.append(_event(b"history", encoded_json(self._history())))
        if self._update.ended != self._ended:
            self._ended = self._update.ended
            if self._ended:
                events.append(_event(b"end", encoded_json({"text": self._ended})))
        return b"".join(events)

    def _has_series(self) -> bool:
        return self._cursor != (self._update.epoch, self._update.series.version)

    def _history(self) -> dict[str, Any]:
        told = history_since(self._update, self._cursor)
        self._cursor = self._update.epoch, self._update.series.version
        return told


def history_since(update: Update, cursor: tuple[int, int] | None) -> dict[str, Any]:
    """Return the series that changed after a cursor, epoch and version; all of them for one of another record."""
    is_known = cursor is not None and cursor[0] == update.epoch
    since = cursor[1] if is_known and cursor is not None else -1
    return {
        "cursor": f"{update.epoch}.{update.series.version}",
        "reset": not is_known,
        "series": update.series.since(since),
    }


def encoded_json(value: Any) -> bytes:
    """Return JSON, also of text that no encoding has: a path may be any bytes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return dumps(value).encode()


def opening() -> bytes:
    """Return the beginning of a stream."""
    return b"retry: %d\n\n" % RETRY_MS


def beat(at: float) -> bytes:
    """Return the event of a quiet stream, at a wall clock time."""
    return _event(b"beat", msgspec.json.encode({"at": at}))


def leaving(text: str, *, over: bool = False) -> bytes:
    """Return the last event of a server that ends; `over` with its run."""
    return _event(b"leave", encoded_json({"text": text, "over": over}))


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, data)
