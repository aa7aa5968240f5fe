"""The run state rendered as terminal lines. Pure: nothing here draws or reads a clock.

Each line is independent, is cut rather than wrapped, and starts with its most important part, so that a narrow
terminal shows less and nothing jumps. The worker table takes the remaining height, workers in trouble first.
"""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.control import Pressure, WorkerState
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.telemetry import EngineSample, GpuSample
from rolloutmq.services.monitor.live import panel_view
from rolloutmq.services.monitor.live.listings import STYLE_OF, text
from rolloutmq.services.monitor.live.panel import Mode, Panel
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.report import evaluation
from rolloutmq.services.monitor.report.latencies import SHOWN, LatencyKey
from rolloutmq.services.monitor.status import counts, curricula, gpus, waits
from rolloutmq.services.monitor.status.worker_view import WorkerRow, target_text, trouble_text
from rolloutmq.services.monitor.text import figures, format, network, nodes

LABEL_WIDTH: Final = 9
GAUGE_WIDTH: Final = 16
INTEREST: Final = ("trainer", "inference", "broker", "orchestrator", "telemetry")
ACCENT: Final = "bold cyan"
QUIET: Final = "dim"
GPUS_APART: Final = 4
GPUS_SHOWN: Final = 6
"""Maximum number of GPU lines, so that the workers keep their place."""
ENGINES_APART: Final = 4
TARGETS_SHOWN: Final = 3
UNWELL_SHOWN: Final = 3
CURRICULA_SHOWN: Final = 3
FINDINGS_SHOWN: Final = 3
LATENCIES_SHOWN: Final = 3
TABLE_LINES: Final = 8
"""Least lines of an operator's table, with its tabs and its head: figures give way to it."""


def frame(board: RunState, now: float, width: int, height: int, panel: Panel | None = None) -> Group:
    """Return the whole frame, at most `height` lines of `width` cells; with a panel, also the operator's part."""
    if panel is not None:
        return _operated(board, panel, now, width, height)
    above, below = figure_rows(board, now, width)
    crew = board.crew(now)
    room = height - len(above) - len(below) - 2
    table = worker_table(board, crew, room - 1, width)
    lines: list[RenderableType] = [*above, Text(), *below]
    if table is not None:
        lines[len(above) + 1 : len(above) + 1] = [table, Text()]
    return Group(*lines[: max(1, height)])


def _operated(board: RunState, panel: Panel, now: float, width: int, height: int) -> Group:
    """Return the frame of an operator. The last line is always there; of the figures, the least important are cut."""
    panel.targets = {one.env: one.target for one in board.targets()}
    above, below = figure_rows(board, now, width)
    foot = panel_view.last_line(panel, now)
    room = max(0, height - 1)
    if not room:
        return Group(foot)
    if panel.mode in {Mode.HELP, Mode.TEXT}:
        head = above[:1] if room > 2 else []
        left = room - len(head)
        body = (
            panel_view.read_lines(panel, left, width) if panel.mode is Mode.TEXT else panel_view.help_lines()
        )
        return Group(*_padded([*head, *body[:left]], room), foot)
    # A short table leaves its room to the figures; the rows of the last frame say how long it is.
    kept = max(0, room - min(TABLE_LINES, panel.total + 2) - 2)
    above = above[: max(1, kept)]
    below = below[: max(0, kept - len(above))]
    gap = [Text()] if below else []
    left = room - len(above) - len(below) - len(gap)
    table = panel_view.table_lines(board, panel, now, left, width)
    return Group(*above, *_padded(table, left), *gap, *below, foot)


def _padded(lines: Sequence[RenderableType], room: int) -> list[RenderableType]:
    return [*lines, *(Text() for _ in range(room - len(lines)))]


def figure_rows(board: RunState, now: float, width: int) -> tuple[list[Text], list[Text]]:
    """Return the lines above and below the workers, each with the most important ones first."""
    above = [
        header(board, now, width),
        *notice_lines(board),
        reward_line(board, width),
        *figure_lines(board),
        *evaluation_lines(board, now),
    ]
    below: list[Text] = []
    pressure = board.pressure
    if pressure is None:
        above.append(_row("broker", Text("not connected yet", style=QUIET)))
    else:
        if pressure.insecure:
            above.append(_row("insecure", text(format.insecure(pressure.insecure), "bold red")))
        if pressure.unencrypted:
            above.append(_row("insecure", text(format.unencrypted(pressure.unencrypted), "bold red")))
        above += [
            queue_line(board, pressure),
            flow_line(board, pressure),
            *wait_lines(board, pressure, now),
        ]
        below += ledger_lines(pressure)
        below += curriculum_lines(board)
    below += latency_lines(board, now)
    below += engine_lines(board, now)
    below += network_lines(board)
    above += target_lines(board)
    above += health_lines(board, now)
    below[:0] = trouble_lines(board.crew(now))
    below += machine_lines(board)
    return above, below


def _row(label: str, *parts: Text | str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f" {label:<{LABEL_WIDTH - 1}}", style=QUIET)
    for part in parts:
        line.append_text(part if isinstance(part, Text) else text(part))
    return line


def header(board: RunState, now: float, width: int) -> Text:
    """Return the title line: name, step, progress, rate and times."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(" RolloutMQ ", style="bold reverse cyan").append(f" {printable(board.name)} ", style="bold")
    rate, left = board.steps_per_s(now), board.left_s(now)
    tail = f"  {rate:.1f} steps/s  {format.clock(board.elapsed_s(now))}"
    if left is not None:
        tail += f"  ({format.clock(left)} left)"
    done, total = board.steps_done, board.total_steps
    count = f" step {done}/{total} " if total else f" step {done} "
    line.append(count, style=ACCENT)
    cells = min(24, width - line.cell_len - len(tail) - 1)
    if total and cells >= 6:
        line.append(format.bar(done / total, cells), style="cyan on grey23")
    return line.append(tail)


def reward_line(board: RunState, width: int) -> Text:
    """Return the reward and its course since the start."""
    reward = board.reward()
    if reward is None:
        return _row("reward", Text("no step yet", style=QUIET))
    rewards = board.rewards()
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    tail = f"  staleness {board.step.staleness_max if board.step else 0} of {board.staleness_bound}"
    cells = max(0, min(48, width - LABEL_WIDTH - 9 - len(tail) - 1))
    course = format.sparkline(rewards, cells, low, high)
    return _row("reward", Text(f"{reward:6.3f}  ", style=ACCENT), Text(course, style="green"), tail)


def health_lines(board: RunState, now: float) -> list[Text]:
    """Return the findings about the rewards of environments, with what to do."""
    found = board.findings(now)
    rows = [
        _row(
            "health",
            text(f"{one.env}: {one.problem}", "green" if one.finding == "solved" else "bold yellow"),
            text(f"; {one.remedy}", QUIET),
        )
        for one in found[:FINDINGS_SHOWN]
    ]
    if more := len(found) - FINDINGS_SHOWN:
        rows += [_row("health", f"and {more} more: rolloutmq tail telemetry.health.")] if more > 0 else []
    return rows


def figure_lines(board: RunState) -> list[Text]:
    """Return the last figures of learning, if the trainer told any."""
    if not board.figures and not board.not_finite:
        return []
    line = text(figures.line(board.figures, board.not_finite), "bold red" if board.not_finite else "")
    return [_row("figures", line)]


def evaluation_lines(board: RunState, now: float) -> list[Text]:
    """Return the last point of the evaluation and its cost, if there was one, and the points left out."""
    point = board.evaluation
    left = [_row("eval", text(board.left_out, "yellow"))] if board.left_out else []
    if point is None:
        return left
    scores = text(evaluation.point_text(point), ACCENT)
    return [
        _row(
            "eval",
            scores,
            f" · {evaluation.policies(point)}",
            Text(f" · {_evaluation_cost(board, point, now)}", style=QUIET),
        ),
        *left,
    ]


def _evaluation_cost(board: RunState, point: EvaluationDone, now: float) -> str:
    """Return the time of all points, and its part of the run so far: the last point has that of its own time."""
    total_s, ran_s = point.total_s or point.seconds, board.elapsed_s(now)
    return evaluation.cost_text(total_s, min(1.0, total_s / ran_s) if ran_s > total_s else point.share)


def queue_line(board: RunState, pressure: Pressure) -> Text:
    """Return pressure with its target band, groups, and bytes of the high-water mark."""
    value = pressure.rollout_pressure
    held = pressure.queued_bytes + pressure.leased_bytes
    style = _band_style(board, value)
    return _row(
        "queue",
        gauge(board, value, style),
        Text(f" {value:.2f} ", style=f"bold {style}"),
        f"batches ({board.low:g} to {board.high:g})",
        Text(f" · {counts.queued(pressure)} · {format.portion(held, pressure.high_bytes)}", style=QUIET),
    )


def _band_style(board: RunState, value: float) -> str:
    if value < board.low:
        return "yellow"
    return "green" if value <= board.high else "magenta"


def gauge(board: RunState, value: float, style: str) -> Text:
    """Return the pressure as a bar over a scale with the target band shaded."""
    scale = board.high * 4 / 3
    filled = format.bar(value / scale if scale > 0 else 0.0, GAUGE_WIDTH)
    line = Text("▕")
    for cell, char in enumerate(filled):
        middle = (cell + 0.5) / GAUGE_WIDTH * scale
        shade = "grey35" if board.low <= middle <= board.high else "grey15"
        line.append(char, style=f"{style} on {shade}")
    return line.append("▏")


def flow_line(board: RunState, pressure: Pressure) -> Text:
    """Return sequences per second in and out, and the time spent waiting so far, over all lives of the broker."""
    rates = f"in {pressure.produced_per_s:,.0f} · out {pressure.consumed_per_s:,.0f} sequences/s"
    waited = sorted(board.waited().waits_s.items(), key=lambda item: -item[1])
    costs = " · ".join(f"{reason} {seconds:.0f} s" for reason, seconds in waited if seconds >= 1)
    return _row("flow", rates, text(f" · waited: {costs}" if costs else "", QUIET))


def wait_lines(board: RunState, pressure: Pressure, now: float) -> list[Text]:
    """Return why the trainer and the workers wait."""
    if silent := board.silent_s(now):
        return [
            _row("broker", Text(f"silent for {silent:.0f} s: the values shown are stale", style="bold red"))
        ]
    rows = [_trainer_line(board, pressure, now)]
    if reason := waits.workers(pressure, board.unserved, board.counts(now)):
        rows.append(_row("workers", "wait: ", text(reason, "yellow")))
    else:
        rows.append(_row("workers", _activity(board, now)))
    if trouble := network.engine_trouble(board.network, pressure.workers):
        rows.append(_row("engines", text(trouble, "yellow")))
    return rows


def _activity(board: RunState, now: float) -> Text:
    states = board.counts(now)
    if states[WorkerState.READY]:
        return Text("rolling out", style="green")
    return Text(", ".join(f"{count} {state}" for state, count in states.items()) or "none", style=QUIET)


def _trainer_line(board: RunState, pressure: Pressure, now: float) -> Text:
    if problem := board.trainer_trouble().text:
        return _row("trainer", text(problem, "bold red"))
    if reason := board.outside or waits.trainer(pressure, board.counts(now)):
        return _row("trainer", "waits: ", text(reason, "yellow"))
    if not board.steps_done and not pressure.ledger.leased:
        return _row("trainer", Text("no batch pulled yet", style=QUIET))
    return _row("trainer", Text("training", style="green"))


def notice_lines(board: RunState) -> list[Text]:
    """Return the notice, and those of a silent orchestrator and of a record that is not written, if there are any."""
    rows = [_row("run", text(board.notice, "bold red"))] if board.notice else []
    if board.orchestrator:
        rows.append(_row("orch", text(f"orchestrator {board.orchestrator}", "bold red")))
    if board.record:
        rows.append(_row("metrics", text(board.record, "bold red")))
    return rows


def target_lines(board: RunState) -> list[Text]:
    """Return target count and reason of each environment, cut after the first few."""
    targets = board.targets()
    rows = [_row("scale" if one is targets[0] else "", f"{one.env}: ", target_text(one)) for one in targets]
    more = len(rows) - TARGETS_SHOWN
    return rows if more <= 0 else [*rows[:TARGETS_SHOWN], _row("", Text(f"… {more} more", style=QUIET))]


def trouble_lines(crew: Sequence[WorkerRow]) -> list[Text]:
    """Return the problems of unwell workers, cut after the first few."""
    unwell = [row for row in crew if row.is_unwell]
    rows = [
        _row("unwell" if row is unwell[0] else "", f"{row.worker}: ", text(trouble_text(row), "red"))
        for row in unwell[:UNWELL_SHOWN]
    ]
    more = len(unwell) - UNWELL_SHOWN
    return rows if more <= 0 else [*rows, _row("", Text(f"… {more} more", style=QUIET))]


def worker_table(board: RunState, crew: Sequence[WorkerRow], rows: int, width: int) -> Table | None:
    """Return a row for each worker that fits; None without room or workers."""
    if not crew or rows < 1:
        return None
    shown = crew if len(crew) <= rows else _most_relevant(crew, rows - 1)
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


def _worker_cells(board: RunState, row: WorkerRow) -> list[Text]:
    process = board.processes.get(row.worker) if row.pid else None
    troubled = "bold red" if row.is_silent else ""
    return [
        text(f" {row.worker}"),
        text(row.state, STYLE_OF.get(row.state, "")),
        Text(str(row.pid or "-")),
        Text("-" if row.age_s is None else format.clock(row.age_s)),
        *(Text("-" if count is None else str(count)) for count in (row.in_hand, row.produced)),
        Text("-" if row.abandoned is None else str(row.abandoned), style="yellow" if row.abandoned else ""),
        Text("-" if row.silent_s is None else f"{row.silent_s:.1f} s", style=troubled),
        Text(f"{process.cpu_percent:.0f} %" if process else "?"),
        text(row.reason, "red"),
    ]


def _most_relevant(crew: Sequence[WorkerRow], count: int) -> list[WorkerRow]:
    def is_fine(row: WorkerRow) -> bool:
        return row.state == WorkerState.READY and not row.is_unwell

    chosen = {row.worker for row in sorted(crew, key=is_fine)[: max(0, count)]}
    return [row for row in crew if row.worker in chosen]


def ledger_lines(pressure: Pressure) -> list[Text]:
    """Return the ledger, and the counts beside it that need attention."""
    ledger = pressure.ledger
    lines = counts.lines(pressure, short=True)
    rows = [_row("" if number else "groups", line) for number, line in enumerate(lines)]
    extra = {"rewound": ledger.rewound, "lost before accept": ledger.lost_before_accept}
    if any(extra.values()):
        parts = (f"{what} {count}" for what, count in extra.items() if count)
        rows.append(_row("", Text(" · ".join(parts), style="yellow")))
    return rows


def latency_lines(board: RunState, now: float) -> list[Text]:
    """Return median and 99th percentile of the hops of each training environment, cut after the first few."""
    found = board.latencies.percentiles(now)
    envs = sorted({key.env for key in found if key.split is Split.TRAIN and key.hop in SHOWN})
    rows = []
    for env in envs[:LATENCIES_SHOWN]:
        known = [(hop, found[key]) for hop in SHOWN if (key := LatencyKey(env, Split.TRAIN, hop)) in found]
        parts = [f"{hop.value} {format.seconds_pair(one.p50_s, one.p99_s)}" for hop, one in known]
        label = "p50/p99" if env == envs[0] else ""
        rows.append(_row(label, text(f"{env or '(others)'}: ", QUIET), " · ".join(parts)))
    more = len(envs) - LATENCIES_SHOWN
    return rows if more <= 0 else [*rows, _row("", Text(f"… {more} more", style=QUIET))]


def curriculum_lines(board: RunState) -> list[Text]:
    """Return a line for each curriculum, cut after the first few."""
    known = [board.curricula[env] for env in sorted(board.curricula)]
    rows = [_row("sampler", curricula.line(one)) for one in known[:CURRICULA_SHOWN]]
    more = len(known) - CURRICULA_SHOWN
    return rows if more <= 0 else [*rows, _row("", Text(f"… {more} more", style=QUIET))]


def engine_lines(board: RunState, now: float) -> list[Text]:
    """Return a line for each engine, or one for many, and the last scaling decision if their number may change."""
    engines = board.engines(now)
    if len(engines) > ENGINES_APART:
        in_hand, busy = sum(one.in_hand for one in engines), sum(one.busy for one in engines) / len(engines)
        rows = [_row("engines", f"{len(engines)} · {in_hand} in hand · {busy:.0%} busy")]
    else:
        rows = [_engine_line(one) for one in engines]
    if (decision := board.engine_decision) is not None:
        count = f"{decision.current} of {decision.target} · "
        rows.append(_row("engines", count, text(decision.reason, QUIET)))
    return rows


def _engine_line(one: EngineSample) -> Text:
    draining = Text(" · draining", style=STYLE_OF[WorkerState.DRAINING]) if one.draining else ""
    load = f"{one.in_hand} in hand · {one.busy:.0%} busy"
    return _row("engine", f"{one.name} · {load}", draining, f" · pid {one.pid} · {one.url}")


def network_lines(board: RunState) -> list[Text]:
    """Return what is known of other hosts."""
    on_cluster = nodes.nodes_of(board.supervision)
    found = nodes.lines(on_cluster) + network.lines(board.network, board.workers(), nodes.placed(on_cluster))
    return [_row(label, text(line, "yellow" if is_unwell else "")) for label, line, is_unwell in found]


def machine_lines(board: RunState) -> list[Text]:
    """Return the host, its GPUs, and the processes except workers."""
    rows = []
    if (host := board.host) is not None:
        used = format.portion(host.memory_used_bytes, host.memory_total_bytes)
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


def gpu_lines(board: RunState) -> list[Text]:
    """Return a line for each GPU; on a host with many, only those with a problem, and one line for the rest."""
    known = sorted(board.gpus.values(), key=lambda gpu: (gpu.host, gpu.index))
    if len(known) <= GPUS_APART:
        return [_gpu_line(board, gpu) for gpu in known]
    troubled = [gpu for gpu in known if not gpus.is_fine(gpu, board.standings.get(gpu.uuid))]
    shown = troubled if len(troubled) <= GPUS_SHOWN else troubled[: GPUS_SHOWN - 1]
    rest = [gpu for gpu in known if gpu not in shown]
    rows = [_gpu_line(board, gpu) for gpu in shown]
    if rest:
        wrong = len(troubled) - len(shown)
        tail = f" · {wrong} more with problems" if wrong else ""
        rows.append(_row("gpu", f"{len(rest)} x {rest[0].name} · {gpus.figures_of(rest)}{tail}"))
    return rows


def _gpu_line(board: RunState, gpu: GpuSample) -> Text:
    standing = board.standings.get(gpu.uuid)
    fine = gpus.is_fine(gpu, standing)
    return _row("gpu", text(gpus.line(gpu, standing), "" if fine else "bold red"))


def _interest(name: str) -> tuple[int, str]:
    """Return the sort key of a process: likely bottlenecks first, in a fixed order."""
    return (INTEREST.index(name) if name in INTEREST else len(INTEREST), name)
