"""The release, installed by pip into clean environments of each Python that it declares, and tried there."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.house.distribution.checkout import ROOT, clean_environ, constraints, copy_checkout, interpreter

SMOKE = Path(__file__).with_name("smoke.py")
TOOLS = ROOT / ".venv-build" / "bin"
PYTHONS = ("3.11", "3.12", "3.13")
INSTALL_S, SMOKE_S = 540, 540

pytestmark = [pytest.mark.rival, pytest.mark.timeout(INSTALL_S + SMOKE_S)]


def call(*words: str | Path, cwd: Path, within_s: float, **environ: str) -> str:
    """Run a program in a clean environment; show its output if it fails."""
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env=clean_environ(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def version_of(file: Path) -> str:
    """Return the version in the name of a wheel or a source distribution."""
    return file.name.removesuffix(".tar.gz").split("-")[1]


@pytest.mark.parametrize("kind", ["wheel", "sources"])
@pytest.mark.parametrize("python", PYTHONS)
def test_pip_installs_it_and_it_works(
    python: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file: Path = request.getfixturevalue(kind)
    call(interpreter(python), "-m", "venv", "clean", cwd=tmp_path, within_s=INSTALL_S)
    clean = tmp_path / "clean" / "bin" / "python"
    pins = constraints(tmp_path / "pins.txt")
    call(
        clean, "-m", "pip", "install", "--constraint", pins, file, "pytest", cwd=tmp_path, within_s=INSTALL_S
    )
    call(clean, "-m", "pip", "check", cwd=tmp_path, within_s=INSTALL_S)
    told = call(clean, SMOKE, version_of(file), cwd=tmp_path, within_s=SMOKE_S)
    assert told.splitlines()[-1] == "smoke: ok"


def test_the_extra_for_training_trains_the_quickstart(wheel: Path, tmp_path: Path) -> None:
    """On the Python for which there is a build of torch for CPUs; what the extra leaves out would be missed here."""
    call(interpreter("3.11"), "-m", "venv", "clean", cwd=tmp_path, within_s=INSTALL_S)
    programs, pins = tmp_path / "clean" / "bin", constraints(tmp_path / "pins.txt")
    install = ("-m", "pip", "install", "--no-compile", "--constraint", pins, f"{wheel}[trainer]")
    call(programs / "python", *install, cwd=tmp_path, within_s=INSTALL_S)
    call(programs / "python", "-m", "pip", "check", cwd=tmp_path, within_s=INSTALL_S)
    for name in ("quickstart.toml", "sort_digits.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    steps = ("--plain", "--set", "trainer.steps=3")
    told = call(programs / "rolloutmq", "up", "quickstart.toml", *steps, cwd=tmp_path, within_s=SMOKE_S)
    assert "ended      the trainer is done" in told
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert (summary["steps"], summary["groups_lost"]) == (3, 0)


def test_the_release_passes_the_checks_of_the_index(tmp_path: Path) -> None:
    copy_checkout(tmp_path / "tree")
    build = ("-m", "build", "--no-isolation", "--outdir", tmp_path / "dist")
    call(TOOLS / "python", *build, cwd=tmp_path / "tree", within_s=INSTALL_S)
    files = sorted((tmp_path / "dist").iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    told = call(TOOLS / "python", "-m", "twine", "check", "--strict", *files, cwd=tmp_path, within_s=60)
    assert told.count("PASSED") == len(files)
