"""`rolloutmq tail TOPIC`: bus events as JSON lines.

Of a run that has ended, the recorded events are printed (`metrics.jsonl`; acks and drains are not recorded). A run
without a broker is named on standard error after two seconds, since nothing comes until one starts; after ten it is
given up.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.files import open_regular
from rolloutmq.bus.log_throttle import WaitLog
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable_lines, shell_word
from rolloutmq.schemas.wire.envelope import Message
from rolloutmq.services.monitor.liveness import Fate, RunLiveness, fate_of
from rolloutmq.services.monitor.text.exit_codes import (
    FAILED,
    INTERRUPTED,
    USAGE,
    complain,
    flush_output,
    reader_may_leave,
)

PATIENCE_S: Final = 1.0
"""Longest wait for one event, before the run itself is looked at."""
GONE_S: Final = 10.0
"""Time without launcher, broker and events after which a run is over: a broker started by hand may be coming up."""


class Recorded(msgspec.Struct, frozen=True):
    """The part of a line of `metrics.jsonl` by which it is found."""

    topic: str = ""


def wanted(topic: str) -> tuple[bytes, ...]:
    """Return the subscriptions of a topic: itself, everything below it, and its slash form; empty means all.

    Raises:
        ValueError: No topic starts with it.
    """
    name = topic.rstrip("*./").encode()
    if not name:
        return (b"",)
    if name.split(b".")[0].decode() not in topics.HEADS:
        raise ValueError(f"unknown topic (got {topic!r}); topics start with: {', '.join(topics.HEADS)}")
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
    """Print events until Ctrl-C or the end of the run, or `count` of them; return the exit code. Blocks."""
    if not where.is_dir():
        return complain(f"{where}: no run directory; start a run with `rolloutmq up CONFIG`", USAGE)
    try:
        names = wanted(topic)
    except ValueError as error:
        return complain(str(error), USAGE)
    layout, ended = RunLayout(where), None
    try:
        with reader_may_leave():
            if (fate := _over(layout)) is not None:
                return _recorded(layout, fate, topic, names, count)
            ended = asyncio.run(print_events(layout, names, count, sys.stdout.write))
    except KeyboardInterrupt:
        return INTERRUPTED
    if ended is not None and ended.life is RunLiveness.ABSENT:
        return complain(ended.say(layout), FAILED)
    if ended is not None:
        _note(ended.say(layout))
    return 0


async def print_events(
    layout: RunLayout, names: tuple[bytes, ...], count: int | None, write: Callable[[str], object]
) -> Fate | None:
    """Write a line for each event of the topics, `count` times or until the run is over; then return its fate."""
    printed, quiet, served_at = 0, WaitLog(), time.monotonic()
    async with EventFeed(layout, names) as feed:
        while count is None or printed < count:
            event = await feed.next(PATIENCE_S)
            if event is not None:
                write(line_of(*event, time.time()) + "\n")
                sys.stdout.flush()
                printed += 1
                served_at = time.monotonic()
            elif (fate := _given_up(layout, time.monotonic() - served_at)) is not None:
                return fate
            elif missing := _missing(layout):
                if quiet.is_due(missing, time.monotonic()):
                    _note(f"waiting for a broker: {missing}")
            else:
                quiet.over()
    return None


def _over(layout: RunLayout) -> Fate | None:
    """Return the fate of a run that is over: it has ended, or is dead, and no broker can be asked."""
    fate = fate_of(layout)
    ended = fate.life is RunLiveness.ENDED and endpoints_of(layout) is None
    return fate if ended or (fate.life is RunLiveness.DEAD and not fate.broker) else None


def _given_up(layout: RunLayout, quiet_s: float) -> Fate | None:
    """Return the fate of a run that is over, or of which nobody recorded an end and nothing has come for too long."""
    fate = fate_of(layout)
    if fate.life is RunLiveness.ABSENT or fate.by_hand:
        return fate if quiet_s > GONE_S else None
    return _over(layout)


def _missing(layout: RunLayout) -> str:
    """Return why no event can come now, and where that was looked for; empty if a broker runs."""
    if fate_of(layout).broker:
        return ""
    if endpoints_of(layout) is None:
        return (
            f"no broker serves {layout.root} ({layout.endpoints} does not exist); start a run with "
            f"`rolloutmq up CONFIG --run-dir {shell_word(layout.root)}`, or correct the path"
        )
    return f"the broker of {layout.endpoints} does not run on this machine"


def _recorded(layout: RunLayout, fate: Fate, topic: str, names: tuple[bytes, ...], count: int | None) -> int:
    """Print the recorded events of a run that is over."""
    prefixes = tuple(name.decode(errors="replace") for name in names)
    found = islice(_lines(layout.metrics, prefixes), count)
    if (first := next(found, None)) is None:
        problem = f"{fate.say(layout)}; {layout.metrics} has no event of {topic or 'any topic'}"
        return complain(problem, FAILED)
    for line in chain([first], found):
        sys.stdout.write(printable_lines(line))
    flush_output()
    _note(f"{fate.say(layout)}; these were its recorded events")
    return 0


def _lines(path: Path, prefixes: tuple[str, ...]) -> Iterator[str]:
    """Yield the recorded lines of the topics; a torn or damaged line is left out."""
    try:
        record = open_regular(path)
    except FileNotFoundError:
        return
    with record:
        for line in record:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                if msgspec.json.decode(line, type=Recorded).topic.startswith(prefixes):
                    yield line.decode()


def _note(text: str) -> None:
    sys.stderr.write(f"{printable_lines(text)}\n")
