"""A plant as a TOML file: the site, and what happens to its controller. The docstring under a field describes its key.

Sizes are bounded, so that a trial ends in seconds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, LiteralString

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rolloutmq.schemas.config.base import NameText, Section
from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.orchestrator.simulation.curves import LONGEST_S, curve
from rolloutmq.services.orchestrator.simulation.series import Series, constant
from rolloutmq.services.orchestrator.simulation.site import (
    EnvironmentSite,
    Scenario,
    ServerSite,
    Site,
    TrainerSite,
)

LONGEST_START_S: Final = 3600.0
MOST_WORKERS: Final = 1000
MOST_NAMES: Final = 8
"""Environments, and servers."""
LEAST_RATE, MOST_RATE = 1e-3, 1e5
"""Sequences per second."""
LEAST_BATCH_S: Final = 0.01
MOST_BATCH: Final = 1e6
"""Sequences."""


def _pair(form: LiteralString) -> BeforeValidator:
    """Return a validator that names the form of a pair: pydantic would ask for its second item."""

    def checked(given: object) -> object:
        if not isinstance(given, list | tuple) or len(given) != 2:
            raise PydanticCustomError("pair", f"must be {form}")
        return given

    return BeforeValidator(checked)


Curve = object
"""A number, points `[[seconds, value], ...]`, or a table with `points` or `csv`; see `curves`."""
Seconds = Annotated[float, Field(ge=0.0, le=LONGEST_S)]
Span = Annotated[tuple[Seconds, Seconds], _pair("[from, to]")]
Spans = Annotated[tuple[Span, ...], Field(max_length=1000)]
Workers = Annotated[int, Field(ge=0, le=MOST_WORKERS)]
Loss = Annotated[tuple[Seconds, Workers], _pair("[time, number]")]
Jump = Annotated[tuple[Seconds, Annotated[float, Field(ge=-1e6, le=1e6)]], _pair("[time, seconds]")]
Part = Annotated[float, Field(ge=0.0, le=0.95)]


class ScenarioPlant(Section):
    """`[scenario]`: duration, changes and limits."""

    lasts_s: Annotated[float, Field(ge=10.0, le=LONGEST_S)] = 1800.0
    """Simulated seconds, times the environments at most 43200."""
    changes: Annotated[tuple[Seconds, ...], Field(max_length=1000)] = ()
    """Times of lasting changes of the need. Figures count from the first one; the settling time is measured after
    each."""
    since_s: Seconds = 0.0
    """Time from which figures count if there are no `changes`."""
    fresh: bool = False
    """The start itself is simulated: the trainer's starvation has no bound."""
    max_processes: Annotated[int, Field(ge=0, le=MOST_NAMES * MOST_WORKERS)] = 0
    """Most workers of all environments; 0 without a limit."""


class TrainerPlant(Section):
    """`[trainer]`: the trainer, and the queue before it."""

    demand: Curve
    """Sequences per second consumed without waits, over time. 0: a pause, as for an evaluation."""
    batch: Curve = 64
    """Sequences of a batch, over time; a training step takes `batch / demand` seconds."""
    queue: Annotated[int, Field(ge=1, le=10_000_000)] = 1000
    """Most sequences queued or under way, divided among the environments by weight. Beyond it, workers wait."""
    queued: Annotated[float, Field(ge=0.0, le=1e7)] = 0.0
    """Sequences queued at the start."""
    away: Spans = ()
    """Times `[from, to]` without a connected trainer; its batch returns to the queue."""


class EnvironmentPlant(Section):
    """`[environment.NAME]`: an environment and its workers."""

    per_worker: Curve = 2.0
    """Sequences per second of one worker alone, over time."""
    start_s: Curve = 20.0
    """Mean time from the start of a worker to its first rollout, over time."""
    rollout_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """Time from the start of a rollout to its arrival; longer on a full server."""
    turns: Annotated[int, Field(ge=1, le=100)] = 1
    """Completions of a rollout, one after another, with durations that vary by half. With several, a worker begins all
    of its sequences as soon as it is ready. They need `rollout_s`."""
    weight: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Share of a batch, relative to the other environments."""
    noise: Annotated[float, Field(ge=0.0, le=10.0)] = 0.25
    """Standard deviation of a worker's output in one second, relative to the mean, which it does not change."""
    group_sequences: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Sequences of a group: groups are whole and begin at random times (Poisson), in addition to `noise`. Without it,
    sequences come evenly, and controllers take 8 of them for a group."""
    failing_starts: Part = 0.0
    """Part of the starts to fail near their end; each is repeated."""
    life_s: Annotated[float, Field(ge=10.0, le=1e9)] | None = None
    """Mean time until a ready worker crashes and starts again. Without it, none crashes."""
    lost: Annotated[tuple[Loss, ...], Field(max_length=1000)] = ()
    """A list of `[time, number]`: ready workers lost for good."""
    outages: Spans = ()
    """Times `[from, to]` without output; rollouts under way go on afterwards."""
    server: str = ""
    """Inference server, shared by its workers."""
    min_workers: Workers = 1
    """Fewest workers."""
    max_workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 200
    """Most workers."""
    ready: Workers = 0
    """Ready workers at the start."""


class ServerPlant(Section):
    """`[server.NAME]`: an inference server, shared by workers."""

    capacity: Curve
    """Sequences per second of one engine, over time."""
    max_engines: Annotated[int, Field(ge=1, le=64)] = 1
    """Most engines; one runs from the start."""
    start_s: Annotated[float, Field(ge=0.0, le=LONGEST_START_S)] = 60.0
    """Time until another engine serves."""


class ControllerPlant(Section):
    """`[controller]`: trouble for the controller."""

    loss: Part = 0.0
    """Part of the ticks without telemetry."""
    dark: Span | None = None
    """Time `[from, to]` without any telemetry."""
    unseen_s: Seconds | None = None
    """Addition to the bound of the settling time, since a change cannot be seen at once. By default, the length of
    `dark`."""
    restart_at_s: Seconds | None = None
    """Time of a restart; it forgets everything."""
    jump: Jump | None = None
    """`[time, seconds]` of a jump of its clock."""


class OrchestratorPlant(Section):
    """`[orchestrator]`: keys of a configuration."""

    scaling: ScalingConfig = Field(default_factory=ScalingConfig.default)
    """Parameters of the autoscaler."""


class SettingsPlant(Section):
    """Keys that hold for every scenario."""

    orchestrator: OrchestratorPlant = Field(default_factory=OrchestratorPlant.default)


class PlantFile(SettingsPlant):
    """The whole file."""

    scenario: ScenarioPlant = Field(default_factory=ScenarioPlant.default)
    trainer: TrainerPlant
    environment: Annotated[dict[NameText, EnvironmentPlant], Field(min_length=1, max_length=MOST_NAMES)]
    server: Annotated[dict[NameText, ServerPlant], Field(max_length=MOST_NAMES)] = {}
    controller: ControllerPlant = Field(default_factory=ControllerPlant.default)


def warnings_of(scenario: Scenario) -> Iterator[str]:
    """Yield warnings in the form of an error: of a queue that cannot hold the rollouts under way."""
    site, trainer = scenario.site, scenario.site.trainer
    for name, one in site.environments.items():
        most = max(trainer.demand.values)
        if one.server:  # the whole server's, for the whole batch
            server = site.servers[one.server]
            most = min(most, max(server.capacity.values) * server.max_engines / site.served[one.server])
        under_way = most * one.rollout_s
        least = math.ceil(under_way + trainer.batch)
        if one.rollout_s and trainer.queue < least:
            yield (
                f"trainer.queue: {trainer.queue} sequences are too few: at {most:g} a second with "
                f"environment.{name}.rollout_s = {one.rollout_s:g}, {under_way:g} are under way, and workers wait for "
                f"room; set at least {least}"
            )


def scenario_of(name: str, plant: PlantFile, folder: Path) -> Scenario:
    """Return the scenario of a plant.

    Args:
        name: Name of the scenario.
        plant: The plant.
        folder: Folder that paths of CSV files start from.

    Raises:
        ConfigError: A curve is invalid, or two values contradict each other.
    """
    _check(plant)
    trainer, said = plant.trainer, plant.scenario
    curves = _Curves(folder, said.lasts_s)
    demand = curves.read("trainer.demand", trainer.demand, least=0.0)
    batches = curves.read("trainer.batch", trainer.batch, 1.0, MOST_BATCH)
    _check_batches(batches, demand, trainer.queue)
    batch = round(max(batches.values))
    site = Site(
        TrainerSite(
            demand, batch, trainer.queue, trainer.away, trainer.queued, batch_part=batches.scaled(1.0 / batch)
        ),
        {key: _environment(key, one, curves) for key, one in plant.environment.items()},
        {
            key: ServerSite(curves.read(f"server.{key}.capacity", one.capacity), one.max_engines, one.start_s)
            for key, one in plant.server.items()
        },
    )
    scenario = Scenario(
        name,
        site,
        said.changes,
        said.lasts_s,
        said.since_s,
        said.max_processes,
        is_fresh=said.fresh,
        scaling=plant.orchestrator.scaling,
    )
    return _troubled(scenario, plant.controller)


def _environment(key: str, one: EnvironmentPlant, curves: "_Curves") -> EnvironmentSite:
    starts = curves.read(f"environment.{key}.start_s", one.start_s, 0.0, LONGEST_START_S)
    longest_s = max(starts.values)
    return EnvironmentSite(
        per_worker=curves.read(f"environment.{key}.per_worker", one.per_worker),
        start_s=longest_s,
        start_part=starts.scaled(1.0 / longest_s) if longest_s else constant(1.0),
        rollout_s=one.rollout_s,
        turns=one.turns,
        weight=one.weight,
        noise=one.noise,
        group_sequences=one.group_sequences or 0,
        failing_starts=one.failing_starts,
        life_s=math.inf if one.life_s is None else one.life_s,
        lost=one.lost,
        outages=one.outages,
        server=one.server,
        min_workers=one.min_workers,
        max_workers=one.max_workers,
        ready=one.ready,
    )


def _troubled(scenario: Scenario, said: ControllerPlant) -> Scenario:
    """Return the scenario with what happens to its controller."""
    dark_s = said.dark[1] - said.dark[0] if said.dark else 0.0
    return replace(
        scenario,
        loss=said.loss,
        dark=said.dark or scenario.dark,
        unseen_s=dark_s if said.unseen_s is None else said.unseen_s,
        restart_at=scenario.restart_at if said.restart_at_s is None else said.restart_at_s,
        jump=said.jump or scenario.jump,
    )


class _Curves:
    """Reads the curves of a plant from a folder; each must tell of the simulated time alone."""

    def __init__(self, folder: Path, lasts_s: float) -> None:
        self._folder = folder
        self._lasts_s = lasts_s

    def read(self, key: str, given: object, least: float = LEAST_RATE, most: float = MOST_RATE) -> Series:
        """Return the curve of a key; ConfigError if it is invalid, or its last point has no effect."""
        try:
            found = curve(given, self._folder, least, most)
        except ValueError as error:
            raise ConfigError(key, str(error)) from None
        if len(found.times) < 2:
            return found
        # A straight line may end after the simulation; the value of a step may begin with its end.
        decides_at = found.times[-2] if found.is_linear else found.times[-1]
        if decides_at > self._lasts_s or (found.is_linear and decides_at == self._lasts_s):
            raise ConfigError(
                key,
                f"must end with the simulation, {self._lasts_s:g} s (got a point at {found.times[-1]:g}); remove "
                "later points, or raise scenario.lasts_s",
            )
        return found


def _check(plant: PlantFile) -> None:
    """Refuse values that contradict each other."""
    said, trainer = plant.scenario, plant.trainer
    whole_s = said.lasts_s * len(plant.environment)
    if whole_s > LONGEST_S:
        raise ConfigError(
            "scenario.lasts_s", f"times the environments at most {LONGEST_S:g} (got {whole_s:g})"
        )
    for before, after in pairwise(said.changes):
        if after <= before:
            raise ConfigError("scenario.changes", f"must increase (got {after:g} after {before:g})")
    for key, at in (("changes", said.changes[-1] if said.changes else 0.0), ("since_s", said.since_s)):
        if at >= said.lasts_s:
            raise ConfigError(f"scenario.{key}", f"must be before the end, {said.lasts_s:g} s (got {at:g})")
    if said.changes and said.since_s:
        raise ConfigError(
            "scenario.since_s", "must not be beside changes: figures count from the first change"
        )
    _check_trainer(trainer)
    _check_ends(plant)
    for name, one in plant.environment.items():
        _check_environment(f"environment.{name}", one, plant.server)
        if one.group_sequences and one.group_sequences > trainer.queue:
            raise ConfigError(
                f"environment.{name}.group_sequences",
                f"must be at most trainer.queue {trainer.queue} (got {one.group_sequences})",
            )
    least = sum(one.min_workers for one in plant.environment.values())
    if 0 < said.max_processes < least:
        raise ConfigError(
            "scenario.max_processes",
            f"must be at least the sum of min_workers {least} (got {said.max_processes})",
        )
    for name in plant.server:
        if all(one.server != name for one in plant.environment.values()):
            raise ConfigError(
                f"server.{name}", "no environment uses it; name it as `server` of one, or remove it"
            )
    _check_spans("controller.dark", [plant.controller.dark] if plant.controller.dark else [])


def _check_ends(plant: PlantFile) -> None:
    """Refuse what would happen after the end."""
    trouble, lasts_s = plant.controller, plant.scenario.lasts_s
    begins = {
        "trainer.away": [begin for begin, _ in plant.trainer.away],
        "controller.dark": [trouble.dark[0]] if trouble.dark else [],
        "controller.restart_at_s": [] if trouble.restart_at_s is None else [trouble.restart_at_s],
        "controller.jump": [trouble.jump[0]] if trouble.jump else [],
    }
    for name, one in plant.environment.items():
        begins[f"environment.{name}.lost"] = [at for at, _ in one.lost]
        begins[f"environment.{name}.outages"] = [begin for begin, _ in one.outages]
    for key, times in begins.items():
        for at in times:
            if at >= lasts_s:
                raise ConfigError(
                    key,
                    f"must be before the end, {lasts_s:g} s (got {at:g}); remove it, or raise scenario.lasts_s",
                )


def _check_trainer(trainer: TrainerPlant) -> None:
    if trainer.queued > trainer.queue:
        raise ConfigError("trainer.queued", f"must be at most queue {trainer.queue} (got {trainer.queued:g})")
    _check_spans("trainer.away", trainer.away)


def _check_batches(batches: Series, demand: Series, queue: int) -> None:
    """Refuse batches that are no whole numbers, too short, or larger than the queue."""
    if part := next((size for size in batches.values if size != round(size)), None):
        raise ConfigError("trainer.batch", f"must be whole numbers (got {part:g})")
    if max(demand.values) * LEAST_BATCH_S > min(batches.values):
        raise ConfigError(
            "trainer.batch",
            f"must last at least {LEAST_BATCH_S:g} s (got {min(batches.values):g}); use a larger batch",
        )
    if queue < max(batches.values):
        raise ConfigError("trainer.queue", f"must hold a batch of {max(batches.values):g} (got {queue})")


def _check_environment(key: str, one: EnvironmentPlant, servers: Mapping[str, ServerPlant]) -> None:
    if one.server and one.server not in servers:
        known = ", ".join(servers) or "none"
        raise ConfigError(
            f"{key}.server", f"unknown server (got {one.server!r}); [server.NAME] given: {known}"
        )
    for field, workers in (("min_workers", one.min_workers), ("ready", one.ready)):
        if workers > one.max_workers:
            raise ConfigError(
                f"{key}.{field}", f"must not exceed max_workers {one.max_workers} (got {workers})"
            )
    if one.turns > 1 and not one.rollout_s:
        raise ConfigError(f"{key}.turns", f"needs rollout_s (got {one.turns}); give it, or remove turns")
    _check_spans(f"{key}.outages", one.outages)
    for (before, _), (after, _) in pairwise(one.lost):
        if after <= before:
            raise ConfigError(f"{key}.lost", f"times must increase (got {after:g} after {before:g})")


def _check_spans(key: str, spans: Sequence[Span]) -> None:
    """Refuse spans that are empty, overlap or go back."""
    latest = 0.0
    for begin, end in spans:
        if begin < latest:
            raise ConfigError(key, f"times must increase (got {begin:g} after {latest:g})")
        if end <= begin:
            raise ConfigError(key, f"must end after it begins (got {begin:g} to {end:g})")
        latest = end
