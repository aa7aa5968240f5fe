"""`rolloutmq simulate`: autoscaling controllers on simulated plants, with the same seeds.

rolloutmq   the controller of a run: demand divided by the throughput of one worker
ratio       the rule of Kubernetes' horizontal pod autoscaler
pid         proportional, integral, derivative
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.orchestrator.autoscaling.control_law import PressureController
from rolloutmq.services.orchestrator.autoscaling.decision_log import Replay, read, replay
from rolloutmq.services.orchestrator.simulation.baselines import PidRule, RatioRule
from rolloutmq.services.orchestrator.simulation.plant import PlantParameters
from rolloutmq.services.orchestrator.simulation.plot import draw
from rolloutmq.services.orchestrator.simulation.scenarios import all_scenarios, trace
from rolloutmq.services.orchestrator.simulation.trial import Make, Scenario, try_out
from rolloutmq.services.orchestrator.simulation.verdict import Figure, Verdict, judged

RIVALS_SETPOINT: Final = 5.0
"""Batches that `ratio` and `pid` keep queued: with fewer they starve the trainer earlier."""
LONGEST_S: Final = 7 * 86_400.0
LONGEST_START_S: Final = 3600.0
FASTEST: Final = 1e6
"""Sequences per second."""
LAWS: Final[dict[str, Make]] = {
    "rolloutmq": lambda one: PressureController(one.min_workers, one.max_workers, ScalingConfig()),
    "ratio": lambda one: RatioRule(one.min_workers, one.max_workers, RIVALS_SETPOINT),
    "pid": lambda one: PidRule(one.min_workers, one.max_workers, RIVALS_SETPOINT),
}
_HEAD: Final = (
    "scenario",
    "start",
    "law",
    "settle s",
    "peak",
    "flips",
    "moves",
    "starved s",
    "blocked s",
    "",
)
_WIDTHS: Final = (15, 6, 10, 22, 12, 8, 12, 12, 14, 0)


def simulate(
    starts_s: Sequence[float],
    seeds: int,
    only: Sequence[str],
    recorded: Path | None,
    *,
    picture: Path | None = None,
    as_json: bool = False,
) -> None:
    """Run every controller on every scenario, and print median and worst seed of each figure.

    Args:
        starts_s: Start-up times of workers, in seconds.
        seeds: Trials of each.
        only: Names of scenarios; all if empty.
        recorded: Demand trace as CSV: seconds, and sequences consumed per second.
        picture: File for a plot of the first seed.
        as_json: Print one JSON list instead of a table.

    Raises:
        ConfigError: Unknown scenario, invalid trace or unsupported picture format.
        MissingError: A picture needs matplotlib.
    """
    scenarios = list(_chosen(starts_s, only, recorded))
    if picture is not None:
        try:
            draw(scenarios, LAWS, picture)
        except (OSError, ValueError) as error:
            raise ConfigError("picture", f"{picture}: {error}") from None
    verdicts = _verdicts(scenarios, seeds)
    if as_json:
        json.dump([asdict(one) for one in verdicts], sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    sys.stdout.write(_line(_HEAD))
    for one in verdicts:
        sys.stdout.write(_line(_cells(one)))
        sys.stdout.flush()


def decide_again(recorded: Path, *, as_json: bool = False) -> int:
    """Recompute the decisions of a run and compare them with the recorded ones; return 1 if they differ.

    Args:
        recorded: `decisions.jsonl` of a run, or its run directory.
        as_json: Print one JSON object.

    Raises:
        ConfigError: The file is not a decision log.
    """
    path = RunLayout(recorded).decisions if recorded.is_dir() else recorded
    try:
        again = replay(read(path))
    except (OSError, ValueError) as error:
        raise ConfigError("replay", str(error)) from None
    if as_json:
        json.dump(asdict(again), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("".join(_replay_lines(again)))
    return int(again.differences > 0)


def _replay_lines(again: Replay) -> Iterator[str]:
    yield f"{again.decisions} decisions, {again.differences} of them different from the record\n"
    if again.orphans:
        yield f"{again.orphans} more without the inputs they followed from\n"
    if again.first is not None:
        recorded, now = again.first.recorded, again.first.now
        yield f"first difference in {recorded.env} at {recorded.now:.1f} s:\n"
        yield f"  recorded {recorded.decision.target}: {recorded.decision.reason}\n"
        yield f"  now      {now.target}: {now.reason}\n"


def _chosen(starts_s: Sequence[float], only: Sequence[str], recorded: Path | None) -> Iterator[Scenario]:
    for start_s in starts_s:
        if not 0.0 <= start_s <= LONGEST_START_S:
            raise ConfigError("start", f"must be 0 to {LONGEST_START_S:g} s (got {start_s:g})")
        if recorded is not None:
            rows = _rows(recorded)
            site = PlantParameters(start_s=start_s)
            yield Scenario(recorded.name, trace(rows), site, lasts_s=rows[-1][0] - rows[0][0])
            continue
        known = {one.name: one for one in all_scenarios(start_s)}
        if unknown := set(only) - known.keys():
            raise ConfigError(
                "scenario", f"unknown (got {min(unknown)!r}); use one of {', '.join(map(repr, known))}"
            )
        yield from (known[name] for name in only or known)


def _rows(recorded: Path) -> list[tuple[float, float]]:
    """Read a demand trace; its times count from the first row."""
    try:
        with recorded.open(newline="") as file:
            found = [tuple(map(float, row[:2])) for row in csv.reader(file) if row and not _is_head(row)]
    except (OSError, ValueError) as error:
        raise ConfigError("trace", f"{recorded}: {error}") from None
    rows = [(row[0] - found[0][0], row[1]) for row in found if len(row) == 2]
    if len(rows) < 2 or len(rows) < len(found):
        raise ConfigError("trace", f"{recorded}: needs at least two rows of seconds and sequences per second")
    times = [at for at, _ in rows]
    if times != sorted(set(times)) or times[-1] > LONGEST_S:
        raise ConfigError("trace", f"{recorded}: seconds must increase and span at most a week")
    if not all(0.0 <= rate <= FASTEST for _, rate in rows):
        raise ConfigError("trace", f"{recorded}: sequences per second must be 0 to {FASTEST:g}")
    return rows


def _is_head(row: list[str]) -> bool:
    return not any(character.isdigit() for character in row[0])


def _verdicts(scenarios: Sequence[Scenario], seeds: int) -> Iterator[Verdict]:
    for scenario in scenarios:
        for law, make in LAWS.items():
            yield judged(scenario, law, [try_out(scenario, make, seed) for seed in range(seeds)])


def _cells(one: Verdict) -> tuple[str, ...]:
    return (
        one.scenario,
        f"{one.start_s:g} s",
        one.law,
        " ".join(map(_figure, one.settle_s)),
        f"{_figure(one.peak)} of {one.ideal}",
        _figure(one.flips),
        f"{_figure(one.moves)} of {one.least_moves}",
        _figure(one.starved_s),
        _figure(one.blocked_s),
        f"breaks: {', '.join(one.broken)}" if one.broken else "",
    )


def _figure(figure: Figure) -> str:
    return f"{figure.median:.0f}/{figure.worst:.0f}"


def _line(cells: Sequence[Any]) -> str:
    return "".join(f"{cell:<{width}} " for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip() + "\n"
