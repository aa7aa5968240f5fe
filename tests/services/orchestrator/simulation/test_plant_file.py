"""Plants as files: what they say arrives in the scenario, and what makes no sense is refused by its key."""

import math
import tomllib
from pathlib import Path

import pytest

from rolloutmq.launch.settings import validated
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.orchestrator.simulation.plant_file import PlantFile, scenario_of, warnings_of
from rolloutmq.services.orchestrator.simulation.series import Series
from rolloutmq.services.orchestrator.simulation.site import (
    EnvironmentSite,
    Scenario,
    ServerSite,
    Site,
    TrainerSite,
)

WHOLE = """
[scenario]
lasts_s = 1000
changes = [300, 600]
fresh = true
max_processes = 9

[trainer]
demand = {csv = "demand.csv", lines = true}
batch = [[0, 16], [500, 32]]
queue = 500
queued = 50
away = [[10, 20], [30, 40]]

[environment.math]
per_worker = [[0, 2], [600, 1]]
start_s = [[0, 20], [600, 40]]
rollout_s = 5
turns = 2
weight = 3
noise = 0
group_sequences = 4
failing_starts = 0.1
life_s = 900
lost = [[100, 2]]
outages = [[200, 210]]
server = "engine"
min_workers = 2
max_workers = 20
ready = 4

[environment.code]

[server.engine]
capacity = 12
max_engines = 3
start_s = 45

[controller]
loss = 0.2
dark = [400, 430]
restart_at_s = 500
jump = [700, -60]
"""
LEAST = "[trainer]\ndemand = 40\n[environment.math]\n"


def read(text: str, folder: Path = Path()) -> Scenario:
    return scenario_of("mine", validated(PlantFile, tomllib.loads(text)), folder)


def test_everything_a_scenario_has_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "demand.csv").write_text("0,10\n60,30\n")
    assert read(WHOLE, tmp_path) == Scenario(
        "mine",
        Site(
            TrainerSite(
                Series((0.0, 60.0), (10.0, 30.0), True),
                32,
                500,
                ((10.0, 20.0), (30.0, 40.0)),
                50.0,
                Series((0.0, 500.0), (0.5, 1.0)),
            ),
            {
                "math": EnvironmentSite(
                    per_worker=Series((0.0, 600.0), (2.0, 1.0)),
                    start_s=40.0,
                    start_part=Series((0.0, 600.0), (0.5, 1.0)),
                    rollout_s=5.0,
                    turns=2,
                    weight=3.0,
                    noise=0.0,
                    group_sequences=4,
                    failing_starts=0.1,
                    life_s=900.0,
                    lost=((100.0, 2),),
                    outages=((200.0, 210.0),),
                    server="engine",
                    min_workers=2,
                    max_workers=20,
                    ready=4,
                ),
                "code": EnvironmentSite(),
            },
            {"engine": ServerSite(Series((0.0,), (12.0,)), 3, 45.0)},
        ),
        changes=(300.0, 600.0),
        lasts_s=1000.0,
        max_processes=9,
        loss=0.2,
        dark=(400.0, 430.0),
        unseen_s=30.0,
        restart_at=500.0,
        jump=(700.0, -60.0),
        is_fresh=True,
    )


def test_the_defaults_are_those_of_a_scenario() -> None:
    site = Site(TrainerSite(Series((0.0,), (40.0,))), {"math": EnvironmentSite()})
    assert read(LEAST) == Scenario("mine", site)
    assert read(LEAST).site.environments["math"].life_s == math.inf


def test_a_full_server_bounds_the_rollouts_that_a_queue_must_hold() -> None:
    shared = LEAST + 'rollout_s = 30\nserver = "engine"\n[server.engine]\ncapacity = '
    assert list(warnings_of(read(shared + "20"))) == []
    (text,) = warnings_of(read(shared + "50"))
    assert text.startswith("trainer.queue: 1000 sequences are too few: at 40 a second")
    assert text.endswith("1200 are under way, and workers wait for room; set at least 1264")


def test_a_line_may_end_after_the_simulation_and_a_step_with_it() -> None:
    read(LEAST + "per_worker = {points = [[0, 1], [3600, 3]], lines = true}")
    read(LEAST + "per_worker = [[0, 1], [1800, 3]]")
    read(LEAST + "per_worker = [[5000, 1]]")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the configuration has 2 errors\ntrainer: is required\nenvironment: is required"),
        ("[trainer]\n[environment.a]", "trainer.demand: is required"),
        ("[trainer]\ndemand = 1", "environment: is required"),
        ("[trainer]\ndemand = 1\n[environment]", "environment: "),
        ("trainer = 3\n[environment.a]", "trainer: must be a section with keys (got 3)"),
        ("[trainer]\ndemand = nan\n[environment.a]", "trainer.demand: must be 0 to 100000 (got nan)"),
        ("[trainer]\ndemand = [[0, -1]]\n[environment.a]", "trainer.demand: point 1 must be 0 to"),
        ('[trainer]\ndemand = {csv = "no.csv"}\n[environment.a]', "trainer.demand: no.csv: cannot be read"),
        (LEAST + "per_worker = 0", "environment.math.per_worker: must be 0.001 to"),
        (
            LEAST + "per_worker = [[0, 1], [0, 2]]",
            "environment.math.per_worker: point 2: seconds must increase",
        ),
        (LEAST + "per_workers = 1", "environment.math.per_workers: unknown key; did you mean `per_worker`?"),
        (LEAST + "start_s = nan", "environment.math.start_s: must be "),
        (LEAST + "start_s = 3601", "environment.math.start_s: must be 0 to 3600 (got 3601)"),
        (LEAST + "start_s = [[0, 1], [9, 3601]]", "environment.math.start_s: point 2 must be 0 to 3600"),
        (LEAST + "turns = 3", "environment.math.turns: needs rollout_s (got 3); give it, or remove turns"),
        (LEAST + "rollout_s = -1", "environment.math.rollout_s: must be greater than or equal to 0 (got -1)"),
        (
            LEAST + "rollout_s = inf",
            "environment.math.rollout_s: must be less than or equal to 3600 (got inf)",
        ),
        (LEAST + "weight = 0", "environment.math.weight: must be "),
        (LEAST + "noise = nan", "environment.math.noise: must be "),
        (
            LEAST + "group_sequences = 0",
            "environment.math.group_sequences: must be greater than or equal to 1",
        ),
        (
            LEAST + "group_sequences = 1001",
            "environment.math.group_sequences: must be at most trainer.queue 1000 (got 1001)",
        ),
        (LEAST + "failing_starts = 1", "environment.math.failing_starts: must be "),
        (LEAST + "life_s = 0", "environment.math.life_s: must be "),
        (LEAST + "life_s = inf", "environment.math.life_s: must be "),
        (LEAST + "lost = [[1]]", "environment.math.lost.0: must be [time, number] (got [1])"),
        (LEAST + "lost = [5]", "environment.math.lost.0: must be [time, number] (got 5)"),
        (
            LEAST + "lost = [[9, 1], [5, 1]]",
            "environment.math.lost: times must increase (got 5 after 9)",
        ),
        (
            LEAST + "lost = [[1800, 1]]",
            "environment.math.lost: must be before the end, 1800 s (got 1800); remove it, or raise scenario.lasts_s",
        ),
        (LEAST + "outages = [[1801, 1802]]", "environment.math.outages: must be before the end, 1800 s"),
        (LEAST + 'start_s = "20"', "environment.math.start_s: must be a number, points"),
        (LEAST + 'life_s = "20"', "environment.math.life_s: must be a valid number (got '20')"),
        (LEAST + "ready = true", "environment.math.ready: must be a valid integer (got True)"),
        (LEAST + '[scenario]\nfresh = "yes"', "scenario.fresh: must be a valid boolean (got 'yes')"),
        (
            LEAST + "per_worker = [[0, 1], [1801, 2]]",
            "environment.math.per_worker: must end with the simulation, 1800 s (got a point at 1801)",
        ),
        (
            LEAST + "per_worker = {points = [[0, 1], [1800, 2], [3600, 3]], lines = true}",
            "environment.math.per_worker: must end with the simulation, 1800 s (got a point at 3600)",
        ),
        (LEAST + "[controller]\nrestart_at_s = 1800", "controller.restart_at_s: must be before the end"),
        (LEAST + "[controller]\njump = [1800, 5]", "controller.jump: must be before the end"),
        (LEAST + "[controller]\ndark = [1800, 1900]", "controller.dark: must be before the end"),
        (LEAST + "[controller]\njump = [5]", "controller.jump: must be [time, seconds] (got [5])"),
        (
            "[trainer]\ndemand = 1\naway = [[1800, 1900]]\n[environment.a]",
            "trainer.away: must be before the end",
        ),
        (LEAST + "lost = [[1, 2.5]]", "environment.math.lost.0.1: must be a valid integer"),
        (LEAST + "lost = [[nan, 2]]", "environment.math.lost.0.0: must be "),
        (LEAST + "outages = [[5, 5]]", "environment.math.outages: must end after it begins (got 5 to 5)"),
        (
            LEAST + "outages = [[5, 9], [8, 10]]",
            "environment.math.outages: times must increase (got 8 after 9)",
        ),
        (
            LEAST + 'server = "x"',
            "environment.math.server: unknown server (got 'x'); [server.NAME] given: none",
        ),
        (
            LEAST + "min_workers = 3\nmax_workers = 2",
            "environment.math.min_workers: must not exceed max_workers 2",
        ),
        (LEAST + "ready = 201", "environment.math.ready: must not exceed max_workers 200 (got 201)"),
        (LEAST + "max_workers = 1001", "environment.math.max_workers: must be less than or equal to 1000"),
        (LEAST + "max_workers = 0", "environment.math.max_workers: must be greater than or equal to 1"),
        (LEAST + '["environment"."no/name"]', "environment.no/name"),
        ("\n".join([LEAST, *(f"[environment.e{n}]" for n in range(8))]), "environment: "),
        (LEAST + "[server.a]\ncapacity = 1", "server.a: no environment uses it"),
        (LEAST + 'server = "a"\n[server.a]', "server.a.capacity: is required"),
        (LEAST + 'server = "a"\n[server.a]\ncapacity = inf', "server.a.capacity: must be 0.001 to"),
        (LEAST + 'server = "a"\n[server.a]\ncapacity = 1\nmax_engines = 65', "server.a.max_engines: must be"),
        (LEAST + "[scenario]\nlasts_s = 43201", "scenario.lasts_s: must be less than or equal to 43200"),
        (LEAST + "[scenario]\nlasts_s = 9", "scenario.lasts_s: must be greater than or equal to 10 (got 9)"),
        (
            LEAST + "[environment.b]\n[scenario]\nlasts_s = 21601",
            "scenario.lasts_s: times the environments at",
        ),
        (LEAST + "[scenario]\nchanges = [5, 5]", "scenario.changes: must increase (got 5 after 5)"),
        (
            LEAST + "[scenario]\nchanges = [1800]",
            "scenario.changes: must be before the end, 1800 s (got 1800)",
        ),
        (LEAST + "[scenario]\nsince_s = 1800", "scenario.since_s: must be before the end"),
        (LEAST + "[scenario]\nsince_s = 5\nchanges = [6]", "scenario.since_s: must not be beside changes"),
        (
            LEAST + "min_workers = 3\n[scenario]\nmax_processes = 2",
            "scenario.max_processes: must be at least",
        ),
        (LEAST + "[controller]\nloss = 1", "controller.loss: must be "),
        (LEAST + "[controller]\ndark = [5, 4]", "controller.dark: must end after it begins"),
        (LEAST + "[controller]\ndark = [5]", "controller.dark: must be [from, to] (got [5])"),
        (LEAST + "[controller]\njump = [5, inf]", "controller.jump.1: must be "),
        (LEAST + "[controller]\nrestart_at_s = nan", "controller.restart_at_s: must be "),
        (
            "[trainer]\ndemand = 1\nqueue = 63\n[environment.a]",
            "trainer.queue: must hold a batch of 64 (got 63)",
        ),
        (
            "[trainer]\ndemand = 1\nqueued = 1001\n[environment.a]",
            "trainer.queued: must be at most queue 1000",
        ),
        (
            "[trainer]\ndemand = 1\nbatch = 0\n[environment.a]",
            "trainer.batch: must be 1 to 1e+06 (got 0)",
        ),
        (
            "[trainer]\ndemand = 1\nbatch = [[0, 8], [9, 8.5]]\n[environment.a]",
            "trainer.batch: must be whole numbers (got 8.5)",
        ),
        (
            "[trainer]\ndemand = 1\nbatch = [[0, 8], [9, 1001]]\n[environment.a]",
            "trainer.queue: must hold a batch of 1001 (got 1000)",
        ),
        ("[trainer]\ndemand = 1e4\n[environment.a]", "trainer.batch: must last at least 0.01 s (got 64)"),
        ("[trainer]\ndemand = 1\naway = [[3, 2]]\n[environment.a]", "trainer.away: must end after it begins"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).startswith(problem)
    assert len(str(caught.value)) < 400
