"""The tables of the live view: workers, environments, GPUs and groups, with what an order about a row needs. Pure.

A cell is made only when its row is drawn: of a thousand workers, a screen shows a few dozen. Names come from peers, and
their control characters are shown, not obeyed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rich.text import Text

from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.control import LaneStatus, WorkerState
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.live.run_state import GroupEnd, RunState
from rolloutmq.services.monitor.status import gpus
from rolloutmq.services.monitor.status.worker_view import WorkerRow, by_number
from rolloutmq.services.monitor.text import format

STYLE_OF: Final[dict[str, str]] = {
    "waiting": "bold red",
    WorkerState.STARTING: "cyan",
    WorkerState.READY: "green",
    WorkerState.DRAINING: "yellow",
    WorkerState.GONE: "dim",
    WorkerState.FAILED: "bold red",
    "stopping": "yellow",
    "fatal": "bold red",
}


class TableName(StrEnum):
    """The tables, in the order in which Tab shows them."""

    WORKERS = "workers"
    ENVIRONMENTS = "environments"
    GPUS = "gpus"
    GROUPS = "groups"


class Entry(NamedTuple):
    """A row of a table.

    Attributes:
        key: Name by which a selection finds it again, as its peer sent it.
        row: What its cells are made of.
        words: Text that a filter searches, in lower case.
        env: Environment whose number of workers `+` and `-` change; empty for none.
        gpu: GPU that `c` cordons; empty for none.
        is_cordoned: Whether it is cordoned now.
    """

    key: str
    row: Any
    words: str
    env: str = ""
    gpu: str = ""
    is_cordoned: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its head.
        cell: Makes the cell of a row.
        order: Returns the sort key of a row; the rows come in ascending order of it.
        width: Least width, so that nothing moves when the table is scrolled.
        is_number: Aligned to the right.
    """

    title: str
    cell: Callable[[Any], Text]
    order: Callable[[Any], Any]
    width: int = 0
    is_number: bool = False


class Listing(NamedTuple):
    """A table: its columns and all its rows in their usual order."""

    columns: Sequence[Column]
    entries: Sequence[Entry]
    empty: str
    """Said of a table without rows."""


def text(value: object, style: str = "") -> Text:
    """Return a text that a terminal only shows."""
    return Text(printable(str(value)), style=style)


def listing(name: TableName, board: RunState, now: float) -> Listing:
    """Return one of the tables; `now` is CLOCK_MONOTONIC."""
    match name:
        case TableName.WORKERS:
            return Listing(_worker_columns(board), [_worker(row) for row in board.crew(now)], "no workers")
        case TableName.ENVIRONMENTS:
            rows = _environments(board, now)
            return Listing(_ENVIRONMENT_COLUMNS, [_environment(row) for row in rows], "no environments")
        case TableName.GPUS:
            known = sorted(board.gpus.keys() | board.standings.keys())
            return Listing(_gpu_columns(board), [_gpu(board, uuid) for uuid in known], "no GPUs")
        case TableName.GROUPS:
            return Listing(
                _GROUP_COLUMNS, [_group(row) for row in _groups(board, now)], "no group has ended yet"
            )


def shown(found: Listing, column: int, wanted: str, *, is_reversed: bool) -> list[Entry]:
    """Return the rows of a table that a filter leaves, in the order of a column.

    Args:
        found: The table.
        column: Number of the column; -1 is the usual order.
        wanted: Text of the filter: every word must occur. Case does not count.
        is_reversed: The last first.
    """
    words = wanted.lower().split()
    rows = [entry for entry in found.entries if all(word in entry.words for word in words)]
    if 0 <= column < len(found.columns):
        order = found.columns[column].order
        rows.sort(key=lambda entry: order(entry.row), reverse=is_reversed)
    elif is_reversed:
        rows.reverse()
    return rows


def _number(title: str, width: int, cell: Callable[[Any], Text], order: Callable[[Any], Any]) -> Column:
    """Return a column of numbers, the largest first; rows without one come last."""
    return Column(title, cell, lambda row: _descending(order(row)), width, is_number=True)


def _descending(value: float | None) -> float:
    return float("inf") if value is None else -value


def _count(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:,.0f}")


def _worker(row: WorkerRow) -> Entry:
    return Entry(row.worker, row, f"{row.worker} {row.env} {row.state} {row.reason}".lower(), env=row.env)


def _worker_columns(board: RunState) -> list[Column]:
    def cpu(row: WorkerRow) -> float | None:
        process = board.processes.get(row.worker) if row.pid else None
        return None if process is None else process.cpu_percent

    def cpu_cell(row: WorkerRow) -> Text:
        return Text("?" if (percent := cpu(row)) is None else f"{percent:.0f} %")

    return [
        Column("worker", lambda row: text(row.worker), lambda row: by_number(row.worker), 8),
        Column(
            "state",
            lambda row: text(row.state, STYLE_OF.get(row.state, "")),
            lambda row: (not row.is_unwell, row.state),
            8,
        ),
        _number("pid", 5, lambda row: Text(str(row.pid or "-")), lambda row: row.pid),
        _number(
            "age",
            5,
            lambda row: Text("-" if row.age_s is None else format.clock(row.age_s)),
            lambda row: row.age_s,
        ),
        _number("in hand", 7, lambda row: _count(row.in_hand), lambda row: row.in_hand),
        _number("produced", 8, lambda row: _count(row.produced), lambda row: row.produced),
        _number("abandoned", 9, lambda row: _count(row.abandoned), lambda row: row.abandoned),
        _number("silent", 6, _silent_cell, lambda row: row.silent_s),
        _number("cpu", 5, cpu_cell, cpu),
        _number("blocked", 7, _blocked_cell, lambda row: row.blocked_s),
        Column("last error", lambda row: text(row.reason, "red"), lambda row: (not row.reason, row.reason)),
    ]


def _silent_cell(row: WorkerRow) -> Text:
    style = "bold red" if row.is_silent else ""
    return Text("-" if row.silent_s is None else f"{row.silent_s:.1f} s", style=style)


def _blocked_cell(row: WorkerRow) -> Text:
    return Text("-" if row.blocked_s is None else format.clock(row.blocked_s))


class _Environment(NamedTuple):
    """An environment: its workers, their target and the reason, and its lane of training, or else of evaluation."""

    name: str
    ready: int
    workers: int
    target: int | None
    reason: str
    lane: LaneStatus | None


def _environments(board: RunState, now: float) -> list[_Environment]:
    targets = {one.env: one for one in board.targets()}
    lanes: dict[str, LaneStatus] = {}
    for lane in board.pressure.lanes if board.pressure is not None else ():
        if lane.split is Split.TRAIN or lane.env not in lanes:
            lanes[lane.env] = lane
    counts: dict[str, list[int]] = {}
    for row in board.crew(now):
        known = counts.setdefault(row.env, [0, 0])
        known[0] += row.counts_as == WorkerState.READY
        known[1] += row.state != WorkerState.GONE
    found = []
    for name in sorted({*targets, *lanes, *counts}):
        ready, workers = counts.get(name, (0, 0))
        target = targets.get(name)
        wanted, reason = (None, "") if target is None else (target.target, target.reason)
        found.append(_Environment(name, ready, workers, wanted, reason, lanes.get(name)))
    return found


def _environment(row: _Environment) -> Entry:
    wait = "" if row.lane is None else row.lane.wait
    return Entry(row.name, row, f"{row.name} {row.reason} {wait}".lower(), env=row.name)


def _of_lane(read: Callable[[LaneStatus], float | None]) -> Callable[[_Environment], float | None]:
    return lambda row: None if row.lane is None else read(row.lane)


def _rate_cell(row: _Environment) -> Text:
    return Text("-" if row.lane is None else f"{row.lane.accepted_per_s:.1f}")


def _reward_cell(row: _Environment) -> Text:
    reward = None if row.lane is None else row.lane.reward_mean
    return Text("-" if reward is None else f"{reward:.3f}")


_QUEUED: Final = _of_lane(lambda lane: lane.queued_groups)
_LEASED: Final = _of_lane(lambda lane: lane.leased_groups)
_WAITING: Final = _of_lane(lambda lane: lane.waiting)
_ENVIRONMENT_COLUMNS: Final = (
    Column("environment", lambda row: text(row.name), lambda row: by_number(row.name), 12),
    _number("ready", 5, lambda row: _count(row.ready), lambda row: row.ready),
    _number("workers", 7, lambda row: _count(row.workers), lambda row: row.workers),
    _number("target", 6, lambda row: _count(row.target), lambda row: row.target),
    _number("queued", 6, lambda row: _count(_QUEUED(row)), _QUEUED),
    _number("leased", 6, lambda row: _count(_LEASED(row)), _LEASED),
    _number("groups/s", 8, _rate_cell, _of_lane(lambda lane: lane.accepted_per_s)),
    _number("reward", 7, _reward_cell, _of_lane(lambda lane: lane.reward_mean)),
    _number("waiting", 7, lambda row: _count(_WAITING(row)), _WAITING),
    Column(
        "wait",
        lambda row: text("" if row.lane is None else row.lane.wait, "yellow"),
        lambda row: "" if row.lane is None else row.lane.wait,
    ),
    Column("decision", lambda row: text(row.reason, "dim"), lambda row: row.reason),
)


def _gpu(board: RunState, uuid: str) -> Entry:
    sample, standing = board.gpus.get(uuid), board.standings.get(uuid)
    line = gpus.line(sample, standing)
    is_cordoned = standing is not None and standing.cordoned
    return Entry(uuid, uuid, f"{uuid} {line}".lower(), gpu=uuid, is_cordoned=is_cordoned)


def _gpu_columns(board: RunState) -> list[Column]:
    def fine(uuid: str) -> bool:
        sample = board.gpus.get(uuid)
        return sample is None or gpus.is_fine(sample, board.standings.get(uuid))

    def use(uuid: str) -> float | None:
        sample = board.gpus.get(uuid)
        return None if sample is None else sample.utilisation_percent

    def memory(uuid: str) -> float | None:
        sample = board.gpus.get(uuid)
        return None if sample is None else sample.memory_used_bytes

    def memory_cell(uuid: str) -> Text:
        sample = board.gpus.get(uuid)
        if sample is None or sample.memory_used_bytes is None or not sample.memory_total_bytes:
            return Text("-")
        return Text(format.portion(sample.memory_used_bytes, sample.memory_total_bytes))

    def holders(uuid: str) -> str:
        standing = board.standings.get(uuid)
        return "" if standing is None else ", ".join(standing.holders)

    def note(uuid: str) -> str:
        return gpus.note(board.gpus.get(uuid), board.standings.get(uuid))

    return [
        Column("gpu", lambda uuid: text(uuid[: gpus.SHORT]), lambda uuid: uuid, gpus.SHORT),
        _number("use", 5, lambda uuid: Text("-" if use(uuid) is None else f"{use(uuid):.0f} %"), use),
        _number("memory", 14, memory_cell, memory),
        Column(
            "problem",
            lambda uuid: text(note(uuid), "" if fine(uuid) else "bold red"),
            lambda uuid: (fine(uuid), uuid),
        ),
        Column("workers", lambda uuid: text(holders(uuid)), holders),
    ]


class _Group(NamedTuple):
    """A group to explain: `about` says why it is listed."""

    group_id: str
    about: str
    env: str
    seconds: float | None
    at: float | None


def _groups(board: RunState, now: float) -> Iterable[_Group]:
    """Yield the slowest groups of the last minute, then those that ended last; each once."""
    seen = set()
    for slow in board.latencies.slowest(now):
        seen.add(slow.group_id)
        yield _Group(slow.group_id, f"slow {slow.hop.value}", slow.env, slow.seconds, None)
    ended: GroupEnd
    for ended in board.groups:
        if ended.group_id not in seen:
            seen.add(ended.group_id)
            yield _Group(ended.group_id, ended.outcome, "", None, ended.at)


def _group(row: _Group) -> Entry:
    return Entry(row.group_id, row, f"{row.group_id} {row.about} {row.env}".lower())


def _seconds_cell(row: _Group) -> Text:
    return Text("-" if row.seconds is None else f"{row.seconds:.2f} s")


_GROUP_COLUMNS: Final = (
    Column("group", lambda row: text(row.group_id), lambda row: row.group_id, 24),
    Column("listed as", lambda row: text(row.about), lambda row: row.about, 12),
    Column("environment", lambda row: text(row.env), lambda row: row.env, 11),
    _number("took", 9, _seconds_cell, lambda row: row.seconds),
    _number(
        "ended",
        8,
        lambda row: Text("-" if row.at is None else format.time_of_day(row.at)),
        lambda row: row.at,
    ),
)
