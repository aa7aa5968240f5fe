"""The adapters against the newest releases: `python -m tests.house.requirements.newest [NAME...]`, or `make newest`.

It asks the index which release of each framework is the newest that this Python can install. If that is not the tested
one, it makes `.venv-newest-NAME`, as `make .venv-NAME/.installed` would, installs the newest release there with what it
requires, and runs the adapter's tests. It only reports: the exit code is 0 whatever the tests say.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from tests.house.requirements.lock import ask_index

ROOT: Final = Path(__file__).parents[3]
LIMIT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is upgraded, and what is run then."""

    packages: tuple[str, ...]
    """The framework first, then what it is released with."""
    tests: tuple[str, ...]
    inside: bool = False
    """The tests run inside of the environment of the framework, not beside it."""
    dependencies: bool = True
    """Install what the release requires; otherwise only the pinned packages."""
    guide: str = ""
    """Name of its guide, if it is not that of the adapter."""

    @property
    def framework(self) -> str:
        """Return the package of the framework."""
        return self.packages[0]


ADAPTERS: Final = {
    "trl": Adapter(("trl",), ("tests/trainer/integrations/trl",)),
    "skyrl": Adapter(("skyrl", "skyrl-gym"), ("tests/trainer/integrations/skyrl",)),
    "verl": Adapter(("verl", "TransferQueue"), ("tests/trainer/integrations/verl",), dependencies=False),
    "verifiers04": Adapter(
        ("verifiers",), ("tests/services/worker/verifiers",), inside=True, guide="verifiers"
    ),
}


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest releases of a package; None if there is none."""

    installable: Version | None
    """The newest that this Python can install."""
    overall: Version | None
    overall_python: str = ""
    """What the newest of all requires of Python."""


def newest_in(files: Iterable[Mapping[str, Any]], python: Version) -> Newest:
    """Return the newest releases in an index's list of files; pre-releases and yanked files do not count."""
    installable = overall = None
    overall_python = ""
    for file in files:
        version = _version_of(file["filename"])
        if version is None or version.is_prerelease or file.get("yanked"):
            continue
        required = file.get("requires-python") or ""
        if overall is None or version > overall:
            overall, overall_python = version, required
        if python in SpecifierSet(required) and (installable is None or version > installable):
            installable = version
    return Newest(installable, overall, overall_python)


def _version_of(filename: str) -> Version | None:
    for parse in (parse_wheel_filename, parse_sdist_filename):
        try:
            return parse(filename)[1]
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            continue
    return None


def interpreter_variable(name: str) -> str:
    """Return the environment variable that tells the tests of an adapter which interpreter has its framework."""
    return f"{name.upper()}_PYTHON"


def pinned(name: str, package: str) -> Version:
    """Return the pinned version of a package in the requirements of an adapter. LookupError if it has none."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found = re.search(rf"^{re.escape(package)}==(\S+)", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"requirements/{name}.txt: has no {package}")
    return Version(found[1])


def ask(package: str) -> Newest:
    """Ask the index that pip uses. OSError if it does not answer."""
    return newest_in(ask_index(package)["files"], Version("{}.{}.{}".format(*sys.version_info)))


def difference(known: Version, found: Newest) -> str:
    """Return what is newer than the tested release, in words; empty if it is the newest of all."""
    if found.overall is None or found.overall <= known:
        return ""
    if found.installable == found.overall:
        return f"newest {found.overall}"
    here = f"; newest for this Python {found.installable}" if found.installable != known else ""
    return f"newest {found.overall} needs Python {found.overall_python}{here}"


def run(name: str, adapter: Adapter) -> str:
    """Make the environment with the newest release, and run the tests; return their last line."""
    where = ROOT / f".venv-newest-{name}"
    python = where / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    hashed = (*pip, "--no-deps", "--require-hashes", "--requirement")
    steps: list[tuple[str, ...]] = [
        (sys.executable, "-m", "venv", "--clear", str(where)),
        (*hashed, f"requirements/{name}.txt"),
        (*hashed, "requirements/torch-cpu.txt"),
        (*pip, "--no-deps", "--no-build-isolation", "--editable", "."),
        (*pip, "--upgrade", *(() if adapter.dependencies else ("--no-deps",)), *adapter.packages),
    ]
    for step in steps:
        done = subprocess.run(step, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            return f"not installed: {_last_line(done.stderr)}"
    (where / ".installed").touch()
    tests = (
        str(python) if adapter.inside else sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "rival and not extended",
        *adapter.tests,
    )
    env = {**os.environ, interpreter_variable(name): str(python)}
    done = subprocess.run(
        tests, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "\n  ".join([_last_line(done.stdout), *failed])


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def main(names: Sequence[str]) -> int:
    """Report on the named adapters, or on all."""
    if unknown := set(names) - set(ADAPTERS):
        sys.stderr.write(f"unknown adapter: {', '.join(sorted(unknown))}; use {', '.join(ADAPTERS)}\n")
        return 2
    for name in names or ADAPTERS:
        adapter = ADAPTERS[name]
        known = pinned(name, adapter.framework)
        try:
            found = ask(adapter.framework)
        except OSError as error:
            sys.stdout.write(f"{name}: tested {known}; the index does not answer: {error}\n")
            continue
        news = difference(known, found)
        sys.stdout.write(f"{name}: tested {known}; {news or 'it is the newest'}\n")
        if found.installable is not None and found.installable > known:
            sys.stdout.write(f"  {run(name, adapter)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
