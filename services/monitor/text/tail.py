"""`rolloutmq tail TOPIC`: bus events as JSON lines."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable_lines
from rolloutmq.schemas.wire.envelope import Message
from rolloutmq.services.monitor.text.exit_codes import INTERRUPTED, USAGE, complain, reader_may_leave

HEADS: Final = ("ack", "control", "policy", "pressure", "step", "telemetry")
PATIENCE_S: Final = 1.0


def wanted(topic: str) -> tuple[bytes, ...]:
    """Return the subscriptions of a topic: itself, everything below it, and its slash form; empty means all.

    Raises:
        ValueError: No topic starts with it.
    """
    name = topic.rstrip("*./").encode()
    if not name:
        return (b"",)
    if name.split(b".")[0].decode() not in HEADS:
        raise ValueError(f"unknown topic (got {topic!r}); topics start with: {', '.join(HEADS)}")
    return (name, name + b".", name + b"/")


def line_of(topic: bytes, payload: bytes, now: float) -> str:
    """Return one event as JSON; a message that does not decode as an `error`."""
    fields: dict[str, object] = {"t": round(now, 4), "topic": topic.decode(errors="replace")}
    try:
        fields |= msgspec.to_builtins(_decoded(topic, payload))
    except WireError as error:
        fields["error"] = str(error)
    return printable_lines(msgspec.json.encode(fields).decode())


def _decoded(topic: bytes, payload: bytes) -> Message:
    if topic.startswith(topics.ACK):
        message: Message = codec.decode_ack(payload)
    elif topic.startswith(topics.CONTROL):
        message = codec.decode_drain(payload)
    else:
        message = codec.decode_event(payload)
    return message


def tail(where: Path, topic: str, *, count: int | None = None) -> int:
    """Print events until Ctrl-C, or `count` of them; return the exit code. Blocks."""
    if not where.is_dir():
        return complain(f"{where}: no run directory; start a run with `rolloutmq up CONFIG`", USAGE)
    try:
        names = wanted(topic)
    except ValueError as error:
        return complain(str(error), USAGE)
    try:
        with reader_may_leave():
            asyncio.run(print_events(RunLayout(where), names, count, sys.stdout.write))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


async def print_events(
    layout: RunLayout, names: tuple[bytes, ...], count: int | None, write: Callable[[str], object]
) -> None:
    """Write a line for each event of the topics, for ever or `count` times."""
    printed = 0
    async with EventFeed(layout, names) as feed:
        while count is None or printed < count:
            event = await feed.next(PATIENCE_S)
            if event is not None:
                write(line_of(*event, time.time()) + "\n")
                sys.stdout.flush()
                printed += 1
