"""The doctor says what is missing, how to get it, and whether a run can start."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from tests.services.nvml.driver import Driver, gpu

from rolloutmq.launch.commands import doctor
from rolloutmq.launch.endings import UserCodeError
from rolloutmq.launch.preflight import checks
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, MissingError, RolloutMQError

ENVIRONMENT = """
from rolloutmq import SingleTurn


class Env(SingleTurn):
    def task(self, rng):
        return 1

    def prompt(self, task):
        return "1="

    def score(self, task, completion):
        return 0
"""


def test_an_old_python_is_missing_something() -> None:
    finding = doctor.python_version((3, 10, 2))
    assert not finding.fine
    assert finding.needed
    assert "3.11" in finding.remedy


def test_a_package_that_is_not_there_names_its_extra() -> None:
    finding = doctor.module("no_such_package_here", "report", "matplotlib")
    assert not finding.fine
    assert finding.remedy == "run pip install 'rolloutmq[report]'"


def test_no_shared_memory(tmp_path: Path) -> None:
    assert not doctor.shared_memory(tmp_path / "none").fine


def test_only_what_is_needed_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = doctor.Finding("gpu", fine=False, found="none", remedy="buy one", needed=False)
    monkeypatch.setattr(doctor, "examine", lambda: [advice])
    assert doctor.report(as_json=False) == 0
    assert capsys.readouterr().out == "advice  gpu: none; buy one\n"
    lacking = doctor.Finding("disk", fine=False, found="0", remedy="free some")
    monkeypatch.setattr(doctor, "examine", lambda: [advice, lacking])
    assert doctor.report(as_json=True) == 1
    assert json.loads(capsys.readouterr().out)[1]["remedy"] == "free some"


def test_this_machine_can_run() -> None:
    findings = {finding.what: finding for finding in doctor.examine()}
    assert findings["python"].fine
    assert "gpu" in findings


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """A GPU driver of two GPUs, in this process."""
    driver = Driver(tmp_path / "nvml")
    driver.show(gpu("GPU-1"), gpu("GPU-2"))
    with driver.installed():
        yield driver


def test_gpus_are_counted_and_left_alone(driver: Driver) -> None:  # noqa: ARG001
    assert doctor.gpus() == doctor.Finding("gpu", fine=True, found="2")
    assert pynvml.nvmlLib.fakeUsers() == 0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch."),
    ],
)
def test_a_driver_that_does_not_work_is_advice_with_its_reason(driver: Driver, code: int, why: str) -> None:
    driver.fail(code)
    finding = doctor.gpus()
    assert (finding.word, finding.found) == ("advice", f"none ({why})")
    assert "reboot if it was updated" in finding.remedy


def test_a_gpu_that_cannot_be_used_is_named_beside_the_others(driver: Driver) -> None:
    driver.change("GPU-2", lost=True)
    finding = doctor.gpus()
    assert (finding.word, finding.found) == ("advice", "1 of 2 (index 1: GPU is lost)")
    driver.show(gpu("GPU-1"), gpu("GPU-2", fails={"*": pynvml.NVML_ERROR_NO_PERMISSION}))
    assert doctor.gpus().found == "1 of 2 (index 1: Insufficient Permissions)"


def test_a_driver_that_hangs_holds_up_nobody(driver: Driver) -> None:
    driver.change("GPU-2", hangs=("nvmlDeviceGetTemperature",))
    try:
        finding = doctor.gpus(timeout_s=3.0)
    finally:
        driver.show()
    assert finding.found == "1 of 2 (GPU-2: no reply from the driver for 3 s)"


def test_a_driver_that_hangs_from_the_start_is_advice_too(driver: Driver) -> None:
    driver.stick()
    try:
        finding = doctor.gpus(timeout_s=0.5)
    finally:
        driver.back()
    assert (finding.word, finding.found) == ("advice", "none (no reply from the driver for 0 s)")


def test_the_command_says_what_the_driver_says(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "nvml")

    def says() -> str:
        told = subprocess.run(
            [sys.executable, "-m", "rolloutmq.launch.cli", "doctor", "--json"],
            env=os.environ | driver.environment,
            capture_output=True,
            text=True,
            timeout=120.0,
            check=True,
        )
        return next(str(one["found"]) for one in json.loads(told.stdout) if one["what"] == "gpu")

    assert says() == "none (Driver Not Loaded)"
    driver.show(gpu("GPU-1"), gpu("GPU-2"), gpu("GPU-3"))
    assert says() == "3"


def test_a_configuration_is_looked_at_as_up_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", list)
    file = tmp_path / "run.toml"
    file.write_text('[environment.e]\nentry = "env.py:Env"\n')
    assert doctor.report(as_json=False, file=file) == 2
    assert "WRONG   environment.e.entry: there is no file" in capsys.readouterr().out
    (tmp_path / "env.py").touch()
    assert doctor.report(as_json=False, file=file) == 2
    assert "environment.e.entry: env.py has no class `Env`" in capsys.readouterr().out
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    assert doctor.report(as_json=False, file=file) == 0
    assert capsys.readouterr().out == (
        f"ok      configuration: {file}\nok      environment e: 8 tasks drawn, 4 scripted rollouts\n"
    )


def test_every_error_of_a_file_is_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    file = tmp_path / "run.toml"
    file.write_text(
        '[trainer]\nstepz = 4\nsteps = "many"\n[environment.a]\nentry = "env.py:Enw"\n'
        '[environment.b]\nentry = "none.py:Env"\n[environment.c]\nentri = "env.py:Env"\n'
    )
    assert doctor.check(file, assignments=["run.sead=1"], timeout_s=60.0, as_json=True) == 2
    found = json.loads(capsys.readouterr().out)
    assert {one["verdict"] for one in found} == {"WRONG"}
    assert {one["what"] for one in found} == {
        "trainer.stepz",
        "trainer.steps",
        "environment.a.entry",
        "environment.b.entry",
        "environment.c.entri",
        "run.sead",
    }


def test_code_that_raises_now_and_then_fails_a_check_and_shows_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raising = (
        "self.scored = getattr(self, 'scored', 0) + 1\n"
        "        if self.scored == 3:\n            raise KeyError(task)\n        return 0"
    )
    (tmp_path / "env.py").write_text(ENVIRONMENT.replace("return 0", raising))
    file = tmp_path / "run.toml"
    file.write_text('[environment.e]\nentry = "env.py:Env"\n')
    assert doctor.check(file, assignments=[], timeout_s=60.0, as_json=False) == 1
    fine, failed, _, frame, source, error, *_ = capsys.readouterr().out.splitlines()
    assert fine == f"ok      configuration: {file}"
    assert failed == "FAILED  environment.e.entry: a scripted rollout failed: KeyError: 1 (env.py:15)"
    assert [line.strip() for line in (frame, source, error)] == [
        "env.py:15: in score",
        "raise KeyError(task)",
        "E   KeyError: 1",
    ]


@pytest.mark.parametrize(
    ("found", "code", "word"),
    [
        (AddressInUseError("127.0.0.1:1", "process 7"), 1, "FAILED"),
        (MissingError("the package torch", "install it"), 1, "MISSING"),
        (ConfigError("trainer.steps", "is wrong"), 2, "WRONG"),
        (None, 0, "ok"),
    ],
)
def test_only_a_wrong_configuration_is_wrong_and_advice_fails_nothing(
    found: RolloutMQError | None,
    code: int,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def examined(_config: object, **_how: object) -> checks.Examined:
        advice = UserCodeError("environment.e", "mind it", "e.py:1: in score")
        return checks.Examined(problems=(found,)) if found else checks.Examined(advice=(advice,))

    monkeypatch.setattr(doctor, "examine", list)
    monkeypatch.setattr(checks, "examine", examined)
    file = tmp_path / "run.toml"
    file.touch()
    assert doctor.report(as_json=False, file=file) == code
    what = "trainer.steps: is wrong" if word == "WRONG" else f"configuration: {file}"
    said = capsys.readouterr().out
    assert said.startswith(f"{word:<7} {what}")
    assert said.endswith("advice  environment.e: mind it\n\n        e.py:1: in score\n\n") == (code == 0)
    assert doctor.report(as_json=True, file=file) == code
    first, *more = json.loads(capsys.readouterr().out)
    assert first["verdict"] == word
    assert [one["verdict"] for one in more] == (["advice"] if code == 0 else [])
