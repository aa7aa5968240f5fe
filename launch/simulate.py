"""`rolloutmq simulate`: control laws on plants that are simulated, on the same seeds.

rolloutmq   from what is eaten and what a worker makes: what scales a run
ratio       the rule of the horizontal autoscaler
pid         proportional, integral, derivative
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.orchestration import ScalingConfig
from rolloutmq.services.orchestrator.controller import PressureController
from rolloutmq.services.orchestrator.decisions import Replay, read, replay
from rolloutmq.services.orchestrator.simulation.picture import draw
from rolloutmq.services.orchestrator.simulation.plant import Site
from rolloutmq.services.orchestrator.simulation.rivals import PidRule, RatioRule
from rolloutmq.services.orchestrator.simulation.scenarios import all_scenarios, trace
from rolloutmq.services.orchestrator.simulation.trial import Make, Scenario, try_out
from rolloutmq.services.orchestrator.simulation.verdict import Figure, Verdict, judged

RIVALS_SETPOINT: Final = 5.0
"""Batches that the rivals keep queued: they starve sooner with less."""
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
    """Try every law on every scenario, and print what that came to: median and worst of the seeds.

    Args:
        starts_s: How long workers take to start.
        seeds: Trials of each.
        only: Names of scenarios; all if there are none.
        recorded: CSV of a demand: seconds, and sequences consumed per second.
        picture: Where a picture of the first seed goes.
        as_json: Print one JSON list instead of a table.

    Raises:
        ConfigError: What is asked for is no scenario, no demand or no picture.
        MissingError: A picture is asked for without matplotlib.
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
    """Make the decisions of a run once more, and say whether they come out the same; 1 if they do not.

    Args:
        recorded: `decisions.jsonl` of a run, or its run directory.
        as_json: Print one JSON object.

    Raises:
        ConfigError: It is no record of decisions.
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
        sys.stdout.write("".join(_told(again)))
    return int(again.differences > 0)


def _told(again: Replay) -> Iterator[str]:
    yield f"{again.decisions} decisions, {again.differences} of them otherwise than recorded\n"
    if again.orphans:
        yield f"{again.orphans} more without what they followed from\n"
    if again.first is not None:
        recorded, now = again.first.recorded, again.first.now
        yield f"the first of {recorded.env} at {recorded.now:.1f} s:\n"
        yield f"  recorded {recorded.decision.target}: {recorded.decision.reason}\n"
        yield f"  now      {now.target}: {now.reason}\n"


def _chosen(starts_s: Sequence[float], only: Sequence[str], recorded: Path | None) -> Iterator[Scenario]:
    for start_s in starts_s:
        if not 0.0 <= start_s <= LONGEST_START_S:
            raise ConfigError("start", f"takes 0 to {LONGEST_START_S:g} s, not {start_s:g}")
        if recorded is not None:
            rows = _rows(recorded)
            site = Site(start_s=start_s)
            yield Scenario(recorded.name, trace(rows), site, lasts_s=rows[-1][0] - rows[0][0])
            continue
        known = {one.name: one for one in all_scenarios(start_s)}
        if unknown := set(only) - known.keys():
            raise ConfigError("scenario", f"there is no {min(unknown)!r}, but {', '.join(map(repr, known))}")
        yield from (known[name] for name in only or known)


def _rows(recorded: Path) -> list[tuple[float, float]]:
    """Read a recorded demand; its first row is the beginning."""
    try:
        with recorded.open(newline="") as file:
            found = [tuple(map(float, row[:2])) for row in csv.reader(file) if row and not _is_head(row)]
    except (OSError, ValueError) as error:
        raise ConfigError("trace", f"{recorded}: {error}") from None
    rows = [(row[0] - found[0][0], row[1]) for row in found if len(row) == 2]
    if len(rows) < 2 or len(rows) < len(found):
        raise ConfigError("trace", f"{recorded}: wants at least two rows of seconds and sequences per second")
    times = [at for at, _ in rows]
    if times != sorted(set(times)) or times[-1] > LONGEST_S:
        raise ConfigError("trace", f"{recorded}: seconds must grow, over a week at most")
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
