"""A copy of this checkout, other Pythons, and pins for a clean environment."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.house.requirements.lock import pins_of

ROOT = Path(__file__).parents[3]
EXTRAS = re.compile(r"\[[^]]*\]")


def copy_checkout(target: Path, keep: Callable[[str], bool] = lambda _name: True) -> None:
    """Copy what git would commit, links as links; `keep` chooses by the path."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout.split(b"\0")
    for name in filter(keep, (os.fsdecode(name) for name in names if name)):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)


@cache
def interpreter(version: str) -> Path:
    """Return the Python of a version such as `3.12`, from the PATH or of pyenv; skip the test if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = [Path(folder) / f"python{version}" for folder in os.get_exec_path()]
    for candidate in (*on_path, *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if candidate.exists() and (found := _program(candidate, version)):
            return found
    pytest.skip(f"there is no Python {version} on this machine")


def _program(file: Path, version: str) -> Path | None:
    """Return the program behind a file that may be a script of pyenv, or nothing if it is not of that version."""
    code = "import sys; print(sys.version.split()[0], sys.executable)"
    told = subprocess.run([file, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    found, _, program = told.stdout.strip().partition(" ")
    return Path(program) if found.startswith(f"{version}.") else None


def constraints(path: Path) -> Path:
    """Write the pinned versions of all packages, without hashes: a local wheel has none to compare."""
    files = [(ROOT / "requirements" / name).read_text() for name in ("dev.txt", "torch-cpu.txt")]
    pins = [pin for text in files for pin in pins_of(text)]
    path.write_text("".join(f"{EXTRAS.sub('', pin)}\n" for pin in pins))
    return path


def clean_environ(**more: str) -> dict[str, str]:
    """Return this process's variables without those by which a Python would find this checkout or its environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | more
