"""Programs of somebody else's under a real orchestrator: started, scaled, restarted, adopted, drained; nothing is lost.

The same is shown with an environment of Atropos in `tests/services/gateway/atropos/test_their_workers.py`.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Final

import pytest
from tests.services.programs.run import LIMIT_S, ProgramRun, Trainer, running

from rolloutmq.schemas.wire.control import Drain, SetWorkers

HERE: Final = Path(__file__).parent
BATCH: Final = 4
CONFIG: Final = """
[run]
name = "programs"
dir = "{run_dir}"

[environment.counter]
command = ["{python}", "counter.py", "{{gateway_url}}", "{record}/{{worker}}", "0.05"]
group_size = 2
concurrency = 1
min_workers = 1
max_workers = 4
drain_quiet_s = 0.5

[gateway]
enabled = true
port = 0

[inference]
kind = "none"

[trainer]
enabled = false
batch_sequences = 4

[weights]
backend = "posix_shm"

[orchestrator]
backoff_s = 0.05
"""


def promised(record: Path) -> set[int]:
    """Return the groups that were answered 200; the last line of a killed program may be half written."""
    return {int(line) for file in record.iterdir() for line in file.read_text().split("\n")[:-1]}


def test_programs_are_workers_like_ours(tmp_path: Path) -> None:
    record, run_dir = tmp_path / "record", tmp_path / "run"
    record.mkdir()
    shutil.copy(HERE / "counter.py", tmp_path)
    config = tmp_path / "run.toml"
    python = shutil.which("python3")
    config.write_text(CONFIG.format(run_dir=run_dir, record=record, python=python))
    with running(config, run_dir) as run, Trainer(run.url, BATCH) as trainer:
        run.wait(lambda: trainer.arrived, "the first batch")
        run.ask(SetWorkers(env="counter", count=3))
        run.wait(lambda: run.ready() == {"counter-0", "counter-1", "counter-2"}, "three workers")
        check_restart(run)
        check_adoption(run)
        run.ask(Drain(worker="counter-2"))
        run.wait(lambda: "counter-2" not in run.workers(), "the end of counter-2")
        run.wait(lambda: run.ready() == {"counter-0", "counter-1", "counter-3"}, "its successor")
        run.ask(SetWorkers(env="counter", count=1))
        run.wait(lambda: len(run.workers()) == 1, "one worker")
        assert run.log("gateway").count("program delivered everything") == 3
        run.wait(lambda: promised(record) <= trainer.arrived.keys(), "the last groups")
        assert max(trainer.arrived.values()) == 1
    assert "step=SIGKILL" not in run.log("orchestrator")


@pytest.mark.extended
def test_nothing_is_lost_whatever_is_killed(tmp_path: Path) -> None:
    """Gateway, broker, orchestrator and workers are killed in turn, while the number of workers changes."""
    record, run_dir = tmp_path / "record", tmp_path / "run"
    record.mkdir()
    shutil.copy(HERE / "counter.py", tmp_path)
    config = tmp_path / "run.toml"
    text = CONFIG.format(run_dir=run_dir, record=record, python=shutil.which("python3"))
    config.write_text(text + "crash_limit = 50\n")
    with running(config, run_dir) as run, Trainer(run.url, BATCH) as trainer:
        run.wait(lambda: trainer.arrived, "the first batch")
        for victim, count in zip(
            ["gateway", "broker", "", "orchestrator"] * 4, [4, 2, 3, 1] * 4, strict=True
        ):
            kill(run, victim, count, record)
        kept = promised(record)
        run.wait(lambda: kept <= trainer.arrived.keys(), "the last groups")
        assert max(trainer.arrived.values()) == 1
        assert len(kept) > 100


def kill(run: ProgramRun, victim: str, count: int, record: Path) -> None:
    """Kill a service, or a worker, while the number of workers changes; return when all goes on."""
    run.ask(SetWorkers(env="counter", count=count))
    pid = run.service(victim) if victim else next(iter(run.workers().values()))
    os.kill(pid, signal.SIGKILL)
    goal = len(promised(record)) + 4
    run.wait(lambda: len(run.ready()) == len(run.workers()) == count, f"{count} workers after {victim}")
    run.wait(lambda: len(promised(record)) > goal, f"groups after {victim}")


@pytest.mark.extended
def test_programs_feed_our_trainer(tmp_path: Path) -> None:
    record, run_dir = tmp_path / "record", tmp_path / "run"
    record.mkdir()
    shutil.copy(HERE / "counter.py", tmp_path)
    config = tmp_path / "run.toml"
    text = CONFIG.format(run_dir=run_dir, record=record, python=shutil.which("python3"))
    text = text.replace('"0.05"]', '"0.05", "10"]').replace("enabled = false", "steps = 12")
    config.write_text(text)
    with running(config, run_dir) as run:
        run.process.wait(LIMIT_S)
        assert run.process.returncode == 0, run.log("trainer")[-3000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["groups_lost"]) == (12, 0)
    assert summary["groups_trained"] + summary["groups_filtered"] >= 24


def check_restart(run: ProgramRun) -> None:
    """A killed worker comes back under its name."""
    before = run.workers()
    os.kill(before["counter-1"], signal.SIGKILL)
    run.wait(
        lambda: run.workers().get("counter-1", before["counter-1"]) != before["counter-1"], "the restart"
    )
    run.wait(lambda: len(run.ready()) == 3, "its registration")


def check_adoption(run: ProgramRun) -> None:
    """The workers outlive a killed orchestrator, and the next one adopts them."""
    workers, orchestrator = run.workers(), run.service("orchestrator")
    os.kill(orchestrator, signal.SIGKILL)
    run.wait(lambda: run.service("orchestrator") not in {0, orchestrator}, "another orchestrator")
    run.wait(lambda: run.log("orchestrator").count("adopted name=") == 3, "the adoption")
    assert run.workers() == workers
