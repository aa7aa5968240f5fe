"""`rolloutmq explain`: the story of one group, for a person or as JSON."""

import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.launch.ledger import recorded
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import AckedGroup, DroppedGroup, SettledBatch
from rolloutmq.services.broker.journal.explain import Moment, Story, origin, stories
from rolloutmq.services.monitor.exits import FAILED, complain, reader_may_leave
from rolloutmq.services.monitor.lines import read_lines

LABEL = 14
"""Columns of the names of an event or a figure."""


def explain(run_dir: Path, group_id: str, *, as_json: bool) -> int:
    """Print all that is known of a group, in a run that lives or has ended; returns the exit code."""
    layout = RunLayout(run_dir)
    journaled = recorded(layout)
    told = stories(layout.journal, group_id) if journaled else []
    noted = list(notes(layout, group_id))
    if not told and not noted:
        where = layout.journal if journaled else f"the logs of {run_dir}, which records no more"
        return complain(f"no group {group_id} in {where}", FAILED)
    with reader_may_leave():
        if as_json:
            fields = {
                "group_id": group_id,
                "recorded": journaled,
                "groups": [_fields(story) for story in told],
                "logs": msgspec.to_builtins(noted),
            }
            text = msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
        else:
            text = "\n".join(_lines(group_id, told, noted, journaled=journaled))
        sys.stdout.write(text + "\n")
    return 0


def history(run_dir: Path, group_id: str) -> Iterator[str]:
    """Yield the lines on what happened to a group, as `explain` prints them."""
    for story in stories(RunLayout(run_dir).journal, group_id):
        yield from map(_line, story.moments)


def notes(layout: RunLayout, group_id: str) -> Iterator[Moment]:
    """Yield what the logs of producers, trainer and broker say of a group, log after log."""
    for path in sorted(layout.acks.glob("*.jsonl")):
        for line in read_lines(path, AckedGroup):
            if line.group_id == group_id:
                details = {"producer": path.stem, "session": line.session, "seq": line.seq}
                yield Moment(line.at, "acked", details)
    for batch in read_lines(layout.trained, SettledBatch):
        for event in ("trained", "filtered", "rejected"):
            if group_id in getattr(batch, event):
                policy = f"{batch.version.incarnation}.{batch.version.step}"
                yield Moment(
                    batch.at, event, {"policy": policy} | ({"rewound": True} if batch.rewound else {})
                )
    for dropped in read_lines(layout.dropped, DroppedGroup):
        if dropped.group_id == group_id:
            yield Moment(dropped.at, dropped.state, {"reason": dropped.reason})


def _fields(story: Story) -> dict[str, Any]:
    place = story.accepted.place
    return {
        "order": story.order,
        "state": story.state,
        "origin": origin(story.accepted),
        "place": {"segment": place.segment, "offset": place.offset} if place else None,
        "moments": msgspec.to_builtins(story.moments),
    }


def _lines(group_id: str, told: list[Story], noted: list[Moment], *, journaled: bool) -> Iterator[str]:
    for story in told:
        yield f"group {group_id}, order {story.order}: {story.state}"
        yield from _origin(story)
        yield from map(_line, story.moments)
        yield ""
    if not told:
        yield f"group {group_id}: " + (
            "not in the journal, whose history begins later"
            if journaled
            else "not recorded at durability `memory`"
        )
    if noted:
        yield "what the logs say:"
        yield from map(_line, noted)


def _origin(story: Story) -> Iterator[str]:
    accepted, header = story.accepted, story.accepted.header
    facts = origin(accepted)
    task = f", task {header.task}" if header.task else ""
    policies = (
        facts["oldest"] if header.oldest == header.newest else f"{facts['oldest']} to {facts['newest']}"
    )
    took_s = header.finished_at - header.started_at
    rewards = header.rewards
    yield _row("from", f"{accepted.producer}, environment {accepted.env} ({facts['split']}){task}")
    yield _row("number", f"{header.seq} of session {accepted.session}")
    yield _row("holds", f"{header.sequences} sequences, {header.tokens} tokens, {header.nbytes} bytes")
    yield _row("policy", policies)
    yield _row("rollout", f"{_clock(header.started_at)} to {_clock(header.finished_at)}, {took_s:.3f} s")
    yield _row("rewards", f"mean {rewards.mean:.4g}, {rewards.low:.4g} to {rewards.high:.4g}")
    if accepted.place is not None:
        yield _row("lies in", f"groups-{accepted.place.segment:08d}.rmq at {accepted.place.offset}")


def _line(moment: Moment) -> str:
    details = " ".join(f"{name}={_plain(value)}" for name, value in moment.details.items())
    return f"  {_clock(moment.at)}  {moment.event:<{LABEL}}{details}".rstrip()


def _plain(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


def _row(label: str, text: str) -> str:
    return f"  {label:<{LABEL}}{text}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).isoformat(" ", "milliseconds")
