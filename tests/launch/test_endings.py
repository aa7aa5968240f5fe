"""The end of a command whose packages are missing: one line that names the extra, and no traceback."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rolloutmq.launch.endings import TRAINER_NEEDS, guarded

ROOT = Path(__file__).parents[2]
WITHOUT = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"


def test_the_packages_of_the_trainer_are_those_of_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {Requirement(text).name for text in extras["trainer"]} == {*TRAINER_NEEDS}


def test_a_command_without_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        guarded(lambda: str(import_module("torch")))
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("rolloutmq: the package torch is missing: run pip install 'rolloutmq[trainer]'; ")
    assert told.count("\n") == 1


def test_another_missing_package_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        guarded(lambda: str(import_module("no_such_package")))


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        ("from rolloutmq import share_weights", "trainer"),
        ("from rolloutmq import run_policy", "trainer"),
        ("import rolloutmq.trainer.integrations.trl", "trl"),
    ],
)
def test_a_public_name_without_torch_names_the_extra(statement: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + statement],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rolloutmq.schemas.errors.MissingError: the package t")
    assert f" is missing: run pip install 'rolloutmq[{extra}]'" in last
    assert "ModuleNotFoundError" not in done.stderr
