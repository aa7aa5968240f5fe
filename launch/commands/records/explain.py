"""`rolloutmq explain`: print the history of one group, as text or JSON."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.launch.commands.records.ledger import recorded
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, NotedClock, RunLayout, SettledBatch
from rolloutmq.schemas.printable import moment, printable, printable_lines
from rolloutmq.services.broker.journal.inspect.explain import (
    GroupHistory,
    HistoryEntry,
    group_histories,
    origin,
)
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.monitor.text.exit_codes import FAILED, complain, reader_may_leave
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.services.process.clock_log import clock_at

LABEL = 14
"""Width of event names and row labels, in characters."""


def explain(run_dir: Path, group_id: str, *, as_json: bool) -> int:
    """Print everything known about a group of a running or ended run; return the exit code."""
    layout = RunLayout(run_dir)
    require_own_records(layout)
    journaled = recorded(layout)
    histories = group_histories(layout.journal, group_id) if journaled else []
    entries = list(notes(layout, group_id))
    if not histories and not entries:
        where = layout.journal if journaled else f"the logs of {run_dir}, which has no journal"
        return complain(f"{group_id}: no such group in {where}", FAILED)
    with reader_may_leave():
        if as_json:
            fields = {
                "group_id": group_id,
                "recorded": journaled,
                "groups": [_fields(story) for story in histories],
                "logs": msgspec.to_builtins(entries),
            }
            text = msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
        else:
            clocks = list(read_lines(layout.clocks, NotedClock))
            lines = _lines(group_id, histories, entries, clocks, journaled=journaled)
            text = "\n".join(map(printable, lines))
        sys.stdout.write(printable_lines(text) + "\n")
    return 0


def history(run_dir: Path, group_id: str) -> Iterator[str]:
    """Yield the history of a group as the lines that `explain` prints."""
    for story in group_histories(RunLayout(run_dir).journal, group_id):
        yield from map(_line, story.moments)


def notes(layout: RunLayout, group_id: str) -> Iterator[HistoryEntry]:
    """Yield the entries about a group in the logs of producers, trainer and broker, log by log."""
    for path in sorted(layout.acks.glob("*.jsonl")):
        for line in read_lines(path, AckedGroup):
            if line.group_id == group_id:
                details = {"producer": path.stem, "session": line.session, "seq": line.seq}
                yield HistoryEntry(line.at, "acked", details)
    # The broker's log has every settlement, that of a trainer more: two trainers may have trained one run in turn.
    yield from list(_settlements(layout.trained, group_id)) or _settlements(layout.settled, group_id)
    for dropped in read_lines(layout.dropped, DroppedGroup):
        if dropped.group_id == group_id:
            yield HistoryEntry(dropped.at, dropped.state, {"reason": dropped.reason})


def _settlements(log: Path, group_id: str) -> Iterator[HistoryEntry]:
    """Yield the settlements of a group in the log of a trainer or of the broker."""
    for batch in read_lines(log, SettledBatch):
        for event in ("trained", "filtered", "rejected"):
            if group_id in getattr(batch, event):
                details: dict[str, Any] = {"step": batch.version.step} if event == "trained" else {}
                details["policy"] = f"{batch.version.incarnation}.{batch.version.step}"
                details |= {"consumer": batch.consumer} if batch.consumer else {}
                details |= {"rewound": True} if batch.rewound else {}
                yield HistoryEntry(batch.at, event, details)


def _fields(story: GroupHistory) -> dict[str, Any]:
    place = story.accepted.place
    return {
        "order": story.order,
        "state": story.state,
        "origin": origin(story.accepted),
        "place": {"segment": place.segment, "offset": place.offset} if place else None,
        "moments": msgspec.to_builtins(story.moments),
    }


def _lines(
    group_id: str,
    histories: list[GroupHistory],
    entries: list[HistoryEntry],
    clocks: Sequence[NotedClock],
    *,
    journaled: bool,
) -> Iterator[str]:
    for story in histories:
        yield f"group {group_id}, order {story.order}: {story.state}"
        yield from _origin(story, clocks)
        yield from map(_line, story.moments)
        yield ""
    if not histories:
        yield f"group {group_id}: " + (
            "not in the journal, which begins later" if journaled else "not recorded at durability `memory`"
        )
    if entries:
        yield "from the logs:"
        yield from map(_line, entries)


def _origin(story: GroupHistory, clocks: Sequence[NotedClock]) -> Iterator[str]:
    accepted, header = story.accepted, story.accepted.header
    events = origin(accepted)
    task = f", task {header.task}" if header.task else ""
    policies = (
        events["oldest"] if header.oldest == header.newest else f"{events['oldest']} to {events['newest']}"
    )
    rewards = header.rewards
    yield _row("from", f"{accepted.producer}, environment {accepted.env} ({events['split']}){task}")
    yield _row("number", f"{header.seq} of session {accepted.session}")
    yield _row("holds", f"{header.sequences} sequences, {header.tokens} tokens, {header.nbytes} bytes")
    yield _row("policy", policies)
    if header.started_at and header.finished_at:  # 0 is unknown: the group was built without times
        took_s = header.finished_at - header.started_at
        clock = clock_at(clocks, accepted.producer, accepted.at)
        offset_s = clock.offset_s if clock is not None else 0.0
        began, ended = header.started_at + offset_s, header.finished_at + offset_s
        times = f"{_clock(began)} to {_clock(ended)}, {took_s:.3f} s"
        if clock is not None:
            side = f"{abs(offset_s):.3f} s {'behind' if offset_s > 0 else 'ahead of'}"
            times += f"; the clock of its worker was {side} the broker's (± {clock.error_s:.3f} s)"
        elif (ahead_s := ended - accepted.at) > 0:  # a group arrives after its end
            times += f"; by the clock of its worker, at least {ahead_s:.3f} s ahead of the broker's"
        yield _row("rollout", times)
    yield _row("rewards", f"mean {rewards.mean:.4g}, {rewards.low:.4g} to {rewards.high:.4g}")
    if accepted.place is not None:
        yield _row("stored in", f"groups-{accepted.place.segment:08d}.rmq at {accepted.place.offset}")


def _line(entry: HistoryEntry) -> str:
    details = " ".join(f"{name}={_plain(value)}" for name, value in entry.details.items())
    return f"  {_clock(entry.at)}  {entry.event:<{LABEL}}{details}".rstrip()


def _plain(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


def _row(label: str, text: str) -> str:
    return f"  {label:<{LABEL}}{text}"


def _clock(at: float) -> str:
    return moment(at, "milliseconds")
