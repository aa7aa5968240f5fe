"""The process of the traces: `python -P -m rolloutmq.services.telemetry.export.traces.program RUN_DIR`.

It follows the journal and the calls that workers tell, and sends each sampled group once it is over. It ends with its
input. Groups that ended before it began are those of an earlier life, and are not sent again. At durability `memory`
there is no journal: a trace then has the rollout and its calls alone, and is sent once the rollout is over.
"""

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.lifecycle import set_up_logging
from rolloutmq.bus.rundir import load_run
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.bus.transport.way.route import Route
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.schemas.wire.tracing import RolloutTrace
from rolloutmq.services.broker.journal.inspect.event_tail import EventTail
from rolloutmq.services.broker.journal.inspect.group_traces import OPEN_LIMIT, GroupTrace, TraceFollower
from rolloutmq.services.telemetry.export.sinks.protocol import Told, line_of
from rolloutmq.services.telemetry.export.traces.spans import Span, rollout_spans_of, spans_of

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Time between two looks at the journal."""

LIBRARY: Final = "opentelemetry"
"""Logger of the SDK: it has several lines for each request that fails."""

Send = Callable[[list[Span]], bool]


class LastWord(logging.Handler):
    """Keeps the last error that a library logged, instead of its lines: telemetry logs each reason once.

    Errors that it tries again are left out: their texts differ each time. The last one of a request ends it.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._word = ""

    @classmethod
    def of(cls, name: str) -> "LastWord":
        """Take the lines of a library from now on."""
        library, made = logging.getLogger(name), cls()
        library.propagate = False
        library.addHandler(made)
        return made

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error."""
        self._word = record.getMessage()

    def taken(self) -> str:
        """Return the last error, and forget it."""
        word, self._word = self._word, ""
        return word


class Calls:
    """Calls of the rollouts under way, by group; the oldest are forgotten for further ones."""

    def __init__(self, layout: RunLayout) -> None:
        self._route = Route(layout, lambda endpoints: endpoints.events)
        self._subscriber: BlockingSubscriber | None = None
        self._known: dict[str, RolloutTrace] = {}

    def hear(self) -> None:
        """Take what has arrived; never waits."""
        if (way := self._route.other()) is not None:
            self.close()
            self._route.taken = way
            self._subscriber = BlockingSubscriber(way.address, [topics.telemetry("trace", "")], keys=way.keys)
            self._subscriber.__enter__()
        while self._subscriber is not None and (known := self._subscriber.poll(0.0)) is not None:
            try:
                event = codec.decode_event(known[1])
            except WireError:
                continue
            if isinstance(event, RolloutTrace):
                if len(self._known) >= OPEN_LIMIT:
                    del self._known[next(iter(self._known))]
                self._known[event.group_id] = event

    def of(self, group_id: str) -> RolloutTrace | None:
        """Return the calls of a group, and forget them."""
        return self._known.pop(group_id, None)

    def taken(self) -> list[RolloutTrace]:
        """Return the calls of all groups, and forget them."""
        found, self._known = [*self._known.values()], {}
        return found

    def close(self) -> None:
        """End the subscription."""
        if self._subscriber is not None:
            self._subscriber.__exit__(None, None, None)
            self._subscriber = None


class Traces:
    """Follows the groups of one run.

    Args:
        layout: The run directory.
        run: Name of the run.
        ratio: Part of the groups that is traced.
        since: Wall clock; groups that were over before are not sent.
        has_journal: Whether the broker keeps a journal.
    """

    def __init__(
        self, layout: RunLayout, run: str, ratio: float, since: float, *, has_journal: bool = True
    ) -> None:
        self._has_journal = has_journal
        self._run = run
        self._ratio = ratio
        self._since = since
        self._tail = EventTail(layout.journal)
        self._gaps = 0
        self._follower = TraceFollower(ratio)
        self._calls = Calls(layout)

    def look(self) -> list[list[Span]]:
        """Return the spans of each group that is over since the last look."""
        self._calls.hear()
        if not self._has_journal:
            return [spans for one in self._calls.taken() if (spans := rollout_spans_of(one, self._run))]
        over: list[GroupTrace] = []
        for at, event in self._tail.new():
            if self._tail.gaps != self._gaps:
                self._gaps = self._tail.gaps
                self._follower = TraceFollower(self._ratio)
            self._follower.apply(at, event)
            over += self._follower.over()
        return [*self._new(over)]

    def close(self) -> None:
        """End the subscription."""
        self._calls.close()

    def _new(self, over: Iterable[GroupTrace]) -> Iterable[list[Span]]:
        for trace in over:
            spans = spans_of(trace, self._run, self._calls.of(trace.header.group_id))
            if spans and spans[0].ended_at >= self._since:
                yield spans


def serve(
    traces: Traces,
    send: Send,
    tell: Callable[[Told], None],
    ended: Callable[[float], bool],
    why: Callable[[], str] = str,
) -> None:
    """Send traces until `ended`, which waits for so many seconds; `why` tells why the last ones were not taken."""
    over, started = False, False
    while True:
        try:
            found = traces.look()
            if not started:
                logger.info("traces started")
            started = True
        except (RolloutMQError, OSError) as error:
            logger.warning("journal not read error=%s", error)
            found = []
        taken, reason = True, ""
        for spans in found:
            # A receiver that is away costs one time-out a look.
            if taken and not (taken := send(spans)):
                reason = ": ".join(filter(None, ("the receiver of traces does not take them", why())))
            tell(Told(reason))
        if over:
            return
        over = ended(POLL_S)


def main(run_dir: Path) -> int:
    """Follow one run; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    set_up_logging()
    from rolloutmq.services.telemetry.export.traces.exporter import SpanExporter

    config, layout = load_run(run_dir)
    word = LastWord.of(LIBRARY)
    exporter = SpanExporter(config.telemetry.otlp_url, config.run.name)
    has_journal = config.broker.durability is not Durability.MEMORY
    traces = Traces(
        layout, config.run.name, config.telemetry.trace_ratio, time.time(), has_journal=has_journal
    )

    def tell(outcome: Told) -> None:
        told.write(line_of(outcome))
        told.flush()

    def ended(wait_s: float) -> bool:
        return bool(select.select([sys.stdin.buffer], [], [], wait_s)[0])

    try:
        serve(traces, exporter.send, tell, ended, word.taken)
    finally:
        traces.close()
        exporter.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
