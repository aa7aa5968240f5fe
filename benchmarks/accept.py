"""`make accept`: every promise with its bound, met or unmet. Exit 1 if one is unmet.

    python -m benchmarks.accept            all of them
    python -m benchmarks.accept seeds      only the scenarios with a matching name

There are four kinds of promises: figures of real runs (the scenarios below, and `workers.followed`), bounds of
simulated runs from the last `make bench-scaling`, tests by name (`promises.toml`), and the rows with a goal from the
last `make bench` (`results.json`). A figure of `promises.toml` without rows there was never measured, and is unmet. So
is a bound that was not measured with the present control law.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.end_to_end import scenario, workers
from benchmarks.end_to_end.scenario import QUICKSTART, RUN_DEADLINE_S, LiveRun, ScenarioError
from benchmarks.harness.figure import Figure, at_least, at_most, equal
from benchmarks.harness.results import RESULTS
from benchmarks.scaling import cells
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.inference.vllm.installed import require_vllm

ROOT: Final = Path(__file__).parent.parent
PROMISES: Final = Path(__file__).parent / "promises.toml"
SEEDS: Final = (0, 1, 2)
VLLM: Final = ROOT / ".venv-vllm" / "bin" / "python"
VLLM_WALL_S: Final = 600.0
TESTED: Final = {
    "own": ("-m", "not rival", "--numprocesses", "2", "--dist", "worksteal"),
    "rival": ("-m", "rival"),
}
"""Pytest options: as in `make test-all`, and one after another for tests with foreign systems."""
THEIR_PYTHON: Final = {
    "tests/bus/tasks/test_rows.py": ROOT / ".venv-verifiers" / "bin" / "python",
    "tests/services/worker/verifiers": ROOT / ".venv-verifiers" / "bin" / "python",
    "tests/services/worker/verifiers/tasksets": ROOT / ".venv-verifiers04" / "bin" / "python",
}
"""Interpreters of foreign systems inside of which tests run, by their folder or file; the last that fits counts."""


@dataclass(frozen=True)
class Scenario:
    """One run and its expected results."""

    name: str
    judge: Callable[[str, dict[str, Any]], list[Figure]]
    assignments: Sequence[str] = ()
    fault: Callable[[LiveRun], None] | None = None
    code: int = 0
    config: Path = QUICKSTART
    deadline_s: float = RUN_DEADLINE_S
    missing: Callable[[], str] = str
    """Returns why it cannot run; empty if it can."""


def nothing_lost(where: str, summary: dict[str, Any]) -> list[Figure]:
    """Return the figures that hold for every run."""
    accounted = sum(
        summary[f"groups_{state}"]
        for state in ("trained", "filtered", "expired", "dead", "in_flight", "discarded", "lost")
    )
    return [
        equal(where, "groups_lost", summary["groups_lost"], 0),
        equal(where, "groups_trained_twice", summary["groups_trained_twice"], 0),
        equal(where, "groups_accepted accounted for", accounted, summary["groups_accepted"]),
        at_most(where, "staleness_max", summary["staleness_max"], summary["staleness_bound"]),
    ]


def learned(where: str, summary: dict[str, Any]) -> list[Figure]:
    return [
        at_most(where, "reward_first", summary["reward_first"], 0.3),
        at_least(where, "reward_last", summary["reward_last"], 0.95),
        at_most(where, "wall_s", summary["wall_s"], 60.0),
        at_most(where, "staleness_bound", summary["staleness_bound"], 4),
        at_least(where, "workers_min", summary["workers_min"], 2),
        at_most(where, "workers_max", summary["workers_max"], 4),
        *nothing_lost(where, summary),
    ]


def learned_nothing(where: str, summary: dict[str, Any]) -> list[Figure]:
    return [at_most(where, "reward_last", summary["reward_last"], 0.3), *nothing_lost(where, summary)]


def survived(where: str, summary: dict[str, Any]) -> list[Figure]:
    return [at_least(where, "reward_last", summary["reward_last"], 0.95), *nothing_lost(where, summary)]


def bound_is_broken(where: str, summary: dict[str, Any]) -> list[Figure]:
    """Without pacing the staleness must exceed the bound, or the bound proves nothing."""
    beyond = summary["staleness_bound"] + 1
    return [at_least(where, "staleness_max without pacing", summary["staleness_max"], beyond)]


def kill_and_drain_workers(live: LiveRun) -> None:
    """SIGKILL one worker and drain another by SIGUSR1, in the middle of the run."""
    live.wait_for_step(100)
    live.wait_for("two workers", lambda: len(live.workers()) >= 2)
    first, second, *_ = live.workers()
    live.kill(first, signal.SIGKILL)
    live.kill(second, signal.SIGUSR1)


def kill_trainer(live: LiveRun) -> None:
    """SIGKILL the trainer between two checkpoints."""
    live.wait_for_step(130)
    live.kill("trainer", signal.SIGKILL)


def trainer_resumed(where: str, summary: dict[str, Any]) -> list[Figure]:
    return [
        at_least(where, "trainer_resumes", summary["trainer_resumes"], 1),
        at_least(where, "groups_rewound", summary["groups_rewound"], 1),
        *survived(where, summary),
    ]


def learned_with_vllm(where: str, summary: dict[str, Any]) -> list[Figure]:
    return [
        at_least(where, "reward_last", summary["reward_last"], 0.9),
        at_most(where, "wall_s", summary["wall_s"], VLLM_WALL_S),
        *nothing_lost(where, summary),
    ]


def no_vllm() -> str:
    """Return why there is no vLLM; empty if there is one."""
    try:
        require_vllm(VLLM)
    except ConfigError as error:
        return error.problem
    return ""


SCENARIOS: Final = (
    *(Scenario(f"seed {seed}", learned, (f"run.seed={seed}",)) for seed in SEEDS),
    Scenario("control: rate 0", learned_nothing, ("trainer.learning_rate=0.0",)),
    Scenario("control: shuffled", learned_nothing, ("trainer.shuffle_rewards=true",)),
    Scenario(
        "control: no pacing",
        bound_is_broken,
        ("environment.sort3.pacing=false", 'environment.sort3.stale="pass"'),
    ),
    Scenario("workers killed", survived, fault=kill_and_drain_workers),
    Scenario("trainer killed", trainer_resumed, fault=kill_trainer),
    Scenario(
        "vllm",
        learned_with_vllm,
        (f"inference.vllm.python={VLLM}",),
        config=QUICKSTART.with_name("quickstart-vllm.toml"),
        deadline_s=VLLM_WALL_S + RUN_DEADLINE_S,
        missing=no_vllm,
    ),
)


def play(one: Scenario, directory: Path) -> list[Figure]:
    """Run and judge a scenario; a failed run is an unmet figure, not an exception."""
    if why := one.missing():
        return [Figure(one.name, "the run itself", "not played", why, met=False)]
    run_dir = directory / one.name.replace(" ", "-").replace(":", "")
    try:
        code, summary = scenario.run(
            run_dir, one.assignments, config=one.config, fault=one.fault, deadline_s=one.deadline_s
        )
    except ScenarioError as error:
        return [Figure(one.name, "the run itself", "failed", str(error), met=False)]
    return [equal(one.name, "exit code", code, one.code), *one.judge(one.name, summary)]


def commands_answer() -> Iterator[Figure]:
    """Time the start-up of every command: best of five, on a machine with other load."""
    commands = {
        "import rolloutmq, s": [sys.executable, "-c", "import rolloutmq"],
        "rolloutmq --help, s": [sys.executable, "-m", "rolloutmq.launch.cli", "--help"],
    }
    for name, command in commands.items():
        yield at_most("commands", name, min(_seconds(command) for _ in range(5)), 0.5)


def _seconds(command: Sequence[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def promised_tests() -> Iterator[Figure]:
    """Run the tests named by promises once, and report each promise."""
    promises = tomllib.loads(PROMISES.read_text())["promise"]
    names = sorted({test for promise in promises for test in promise["tests"]})
    with tempfile.TemporaryDirectory(prefix="rolloutmq-accept-") as directory:
        reports = []
        for number, words in enumerate(runs_of_tests(names)):
            reports.append(Path(directory) / f"{number}.xml")
            command = [*words, "-q", "--no-header", f"--junit-xml={reports[-1]}"]
            subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        passed = _passed(reports)
    for promise in promises:
        failing = [test for test in promise["tests"] if not passed(test)]
        said = f"not passed: {', '.join(failing)}" if failing else f"{len(promise['tests'])} tests"
        yield Figure(promise["part"], promise["says"], "tests", said, not failing)


def runs_of_tests(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield a command for each run of the tests of these names; those of foreign systems may run inside of these."""
    inside = {
        name: python for name in names for folder, python in THEIR_PYTHON.items() if name.startswith(folder)
    }
    own, rival = TESTED["own"], TESTED["rival"]
    yield [sys.executable, "-m", "pytest", *own, *names]
    yield [sys.executable, "-m", "pytest", *rival, *(name for name in names if name not in inside)]
    for python in sorted(set(inside.values())):
        if python.exists():
            chosen = (name for name, its in inside.items() if its == python)
            yield [str(python), "-m", "pytest", *rival, *chosen]


def measured_rows() -> Iterator[Figure]:
    """Report each row with a goal as last measured, and each figure with too few rows."""
    rows = json.loads(RESULTS.read_text())["rows"]
    found = Counter(row["figure"] for row in rows)
    for promised in tomllib.loads(PROMISES.read_text())["row"]:
        figure, least = promised["figure"], promised["rows"]
        if found[figure] < least:
            yield Figure("bench", f"{figure}, rows", found[figure], f">= {least}, measured", met=False)
    for row in rows:
        if row["goal"] is not None:
            of, _, bound = row["bound"].partition(", ")
            said = f"{'>=' if bound == 'at least' else '<='} {row['goal']:g}, {row['rival_name']}"
            name = f"{row['figure']}, {row['payload']}"
            yield Figure("bench", name, row[of], said, row["met"])


def _passed(reports: Sequence[Path]) -> Callable[[str], bool]:
    import xml.etree.ElementTree as ElementTree

    verdicts: dict[str, list[bool]] = {}
    roots = (ElementTree.parse(report).getroot() for report in reports if report.exists())
    for case in (case for root in roots for case in root.iter("testcase")):
        # A test in a class, such as hypothesis' state machines, counts for its module.
        parts = [part for part in str(case.get("classname")).split(".") if not part[:1].isupper()]
        module = "/".join(parts) + ".py"
        name = str(case.get("name")).partition("[")[0]
        verdicts.setdefault(f"{module}::{name}", []).append(not len(case))
        verdicts.setdefault(module, []).append(not len(case))
        for end in range(1, len(parts)):  # a promise may name a folder
            verdicts.setdefault("/".join(parts[:end]), []).append(not len(case))
    return lambda test: bool(verdicts.get(test)) and all(verdicts[test])


def main(words: Sequence[str]) -> int:
    """Run the selected scenarios, print and save every figure; return 0 if all are met."""
    figures: list[Figure] = []
    chosen = [one for one in SCENARIOS if not words or any(word in one.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="rolloutmq-accept-") as directory:
        for one in chosen:
            for figure in play(one, Path(directory)):
                figures.append(figure)
                print(figure.line(), flush=True)
    parts = {
        "commands": commands_answer,
        "simulated": cells.promised,
        "elastic": workers.followed,
        "bench": measured_rows,
        "tests": promised_tests,
    }
    for part, judge in parts.items():
        if not words or part in words:
            for figure in judge():
                figures.append(figure)
                print(figure.line(), flush=True)
    if not words:
        rows = [
            {key: getattr(figure, key) for key in ("scenario", "name", "value", "bound", "met")}
            for figure in figures
        ]
        (Path(__file__).parent / "accepted.json").write_text(json.dumps(rows, indent=1) + "\n")
    unmet = sum(not figure.met for figure in figures)
    print(f"{len(figures) - unmet} met, {unmet} unmet")
    return int(unmet > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
