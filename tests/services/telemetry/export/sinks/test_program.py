"""The process of a sink: it ends with its input only, and an error of the library costs one point."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.telemetry.export.packages import SINKS
from rolloutmq.services.telemetry.export.sinks import program
from rolloutmq.services.telemetry.export.sinks.identity import TrackerFiles
from rolloutmq.services.telemetry.export.sinks.points import Point
from rolloutmq.services.telemetry.export.sinks.program import TRACKERS, serve
from rolloutmq.services.telemetry.export.sinks.protocol import line_of


class Fake:
    """A tracker that refuses the step 2."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.finished = False

    def log(self, point: Point) -> None:
        if point.step == 2:
            raise ValueError("not\nthis one " + "x" * 1000)
        self.steps.append(point.step)

    def finish(self) -> None:
        self.finished = True


def test_each_point_has_its_outcome() -> None:
    lines = [line_of(Point(step, 0.0, {"a": 1.0})) for step in (1, 2, 3)] + [b"not a point\n"]
    tracker, told = Fake(), io.BytesIO()
    serve(tracker, io.BytesIO(b"".join(lines)), told)
    outcomes = [json.loads(line)["why"] for line in told.getvalue().splitlines()]
    assert [bool(why) for why in outcomes] == [False, True, False, True]
    assert outcomes[1].startswith("ValueError: not this one xxx")
    assert len(outcomes[1]) == program.WHY_LIMIT
    assert (tracker.steps, tracker.finished) == ([1, 3], True)


def test_every_sink_has_a_tracker_and_a_package() -> None:
    assert TRACKERS.keys() == SINKS.keys()


def test_a_signal_does_not_end_it_and_a_missing_package_is_one_line(run_dir: Path) -> None:
    missing = next((name for name in SINKS if not SINKS[name].is_met), None)
    if missing is None:
        pytest.skip("the packages of all sinks are installed")
    write_json(RunLayout(run_dir).config, RunConfig().model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-m", program.__name__, missing, str(run_dir)],
        input=b"",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.decode().startswith(f"sink failed sink={missing} error=ModuleNotFoundError: ")
    assert done.stderr.count(b"\n") == 1


BLOCKED = """
import os, signal, sys
from pathlib import Path
from rolloutmq.services.telemetry.export.sinks import program

class Tracker:
    def __init__(self, *_):
        print("a library talks")
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    def log(self, point):
        print("and talks")
    def finish(self):
        Path(sys.argv[2], "finished").touch()

program.TRACKERS["wandb"] = Tracker
raise SystemExit(program.main("wandb", Path(sys.argv[2])))
"""


def test_signals_of_the_end_of_the_run_do_not_lose_the_last_points(run_dir: Path) -> None:
    write_json(RunLayout(run_dir).config, RunConfig().model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "wandb", str(run_dir)],
        input=line_of(Point(1, 0.0, {})),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b'{"why":""}\n')
    assert b"a library talks" in done.stderr
    assert (run_dir / "finished").exists()


def test_the_id_of_a_tracker_stays_with_the_run_directory(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    files = TrackerFiles(layout, "wandb")
    assert files.id == ""
    files.id = "abc"
    assert TrackerFiles(layout, "wandb").id == "abc"
    assert TrackerFiles(layout, "mlflow").id == ""
    assert layout.trackers.stat().st_mode & 0o077 == 0
