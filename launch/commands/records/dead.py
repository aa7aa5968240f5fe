"""`rolloutmq dead`: list dead-lettered groups, show their contents, queue them again."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.bus.encoding.codec import decode_group
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.commands.records.explain import history
from rolloutmq.launch.commands.steer import ANSWER_S
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import moment, printable, printable_lines
from rolloutmq.schemas.wire.control import Requeue, Requeued
from rolloutmq.services.broker.journal.dead_letters import DeadEntry, DeadGroup, DeadLetterStore
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.monitor.text.columns import preview, shape
from rolloutmq.services.monitor.text.exit_codes import FAILED, USAGE, complain, reader_may_leave


def show_list(run_dir: Path, *, as_json: bool) -> int:
    """Print one line for each dead group; return the exit code."""
    entries = list(_store(run_dir).entries())
    with reader_may_leave():
        if as_json:
            fields = [_entry_fields(entry) for entry in entries]
            text = msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
            sys.stdout.write(printable_lines(text) + "\n")
        else:
            sys.stdout.writelines(f"{printable(_entry_line(entry))}\n" for entry in entries)
            if not entries:
                sys.stdout.write("no group is dead\n")
    return 0


def show(run_dir: Path, group_id: str, *, as_json: bool = False) -> int:
    """Print everything known about a dead group, with a preview of its columns; return the exit code."""
    found = _store(run_dir).find(group_id)
    if found is None:
        return complain(
            f"{group_id}: no such dead group in {run_dir}; `rolloutmq dead list` names them", FAILED
        )
    with reader_may_leave():
        if as_json:
            text = msgspec.json.format(msgspec.json.encode(_group_fields(run_dir, found)), indent=2).decode()
            sys.stdout.write(printable_lines(text) + "\n")
        else:
            sys.stdout.writelines(f"{printable(line)}\n" for line in _lines(run_dir, found))
    return 0


def requeue(run_dir: Path, group_ids: Sequence[str], *, every: bool) -> int:
    """Ask the running broker to queue dead groups again; return the exit code, 1 if it refuses any.

    Raises:
        BrokerUnavailableError: No broker runs.
    """
    if bool(group_ids) == every:
        return complain("dead requeue: name the groups, or pass --all", USAGE)
    found = resolve_blocking(run_dir, ANSWER_S)
    with BlockingClient(found.serve, keys=keys_of(found)) as client:
        reply = client.request(Requeue(groups=tuple(group_ids)), ANSWER_S)
    if not isinstance(reply, Requeued):
        return complain(f"unexpected reply from the broker (got {type(reply).__name__})", FAILED)
    sys.stdout.writelines(f"requeued {printable(group_id)}\n" for group_id in reply.requeued)
    sys.stdout.writelines(
        f"refused  {printable(f'{group_id}: {why}')}\n" for group_id, why in reply.refused.items()
    )
    if not reply.requeued and not reply.refused:
        sys.stdout.write("no group is dead\n")
    return FAILED if reply.refused else 0


def _store(run_dir: Path) -> DeadLetterStore:
    layout = RunLayout(run_dir)
    require_own_records(layout)
    return DeadLetterStore(layout.dead, 0, sync=False)


def _entry_fields(entry: DeadEntry) -> dict[str, Any]:
    letter = entry.letter
    if letter is None:
        return {"order": entry.order, "file": entry.path.name, "damaged": entry.problem}
    return {
        "order": entry.order,
        "file": entry.path.name,
        "group_id": letter.group.header.group_id,
        "env": letter.group.env,
        "producer": letter.group.producer,
        "reason": letter.reason,
        "at": letter.at,
        "deliveries": letter.deliveries,
        "failures": letter.failures,
        "sequences": letter.group.header.sequences,
        "nbytes": letter.group.header.nbytes,
        "kept": letter.kept,
    }


def _group_fields(run_dir: Path, found: DeadGroup) -> dict[str, Any]:
    """Return a dead group as JSON objects: as `dead list` has it, its history, and its columns as lines of text."""
    letter, group = found.letter, found.meta
    return {
        "order": found.order,
        "group_id": group.header.group_id,
        "env": group.env,
        "producer": group.producer,
        "reason": letter.reason,
        "at": letter.at,
        "deliveries": letter.deliveries,
        "failures": letter.failures,
        "sequences": group.header.sequences,
        "nbytes": group.header.nbytes,
        "kept": letter.kept,
        "history": [line.strip() for line in history(run_dir, group.header.group_id)],
        "columns": [line.strip() for line in _columns(found)],
    }


def _entry_line(entry: DeadEntry) -> str:
    letter = entry.letter
    if letter is None:
        return f"{entry.path.name}: damaged, {entry.problem}"
    group = letter.group
    kept = f"{group.header.nbytes} bytes" if letter.kept else "contents not kept"
    return f"{moment(letter.at)}  {group.header.group_id}  {group.env}  {letter.reason}  ({kept})"


def _lines(run_dir: Path, found: DeadGroup) -> Iterator[str]:
    letter, group = found.letter, found.meta
    header = group.header
    yield f"group {header.group_id}, order {found.order}: dead since {moment(letter.at)}"
    yield f"  reason      {letter.reason}"
    yield f"  from        {group.producer}, environment {group.env} ({group.split.name.lower()})"
    yield f"  number      {header.seq} of session {group.session}"
    yield f"  holds       {header.sequences} sequences, {header.tokens} tokens, {header.nbytes} bytes"
    yield f"  delivered   {letter.deliveries} times, {letter.failures} deliveries failed"
    yield "history"
    yield from history(run_dir, header.group_id)
    yield "columns"
    yield from _columns(found)


def _columns(found: DeadGroup) -> Iterator[str]:
    if found.frames is None:
        yield "  contents damaged" if found.damaged else "  contents not kept"
        return
    try:
        group = decode_group(found.meta.header, found.meta.table, found.frames, found.meta.env)
    except WireError as error:
        yield f"  contents do not decode: {error}"
        return
    for name, column in group.columns.items():
        yield f"  {name:<20} {shape(column):<24} {preview(column)}"
