"""The doctor says what is missing, how to get it, and whether a run can start."""

import json
from pathlib import Path

import pytest

from rolloutmq.launch import preflight
from rolloutmq.launch.commands import doctor
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, MissingError


def test_an_old_python_is_missing_something() -> None:
    finding = doctor.python_version((3, 10, 2))
    assert not finding.fine
    assert finding.needed
    assert "3.11" in finding.remedy


def test_a_package_that_is_not_there_names_its_extra() -> None:
    finding = doctor.module("no_such_package_here", "trainer", "torch")
    assert not finding.fine
    assert finding.remedy == "in the checkout of RolloutMQ, run pip install '.[trainer]'"


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


def test_a_configuration_is_looked_at_as_up_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", list)
    file = tmp_path / "run.toml"
    file.write_text('[environment.e]\nentry = "env.py:Env"\n')
    assert doctor.report(as_json=False, file=file) == 2
    assert f"WRONG   configuration: {file}; environment.e.entry: there is no file" in capsys.readouterr().out
    (tmp_path / "env.py").touch()
    assert doctor.report(as_json=False, file=file) == 2
    assert "environment.e.entry: env.py has no class `Env`" in capsys.readouterr().out
    (tmp_path / "env.py").write_text("class Env:\n    async def rollout(self, policy, size, rng): ...\n")
    assert doctor.report(as_json=False, file=file) == 0
    assert capsys.readouterr().out == f"ok      configuration: {file}\n"


@pytest.mark.parametrize(
    ("found", "code", "word"),
    [
        (AddressInUseError("127.0.0.1:1", "process 7"), 1, "FAILED"),
        (MissingError("the package torch", "install it"), 1, "MISSING"),
        (ConfigError("trainer.steps", "is wrong"), 2, "WRONG"),
        (("the environments could not be tried",), 0, "ok"),
    ],
)
def test_only_a_wrong_configuration_is_wrong_and_advice_fails_nothing(
    found: Exception | tuple[str, ...],
    code: int,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def check(_config: object) -> tuple[str, ...]:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(doctor, "examine", list)
    monkeypatch.setattr(preflight, "check", check)
    file = tmp_path / "run.toml"
    file.touch()
    assert doctor.report(as_json=False, file=file) == code
    assert capsys.readouterr().out.startswith(f"{word:<7} configuration: {file}")
    assert doctor.report(as_json=True, file=file) == code
    first, *more = json.loads(capsys.readouterr().out)
    assert first["verdict"] == word
    assert [one["verdict"] for one in more] == (["advice"] if code == 0 else [])
