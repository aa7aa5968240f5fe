"""The version: from the tags of git, else of the source distribution, else that of the release to come."""

import importlib.metadata
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version
from tests.house.distribution.checkout import ROOT

import rolloutmq


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    """The module `setup.py`, which builds nothing when it is imported."""
    spec = spec_from_file_location("rolloutmq_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(tree: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True, timeout=60)


def test_a_tag_and_the_commits_after_it(setup: ModuleType, tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert setup.version_of(tmp_path) == f"{setup.NEXT}.dev0"
    steps = [("", ".dev1"), ("", ".dev2"), ("v0.1.0", ""), ("other", ".post1"), ("v0.2.0rc1", "")]
    found = []
    for tag, _ in steps:
        git(tmp_path, "commit", "--allow-empty", "--message", "x")
        if tag:
            git(tmp_path, "tag", tag)
        found.append(setup.version_of(tmp_path))
    assert found == ["0.1.0.dev1", "0.1.0.dev2", "0.1.0", "0.1.0.post1", "0.2.0rc1"]
    assert found == sorted(found, key=Version)


def test_a_copy_without_git_is_not_described_by_the_repository_around_it(
    setup: ModuleType, tmp_path: Path
) -> None:
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "x")
    git(tmp_path, "tag", "v9.9.9")
    copy = tmp_path / "vendored"
    copy.mkdir()
    assert setup.version_of(copy) == f"{setup.NEXT}.dev0"


def test_a_machine_without_git(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init")
    monkeypatch.setenv("PATH", "")
    assert setup.version_of(tmp_path) == f"{setup.NEXT}.dev0"


def test_the_sources_carry_their_version(setup: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text(
        "Metadata-Version: 2.4\nName: rolloutmq\nVersion: 1.2.3\n\n# Version: 4\n"
    )
    assert setup.version_of(tmp_path) == "1.2.3"


def test_without_an_address_the_readme_stays_as_it_is(setup: ModuleType) -> None:
    text = "[a](docs/a.md#b), ![c](c.png), [d](https://example.com), [e](#e)"
    assert setup.linked(text, "") == text
    assert setup.linked(text, "https://x/{view}/v1") == (
        "[a](https://x/blob/v1/docs/a.md#b), ![c](https://x/raw/v1/c.png), [d](https://example.com), [e](#e)"
    )


def test_the_package_and_the_command_tell_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rolloutmq.__version__ == importlib.metadata.version("rolloutmq")
    told = subprocess.run(
        [sys.executable, "-m", "rolloutmq.launch.cli", "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert told.stdout == f"rolloutmq {rolloutmq.__version__}\n"

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert rolloutmq.__version__ == "0+unknown"
