"""`report.png`: reward, pressure, staleness and workers of a run on one time axis.

Panels share the time axis, so that cause and effect line up: a killed worker (mark) lowers the workers, then the
pressure, and the reward should not change. A fifth panel has the figures of learning, if the trainer told any. Drawing
needs no display. matplotlib is imported on demand, and `write_report` raises `MissingError` if it is not installed.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.evaluation.log import in_force, recorded
from rolloutmq.bus.files import private_file
from rolloutmq.bus.rundir import read_lives
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import pauses
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.services.monitor.report.metrics import MarkKind, Metrics, bounds_in_force, read_metrics
from rolloutmq.services.monitor.report.settled_log import TrainerLog, mean, read_settled
from rolloutmq.services.plotting import (
    AMBER,
    BLUE,
    BROWN,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    RED,
    VIOLET,
    blank,
    dress,
    name_text,
)

_Series = tuple[list[float], list[float]]

WIDTH_PX: Final = 1200
HEIGHT_PX: Final = 1000
DPI: Final = 150
COLOURS: Final = (BLUE, ORANGE, GREEN, VIOLET, BROWN, RED, AMBER, INK)
"""Colours of the first figures of learning; more would not be told apart."""
SMOOTHED_STEPS: Final = 20
"""Window of the reward curve: one step has only 16 groups, so it is noisy."""


def write_report(
    layout: RunLayout, config: RunConfig, summary: dict[str, Any], to: Path, metrics: Metrics | None = None
) -> None:
    """Draw a run.

    Args:
        layout: Location of the logs of batches, and of `metrics.jsonl`.
        config: Source of setpoint and bound.
        summary: Key figures for the title, as returned by `summarise`.
        to: The picture (.png).
        metrics: Series of `metrics.jsonl`. Default: they are read.

    Raises:
        MissingError: matplotlib is not installed.
        DamagedFileError: A log of batches is damaged.
    """
    figure = blank(WIDTH_PX / DPI, HEIGHT_PX / DPI, DPI)
    metrics = metrics or read_metrics(layout.metrics)
    log = read_settled(layout)
    heights = (3.2, 2.0, 1.4, 1.4, *([1.4] if metrics.figures else []))
    panels = figure.subplots(
        len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights, "hspace": 0.16}
    )
    figure.subplots_adjust(left=0.085, right=0.975, top=0.865, bottom=0.07)
    start = _start(metrics, log)
    down = [end - start for end, _ in pauses(read_lives(layout))]
    _title(figure, config, summary)
    evaluated = _evaluated(in_force(recorded(layout.evaluations)), start)
    _reward(panels[0], log, evaluated, start)
    _pressure(panels[1], metrics, config, start, down)
    _staleness(panels[2], log, bounds_in_force(config, metrics.bounds), start)
    _workers(panels[3], metrics, start, down)
    _marks(panels[:4], metrics, log, start)
    if metrics.figures:
        _learning(panels[4], metrics, start)
    for panel in panels:
        dress(panel)
        panel.yaxis.get_major_locator().set_params(nbins=4, integer=False)
    panels[-1].set_xlabel("seconds since the first event", color=QUIET, fontsize=7)
    with private_file(to, "wb") as file:
        figure.savefig(file, format="png", dpi=DPI)


def _start(metrics: Metrics, log: TrainerLog) -> float:
    times = [batch.at for batch in log.batches[:1]] + ([metrics.first_t] if metrics.first_t else [])
    return min(times, default=0.0)


def _title(figure: Any, config: RunConfig, summary: dict[str, Any]) -> None:
    figure.text(
        0.085, 0.96, name_text(config.run.name), fontsize=13, fontweight="bold", color=INK, va="center"
    )
    figure.text(0.085, 0.92, key_figures(summary), fontsize=7.5, color=QUIET, va="center")


def key_figures(summary: dict[str, Any]) -> str:
    """Return the figures of the title; those missing from the summary are left out."""
    parts = []
    if summary.get("reward_last") is not None:
        parts.append(f"reward {summary['reward_first']:.2f} to {summary['reward_last']:.2f}")
    if summary.get("steps"):
        parts.append(f"{summary['steps']} steps in {summary.get('wall_s', 0):.0f} s")
    if "groups_accepted" in summary:
        parts.append(f"{summary['groups_accepted']:,} groups accepted")
        # None if nothing says it: the trainer is not ours.
        if (lost := summary.get("groups_lost", 0)) is not None:
            parts.append(f"{lost} lost")
        if (twice := summary.get("groups_trained_twice", 0)) is not None:
            parts.append(f"{twice} trained twice")
    if summary.get("staleness_bound") is not None and summary.get("staleness_max", 0) is not None:
        parts.append(f"staleness {summary.get('staleness_max', 0)} of {bound_text(summary)}")
    if summary.get("late_members"):
        parts.append(f"{summary['late_members']:,} late members")
    return "   ·   ".join(parts)


def bound_text(summary: dict[str, Any]) -> str:
    """Return the bound in force at the end, and the largest earlier one if it differs."""
    bound = summary["staleness_bound"]
    most = summary.get("staleness_bound_max", bound)
    return f"{bound}" if most == bound else f"{bound}, {most} before"


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving average over `window` values, over fewer at the ends."""
    sums = [0.0, *accumulate(values)]
    out = []
    for index in range(len(values)):
        first, last = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        out.append((sums[last] - sums[first]) / (last - first))
    return out


def _broken(times: Sequence[float], values: Sequence[float], breaks: Sequence[float]) -> _Series:
    """Return the series with a gap at each break, so that no line spans time without a trainer or without a run."""
    points = sorted([*zip(times, values, strict=True), *((at, math.nan) for at in breaks)])
    return [at for at, _ in points], [value for _, value in points]


def _evaluated(points: Sequence[EvaluationDone], start: float) -> _Series:
    """Return times and mean scores of the evaluation: of the greedy answers, or else of the sampled ones."""
    scores = [one.all.mean if one.all.greedy is None else one.all.greedy for one in points]
    found = [(one.at - start, score) for one, score in zip(points, scores, strict=True) if score is not None]
    return [at for at, _ in found], [score for _, score in found]


def _reward(panel: Any, log: TrainerLog, evaluated: _Series, start: float) -> None:
    points = log.step_points()
    times = [at - start for at, _ in points]
    rewards = [reward for _, reward in points]
    breaks = [at - start for at in log.resumed_at]
    void = [(batch.at - start, mean(batch.rewards)) for batch in log.voided if batch.rewards]
    lost = [reward for _, reward in void]
    panel.plot([t for t, _ in void], lost, ".", color=QUIET, alpha=0.6, markersize=2)
    panel.plot(*_broken(times, rewards, breaks), color=BLUE, alpha=0.25, linewidth=0.8)
    panel.plot(*_broken(times, smoothed(rewards, SMOOTHED_STEPS), breaks), color=BLUE, linewidth=1.8)
    panel.plot(*evaluated, "D", color=GREEN, markersize=4)
    if shown := [*rewards, *lost, *evaluated[1]]:
        panel.set_ylim(min(0.0, *shown) - 0.03, max(1.0, *shown) + 0.05)
    retaken = "; grey: steps taken again" if void else ""
    diamonds = "; diamonds: evaluation" if evaluated[0] else ""
    about = f"mean raw score of a step; bold: mean of {SMOOTHED_STEPS}{retaken}{diamonds}"
    _label(panel, "reward", about, BLUE)


def _pressure(panel: Any, metrics: Metrics, config: RunConfig, start: float, down: Sequence[float]) -> None:
    setpoint = config.orchestrator.scaling.setpoint_batches
    low, high = setpoint / 2.0, setpoint * 2.0
    points = metrics.pressures.points()
    times = [point.t - start for point in points]
    values = [point.pressure for point in points]
    panel.axhspan(low, high, color=AMBER, alpha=0.16, linewidth=0)
    panel.plot(*_broken(times, values, down), color=ORANGE, linewidth=1.1)
    panel.set_ylim(0, max([high * 1.15, *values]) * 1.03)
    _label(panel, "rollout pressure", "batches queued; shaded: half to twice the setpoint", ORANGE)


def _staleness(panel: Any, log: TrainerLog, bounds: Sequence[tuple[float, int]], start: float) -> None:
    points = [
        (batch.at - start, max(batch.staleness), mean(batch.staleness))
        for batch in log.batches
        if batch.staleness
    ]
    times = [t for t, _, _ in points]
    worst = [most for _, most, _ in points]
    end = max([0.0, *times])
    since = [min(end, max(0.0, t - start)) for t, _ in bounds]
    limits = [bound for _, bound in bounds]
    if bounds:
        style: dict[str, Any] = {"color": RED, "linewidth": 0.9, "linestyle": (0, (4, 3))}
        panel.plot([*since, max(end, 1.0)], [*limits, limits[-1]], drawstyle="steps-post", **style)
    panel.plot(times, worst, ".", color=VIOLET, alpha=0.45, markersize=2.2)
    breaks = [at - start for at in log.resumed_at]
    panel.plot(
        *_broken(times, smoothed([value for _, _, value in points], SMOOTHED_STEPS), breaks),
        color=VIOLET,
        linewidth=1.4,
    )
    panel.set_ylim(-0.3, max([1, *limits, *worst]) + 0.8)
    _label(panel, "staleness", "policy versions; dots: largest of a step, line: mean, dashed: bound", VIOLET)


def _workers(panel: Any, metrics: Metrics, start: float, down: Sequence[float]) -> None:
    points = metrics.pressures.points()
    times = [point.t - start for point in points]
    ready = _broken(times, [point.ready for point in points], down)
    total = [point.ready + point.draining for point in points]
    panel.fill_between(*ready, step="post", color=GREEN, alpha=0.18, linewidth=0)
    panel.plot(*_broken(times, total, down), drawstyle="steps-post", color=BROWN, linewidth=1.0, alpha=0.9)
    panel.plot(*ready, drawstyle="steps-post", color=GREEN, linewidth=1.6)
    panel.set_ylim(0, max([2, *total]) * 1.5)
    _label(panel, "workers", "green: ready, amber: with those that drain", GREEN)


def _learning(panel: Any, metrics: Metrics, start: float) -> None:
    """Draw each figure of learning over its own range: their scales differ by magnitudes."""
    for colour, (name, course) in zip(COLOURS, metrics.figures.items(), strict=False):
        curve = course.curve()
        values = smoothed(curve.values, max(1, SMOOTHED_STEPS // curve.steps_per_point))
        low, high = min(values), max(values)
        scaled = [(value - low) / (high - low) if high > low else 0.5 for value in values]
        label = f"{name_text(name)} {values[0]:.3g} to {values[-1]:.3g}"
        panel.plot([t - start for t in curve.times], scaled, color=colour, linewidth=1.1, label=label)
    panel.set_ylim(-0.08, 1.08)
    panel.tick_params(left=False, labelleft=False)
    panel.legend(
        loc="center left", bbox_to_anchor=(0.0, 0.5), fontsize=5.5, frameon=False, labelcolor="linecolor"
    )
    _label(panel, "learning", f"each over its own range, mean of {SMOOTHED_STEPS} steps", BLUE)


def _marks(panels: Sequence[Any], metrics: Metrics, log: TrainerLog, start: float) -> None:
    """Mark the events of workers and trainer during training."""
    end = log.batches[-1].at if log.batches else metrics.last_t
    top = panels[-1].get_ylim()[1]
    for index, mark in enumerate(mark for mark in metrics.marks if mark.t <= end):
        colour = BROWN if mark.kind is MarkKind.DRAINED else RED
        for panel in panels:
            panel.axvline(mark.t - start, color=colour, linewidth=0.8, alpha=0.55, zorder=1)
        # Alternate two heights, so that the labels of neighbouring marks do not overlap.
        place = (mark.t - start, top * (0.97 - 0.14 * (index % 2)))
        panels[-1].annotate(
            f" {name_text(mark.worker)} {mark.kind}", place, fontsize=6, color=colour, va="top"
        )
    for at in log.resumed_at:
        for panel in panels:
            panel.axvline(at - start, color=INK, linewidth=0.8, alpha=0.5, linestyle=(0, (2, 2)))
        top = panels[0].get_ylim()[1]
        panels[0].annotate(" trainer resumed", (at - start, top * 0.06), fontsize=6, color=INK)


def _label(panel: Any, name: str, meaning: str, colour: str) -> None:
    panel.set_title(name, loc="left", fontsize=8, fontweight="bold", color=colour, pad=3)
    panel.set_title(meaning, loc="right", fontsize=6.5, color=QUIET, pad=3)
