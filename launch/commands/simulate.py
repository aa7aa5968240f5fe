"""`rolloutmq simulate`: autoscaling controllers on simulated plants, with the same seeds.

reference   a fleet that knows the demand of the moment, and starts workers as slowly as the others
rolloutmq   the controller of a run: demand divided by the throughput of one worker
ratio       the rule of Kubernetes' horizontal pod autoscaler
pid         proportional, integral, derivative
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.launch.settings import assign, read_toml, validated
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.orchestrator.autoscaling.decision_log import Replay, read, replay
from rolloutmq.services.orchestrator.simulation.comparison import compared, processors
from rolloutmq.services.orchestrator.simulation.controllers import CONTROLLERS
from rolloutmq.services.orchestrator.simulation.curves import LONGEST_S, csv_curve
from rolloutmq.services.orchestrator.simulation.decisions import changed_decisions, decision_lines
from rolloutmq.services.orchestrator.simulation.plant_file import (
    LONGEST_START_S,
    PlantFile,
    SettingsPlant,
    scenario_of,
    warnings_of,
)
from rolloutmq.services.orchestrator.simulation.plot import draw
from rolloutmq.services.orchestrator.simulation.scenarios import MOST_DEMAND, all_scenarios, traced
from rolloutmq.services.orchestrator.simulation.site import Scenario
from rolloutmq.services.orchestrator.simulation.table import table

START_S: Final = 20.0


def simulate(
    starts_s: Sequence[float],
    seeds: int,
    only: Sequence[str] = (),
    recorded: Path | None = None,
    *,
    plants: Sequence[Path] = (),
    settings: Sequence[str] = (),
    controllers: Sequence[str] = (),
    picture: Path | None = None,
    as_json: bool = False,
) -> None:
    """Run every controller on every scenario, and print the figures beside those of the reference fleet.

    Args:
        starts_s: Start-up times of workers, in seconds; 20 if empty.
        seeds: Trials of each.
        only: Names of scenarios; all if empty.
        recorded: Demand trace as CSV: seconds, and sequences consumed per second.
        plants: Plants as TOML files, in place of the scenarios.
        settings: Texts `key=value`, such as `orchestrator.scaling.refill_s=30`; with plants, any of their keys.
        controllers: Names of the controllers; all if empty.
        picture: File for a plot of the first seed.
        as_json: Print one JSON list instead of a table.

    Raises:
        ConfigError: Unknown scenario or controller, invalid trace or plant, options that exclude each other, or
            unsupported picture format.
        MissingError: A picture needs matplotlib.
    """
    if unknown := set(controllers) - CONTROLLERS.keys():
        raise ConfigError(
            "controller", f"unknown (got {min(unknown)!r}); use one of {', '.join(map(repr, CONTROLLERS))}"
        )
    laws = [law for law in CONTROLLERS if law in controllers or not controllers]
    scenarios = _warned(_chosen(starts_s, only, recorded, plants, settings))
    if picture is not None:
        try:
            draw(scenarios, {law: CONTROLLERS[law] for law in laws}, picture)
        except (OSError, ValueError) as error:
            raise ConfigError("picture", f"{picture}: {error}") from None
    verdicts = compared(scenarios, seeds, laws, processes=processors())
    if as_json:
        _print_json([asdict(one) for one in verdicts])
        return
    for line in table(verdicts):
        sys.stdout.write(line)
        sys.stdout.flush()


def check_together(given: Sequence[str], *, is_replay: bool, decisions: bool, seed: int | None) -> None:
    """Refuse options that would be ignored.

    Args:
        given: Names of the other options that are given.
        is_replay: A recorded run is decided again.
        decisions: The decisions of one trial are printed.
        seed: Its number; None if it is not given.

    Raises:
        ConfigError: Two options exclude each other.
    """
    if is_replay:
        others = [*given, *(["decisions"] if decisions else []), *(["seed"] if seed is not None else [])]
        if others:
            raise ConfigError(
                others[0], "must not be beside replay: a record has its own inputs; leave it out"
            )
    if seed is not None and not decisions:
        raise ConfigError(
            "seed", "is that of decisions (got no --decisions); use seeds for the number of trials"
        )
    if decisions:
        for one in ("controller", "picture"):
            if one in given:
                raise ConfigError(one, "must not be beside decisions, which are rolloutmq's; leave it out")


def print_decisions(
    starts_s: Sequence[float],
    only: Sequence[str] = (),
    recorded: Path | None = None,
    *,
    plants: Sequence[Path] = (),
    settings: Sequence[str] = (),
    seed: int = 0,
    as_json: bool = False,
) -> None:
    """Print the decisions of the orchestrator's controllers in one trial, where target or reason change.

    Args:
        starts_s: Start-up times of workers, in seconds; 20 if empty.
        only: Names of scenarios; all if empty.
        recorded: Demand trace as CSV: seconds, and sequences consumed per second.
        plants: Plants as TOML files, in place of the scenarios.
        settings: Texts `key=value`, as for `simulate`.
        seed: Number of the trial, from 0.
        as_json: Print one JSON list, with an entry for each scenario.

    Raises:
        ConfigError: As for `simulate`.
    """
    scenarios = _warned(_chosen(starts_s, only, recorded, plants, settings))
    if as_json:
        found = [
            {
                "scenario": one.name,
                "start_s": one.start_s,
                "decisions": [asdict(change) for change in changed_decisions(one, seed)],
            }
            for one in scenarios
        ]
        _print_json(found)
        return
    for number, one in enumerate(scenarios):
        sys.stdout.write(f"{chr(10) if number else ''}{one.name}, start {one.start_s:g} s\n")
        sys.stdout.writelines(decision_lines(changed_decisions(one, seed)))


def _print_json(found: object) -> None:
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


def _warned(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Return the scenarios, and warn on standard error of what they can hardly mean."""
    found = list(scenarios)
    for one in found:
        for text in warnings_of(one):
            sys.stderr.write(f"rolloutmq: warning: {one.name}: {text}\n")
    return found


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
    except OSError as error:
        raise ConfigError(
            "replay", f"{path} cannot be read: {error.strerror}; name a run directory"
        ) from None
    except ValueError as error:
        raise ConfigError("replay", str(error)) from None
    if as_json:
        _print_json(msgspec.to_builtins(again))
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


def _chosen(
    starts_s: Sequence[float],
    only: Sequence[str],
    recorded: Path | None,
    plants: Sequence[Path],
    settings: Sequence[str],
) -> Iterator[Scenario]:
    given = {"scenario": bool(only), "trace": recorded is not None, "plant": bool(plants)}
    several = [option for option, is_given in given.items() if is_given]
    if len(several) > 1:
        raise ConfigError(several[1], f"must not be beside {several[0]}; use one of them")
    if plants:
        if starts_s:
            raise ConfigError("start", "must not be beside plant; set start_s of its environments")
        for file in plants:
            yield load_plant(file, settings)
        return
    tree: dict[str, Any] = {}
    assign(tree, settings)
    scaling = validated(SettingsPlant, tree).orchestrator.scaling
    for one in _shipped(starts_s, only, recorded):
        yield replace(one, scaling=scaling)


def _shipped(starts_s: Sequence[float], only: Sequence[str], recorded: Path | None) -> Iterator[Scenario]:
    for start_s in starts_s or (START_S,):
        if not 0.0 <= start_s <= LONGEST_START_S:
            raise ConfigError("start", f"must be 0 to {LONGEST_START_S:g} s (got {start_s:g})")
        if recorded is not None:
            yield _traced(recorded, start_s)
            continue
        known = {one.name: one for one in all_scenarios(start_s)}
        if unknown := set(only) - known.keys():
            raise ConfigError(
                "scenario", f"unknown (got {min(unknown)!r}); use one of {', '.join(map(repr, known))}"
            )
        yield from (known[name] for name in only or known)


def load_plant(file: Path, settings: Sequence[str] = ()) -> Scenario:
    """Return the scenario of a plant's file; its name is that of the file.

    Args:
        file: TOML file.
        settings: Texts `key=value` in place of keys of the file.

    Raises:
        ConfigError: The file is unreadable, a key is unknown, a value is invalid, or two values contradict each other.
    """
    tree = read_toml(file)
    _check_names(tree, settings)
    assign(tree, settings)
    return scenario_of(file.stem, validated(PlantFile, tree), file.resolve().parent)


def _check_names(tree: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Refuse values of environments and servers that the file does not name: a misspelled one would be another."""
    for text in settings:
        section, _, rest = text.partition("=")[0].strip().partition(".")
        known, name = tree.get(section), rest.partition(".")[0]
        if section in ("environment", "server") and isinstance(known, dict) and name not in known:
            names = ", ".join(map(repr, known))
            raise ConfigError(f"{section}.{name}", f"is not in the file (got {text!r}); use one of {names}")


def _traced(recorded: Path, start_s: float) -> Scenario:
    """Return the scenario of a recorded demand."""
    try:
        demand = csv_curve(recorded, 0.0, MOST_DEMAND)
    except ValueError as error:
        raise ConfigError("trace", f"{error}; a plant describes other workers") from None
    if not 1.0 <= demand.times[-1] <= LONGEST_S:
        raise ConfigError("trace", f"{recorded}: must span 1 to {LONGEST_S:g} s (got {demand.times[-1]:g})")
    return traced(recorded.name, demand, start_s)
