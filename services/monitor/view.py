"""The board as lines for a terminal: pure, nothing here draws or knows the time.

Each line stands alone, is cut rather than wrapped, and leads with what matters most, so that a narrow terminal shows
less of it and nothing jumps. Workers take the height that is left; those in trouble come first where not all fit.
"""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolloutmq.schemas.control import LedgerCounts, Pressure, WorkerState
from rolloutmq.schemas.telemetry import EngineSample, GpuSample
from rolloutmq.services.monitor import figures, gpus, waits
from rolloutmq.services.monitor.board import Board
from rolloutmq.services.monitor.crew import SILENT_S, WorkerRow, target_text, trouble_text

LABEL_WIDTH: Final = 9
GAUGE_WIDTH: Final = 16
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
INTEREST: Final = ("trainer", "inference", "broker", "orchestrator", "telemetry")
ACCENT: Final = "bold cyan"
QUIET: Final = "dim"
GPUS_APART: Final = 4
GPUS_SHOWN: Final = 6
"""Lines for GPUs at most, so that the workers keep their place."""
ENGINES_APART: Final = 4
TARGETS_SHOWN: Final = 3
UNWELL_SHOWN: Final = 3


def frame(board: Board, now: float, width: int, height: int) -> Group:
    """Return the whole picture, at most `height` lines of `width` cells."""
    above = [header(board, now, width), *notice_lines(board), reward_line(board, width)]
    below: list[Text] = []
    pressure = board.pressure
    if pressure is None:
        above.append(_row("broker", Text("no word from it yet", style=QUIET)))
    else:
        above += [
            queue_line(board, pressure),
            flow_line(pressure),
            *wait_lines(board, pressure, now),
        ]
        below += ledger_lines(pressure.ledger)
    below += engine_lines(board, now)
    above += target_lines(board)
    crew = board.crew(now)
    below[:0] = trouble_lines(crew)
    below += machine_lines(board)
    room = height - len(above) - len(below) - 2
    table = worker_table(board, crew, room - 1, width)
    lines: list[RenderableType] = [*above, Text(), *below]
    if table is not None:
        lines[len(above) + 1 : len(above) + 1] = [table, Text()]
    return Group(*lines[: max(1, height)])


def _row(label: str, *parts: Text | str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f" {label:<{LABEL_WIDTH - 1}}", style=QUIET)
    for part in parts:
        line.append_text(part if isinstance(part, Text) else Text(part))
    return line


def header(board: Board, now: float, width: int) -> Text:
    """Name, step of steps, progress, rate and times."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(" RolloutMQ ", style="bold reverse cyan").append(f" {board.name} ", style="bold")
    rate, left = board.steps_per_s(now), board.left_s(now)
    tail = f"  {rate:.1f} steps/s  {figures.clock(board.elapsed_s(now))}"
    if left is not None:
        tail += f"  ({figures.clock(left)} left)"
    done, total = board.steps_done, board.total_steps
    count = f" step {done}/{total} " if total else f" step {done} "
    line.append(count, style=ACCENT)
    cells = min(24, width - line.cell_len - len(tail) - 1)
    if total and cells >= 6:
        line.append(figures.bar(done / total, cells), style="cyan on grey23")
    return line.append(tail)


def reward_line(board: Board, width: int) -> Text:
    """Present reward, and its course since the start."""
    reward = board.reward()
    if reward is None:
        return _row("reward", Text("no step yet", style=QUIET))
    rewards = board.rewards()
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    tail = f"  staleness {board.step.staleness_max if board.step else 0} of {board.staleness_bound}"
    cells = max(0, min(48, width - LABEL_WIDTH - 9 - len(tail) - 1))
    course = figures.sparkline(rewards, cells, low, high)
    return _row("reward", Text(f"{reward:6.3f}  ", style=ACCENT), Text(course, style="green"), tail)


def queue_line(board: Board, pressure: Pressure) -> Text:
    """Pressure against where it should be, then groups and bytes against the mark."""
    value = pressure.rollout_pressure
    held = pressure.queued_bytes + pressure.leased_bytes
    style = _band_style(board, value)
    return _row(
        "queue",
        gauge(board, value, style),
        Text(f" {value:.2f} ", style=f"bold {style}"),
        f"batches ({board.low:g} to {board.high:g})",
        Text(
            f" · {pressure.queued_groups} groups · {figures.portion(held, pressure.high_bytes)}",
            style=QUIET,
        ),
    )


def _band_style(board: Board, value: float) -> str:
    if value < board.low:
        return "yellow"
    return "green" if value <= board.high else "magenta"


def gauge(board: Board, value: float, style: str) -> Text:
    """Draw the pressure as a bar over a scale on which is shaded where it should be."""
    scale = board.high * 4 / 3
    filled = figures.bar(value / scale if scale > 0 else 0.0, GAUGE_WIDTH)
    line = Text("▕")
    for cell, char in enumerate(filled):
        middle = (cell + 0.5) / GAUGE_WIDTH * scale
        shade = "grey35" if board.low <= middle <= board.high else "grey15"
        line.append(char, style=f"{style} on {shade}")
    return line.append("▏")


def flow_line(pressure: Pressure) -> Text:
    """Sequences in and out a second, and what waiting has cost so far."""
    rates = f"in {pressure.produced_per_s:,.0f} · out {pressure.consumed_per_s:,.0f} sequences/s"
    waited = sorted(pressure.waits_s.items(), key=lambda item: -item[1])
    costs = " · ".join(f"{reason} {seconds:.0f} s" for reason, seconds in waited if seconds >= 1)
    return _row("flow", rates, Text(f" · waited: {costs}" if costs else "", style=QUIET))


def wait_lines(board: Board, pressure: Pressure, now: float) -> list[Text]:
    """Why the trainer waits, and why the workers do."""
    if silent := board.silent_s(now):
        return [_row("broker", Text(f"silent for {silent:.0f} s: what is shown is old", style="bold red"))]
    rows = [_trainer_line(board, pressure)]
    if reason := waits.workers(pressure):
        rows.append(_row("workers", "wait: ", Text(reason, style="yellow")))
    else:
        working = Text("roll out", style="green") if board.workers() else Text("none yet", style=QUIET)
        rows.append(_row("workers", working))
    return rows


def _trainer_line(board: Board, pressure: Pressure) -> Text:
    if reason := board.unsent or waits.trainer(pressure):
        return _row("trainer", "waits: ", Text(reason, style="yellow"))
    if not board.steps_done and not pressure.ledger.leased:
        return _row("trainer", Text("has pulled nothing yet", style=QUIET))
    return _row("trainer", Text("has its batches", style="green"))


def notice_lines(board: Board) -> list[Text]:
    """What a person should know first, if anything."""
    return [_row("run", Text(board.notice, style="bold red"))] if board.notice else []


def target_lines(board: Board) -> list[Text]:
    """How many workers each environment shall have, and why; of many environments the first few."""
    targets = board.targets()
    rows = [_row("scale" if one is targets[0] else "", f"{one.env}: ", target_text(one)) for one in targets]
    more = len(rows) - TARGETS_SHOWN
    return rows if more <= 0 else [*rows[:TARGETS_SHOWN], _row("", Text(f"… {more} more", style=QUIET))]


def trouble_lines(crew: Sequence[WorkerRow]) -> list[Text]:
    """What is wrong with workers that are not well; of many the first few."""
    unwell = [row for row in crew if row.is_unwell]
    rows = [
        _row("unwell" if row is unwell[0] else "", f"{row.worker}: ", Text(trouble_text(row), style="red"))
        for row in unwell[:UNWELL_SHOWN]
    ]
    more = len(unwell) - UNWELL_SHOWN
    return rows if more <= 0 else [*rows, _row("", Text(f"… {more} more", style=QUIET))]


def worker_table(board: Board, crew: Sequence[WorkerRow], rows: int, width: int) -> Table | None:
    """One row for each worker, as many as fit; None if there is no room or no worker."""
    if not crew or rows < 1:
        return None
    shown = crew if len(crew) <= rows else _most_telling(crew, rows - 1)
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    table.add_column(" worker", no_wrap=True, min_width=LABEL_WIDTH)
    table.add_column("state", no_wrap=True)
    for title in ("pid", "age", "in hand", "produced", "abandoned", "silent", "cpu"):
        table.add_column(title, justify="right", no_wrap=True)
    if width >= 110:
        table.add_column("last error", no_wrap=True, overflow="ellipsis", max_width=width - 90)
    for row in shown:
        cells = _worker_cells(board, row)
        table.add_row(*cells[: len(table.columns)])
    if len(shown) < len(crew):
        table.add_row(f" … {len(crew) - len(shown)} more")
    return table


def _worker_cells(board: Board, row: WorkerRow) -> list[Text]:
    process = board.processes.get(row.worker) if row.pid else None
    troubled = "bold red" if (row.silent_s or 0.0) > SILENT_S else ""
    return [
        Text(f" {row.worker}"),
        Text(row.state, style=STYLE_OF[row.state]),
        Text(str(row.pid or "-")),
        Text("-" if row.age_s is None else figures.clock(row.age_s)),
        *(Text("-" if count is None else str(count)) for count in (row.in_hand, row.produced)),
        Text("-" if row.abandoned is None else str(row.abandoned), style="yellow" if row.abandoned else ""),
        Text("-" if row.silent_s is None else f"{row.silent_s:.1f} s", style=troubled),
        Text(f"{process.cpu_percent:.0f} %" if process else "?"),
        Text(row.reason, style="red"),
    ]


def _most_telling(crew: Sequence[WorkerRow], count: int) -> list[WorkerRow]:
    def is_fine(row: WorkerRow) -> bool:
        return row.state == WorkerState.READY and not row.is_unwell

    chosen = {row.worker for row in sorted(crew, key=is_fine)[: max(0, count)]}
    return [row for row in crew if row.worker in chosen]


def ledger_lines(ledger: LedgerCounts) -> list[Text]:
    """Where every accepted group is, and what is no place but worth knowing."""
    rows = [_row("groups", figures.accounts(ledger, short=True))]
    extra = {"rewound": ledger.rewound, "lost before accept": ledger.lost_before_accept}
    if any(extra.values()):
        told = (f"{what} {count}" for what, count in extra.items() if count)
        rows.append(_row("", Text(" · ".join(told), style="yellow")))
    return rows


def engine_lines(board: Board, now: float) -> list[Text]:
    """A line for each engine, or one for all where they are many; and what was decided, if their number may change."""
    engines = board.engines(now)
    if len(engines) > ENGINES_APART:
        in_hand, busy = sum(one.in_hand for one in engines), sum(one.busy for one in engines) / len(engines)
        rows = [_row("engines", f"{len(engines)} · {in_hand} in hand · {busy:.0%} busy")]
    else:
        rows = [_engine_line(one) for one in engines]
    if (decision := board.engine_decision) is not None:
        count = f"{decision.current} of {decision.target} · "
        rows.append(_row("engines", count, Text(decision.reason, style=QUIET)))
    return rows


def _engine_line(one: EngineSample) -> Text:
    draining = Text(" · draining", style=STYLE_OF[WorkerState.DRAINING]) if one.draining else ""
    load = f"{one.in_hand} in hand · {one.busy:.0%} busy"
    return _row("engine", f"{one.name} · {load}", draining, f" · pid {one.pid} · {one.url}")


def machine_lines(board: Board) -> list[Text]:
    """The host, its GPUs, and the processes that are no workers."""
    rows = []
    if (host := board.host) is not None:
        used = figures.portion(host.memory_used_bytes, host.memory_total_bytes)
        parts = [f"cpu {host.cpu_percent:.0f} % of {host.cpus} cores", f"memory {used}"]
        if board.gpu_absence is not None:
            parts.append("no GPU")
        rows.append(_row("host", " · ".join(parts)))
    rows += gpu_lines(board)
    names = {worker.worker for worker in board.workers()}
    others = sorted(board.processes.keys() - names, key=_interest)
    if others:
        loads = (f"{name} {board.processes[name].cpu_percent:.0f} %" for name in others)
        rows.append(_row("cpu", " · ".join(loads)))
    return rows


def gpu_lines(board: Board) -> list[Text]:
    """A line for each GPU; where they are many, for those alone with which something is wrong, and one for the rest."""
    known = sorted(board.gpus.values(), key=lambda gpu: (gpu.host, gpu.index))
    if len(known) <= GPUS_APART:
        return [_gpu_line(board, gpu) for gpu in known]
    troubled = [gpu for gpu in known if not gpus.is_fine(gpu, board.standings.get(gpu.uuid))]
    shown = troubled if len(troubled) <= GPUS_SHOWN else troubled[: GPUS_SHOWN - 1]
    rest = [gpu for gpu in known if gpu not in shown]
    rows = [_gpu_line(board, gpu) for gpu in shown]
    if rest:
        wrong = len(troubled) - len(shown)
        tail = f" · {wrong} more with something wrong" if wrong else ""
        rows.append(_row("gpu", f"{len(rest)} x {rest[0].name} · {gpus.figures_of(rest)}{tail}"))
    return rows


def _gpu_line(board: Board, gpu: GpuSample) -> Text:
    standing = board.standings.get(gpu.uuid)
    fine = gpus.is_fine(gpu, standing)
    return _row("gpu", Text(gpus.line(gpu, standing), style="" if fine else "bold red"))


def _interest(name: str) -> tuple[int, str]:
    """Sort key of a process: those that may be the bottleneck first, at places that never change."""
    return (INTEREST.index(name) if name in INTEREST else len(INTEREST), name)
