"""The container file: small, without rights, and its commands run in an empty folder in place of its home."""

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests.house.distribution.checkout import ROOT, clean_environ, constraints, copy_checkout, interpreter

HOME = "/home/rolloutmq"
INDEX = " --index-url https://download.pytorch.org/whl/cpu"
STEP_S = 900
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]


def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the file with its arguments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def sent(name: str) -> bool:
    """Return whether the builder sees a file of the checkout."""
    top, *_ = parts = Path(name).parts
    hidden = [pattern.removeprefix("**/") for pattern in IGNORED if pattern.startswith("**/")]
    if any(fnmatch(part, pattern) for part in parts for pattern in hidden):
        return False
    return not any(fnmatch(top, pattern) for pattern in IGNORED)


def test_it_runs_as_a_user_without_rights() -> None:
    found = instructions()
    kinds = [kind for kind, _ in found]
    assert kinds.count("FROM") == kinds.count("USER") == kinds.count("CMD") == 1
    user = kinds.index("USER")
    assert found[user][1] not in ("root", "0")
    assert found[:user] == [("FROM", "python:3.11-slim"), ("RUN", "useradd --create-home rolloutmq")]
    assert all("--no-cache-dir" in words for kind, words in found if "pip install" in words)
    assert all(
        map(sent, ("LICENSE", "README.md", "setup.py", "src/rolloutmq/bus", "examples/quickstart.toml"))
    )
    assert not any(map(sent, (".git/HEAD", ".venv/a", "tests/conftest.py", "bus/__pycache__/a.pyc")))


@pytest.mark.rival
@pytest.mark.timeout(3 * STEP_S)
def test_its_commands_train_the_quickstart(tmp_path: Path) -> None:
    """Not run: `useradd`, and PyTorch's own index, since torch comes from where pip finds the pinned build for CPUs."""
    found = instructions()
    (image,) = re.findall(r"^python:(\d\.\d+)-slim$", found[0][1])
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(interpreter(image))
    pins = constraints(tmp_path / "pins.txt")
    quick = {"PIP_NO_COMPILE": "0"}  # pip reads it the other way round: no byte code for thousands of files
    environ = clean_environ(PIP_CONSTRAINT=str(pins), PATH=f"{home / 'bin'}:/usr/bin:/bin", **quick)
    for kind, words in found[[kind for kind, _ in found].index("USER") + 1 :]:
        here = words.replace(HOME, str(home))
        if kind == "RUN":
            call(["sh", "-ec", here.replace(INDEX, "")], home, environ)
        elif kind == "ENV":
            name, _, value = here.partition("=")
            environ[name] = value.replace("$PATH", environ["PATH"])
        elif kind == "COPY":
            assert words == "--chown=rolloutmq . source"
            copy_checkout(home / "source", sent)
        elif kind == "CMD":
            call([*json.loads(words), "--set", "trainer.steps=2"], home, environ)
        else:
            assert (kind, words) == ("WORKDIR", HOME)
    summary = json.loads((home / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert (home / "runs" / "quickstart" / "report.png").exists()


def call(words: list[str], home: Path, environ: dict[str, str]) -> None:
    """Run a command of the container; show its output if it fails."""
    done = subprocess.run(
        ["/usr/bin/env", *words],
        cwd=home,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
