"""Packages of the hub: what can be wrong with them is told by its key, and they change nothing of the process."""

import logging
import random
import signal
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.loader import check_entry
from rolloutmq.services.worker.verifiers import package as package_module
from rolloutmq.services.worker.verifiers.package import has_tasksets, load_package, module_name

PACKAGE = """
import logging
import random
import signal
import sys

import numpy as np
import verifiers

drawn = []

def load_environment(rows=1, key="", fail=""):
    drawn.append((random.random(), np.random.random()))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("verifiers.envs").error("made with %s", key)
    if fail == "exit":
        sys.exit(1)
    if fail:
        raise ValueError(f"no {fail} for {key}")
    return verifiers.Environment() if rows else object()
"""


class Environment:
    """The base class of theirs."""


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Verifiers 0.3.1 as far as the loader sees it, and a directory with a package."""
    versions = {"verifiers": "0.3.1"}
    monkeypatch.setattr(package_module, "version", versions.__getitem__)

    def load_environment(package: str, **arguments: Any) -> Any:
        try:
            return sys.modules[module_name(package)].load_environment(**arguments)
        except Exception as error:
            raise RuntimeError("failed to load") from error

    for name in ("verifiers", "verifiers.envs", "verifiers.envs.environment", "datasets"):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.Environment, module.load_environment = Environment, load_environment
        module.disable_progress_bars = lambda: None
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "mine_for_verifiers.py").write_text(PACKAGE)
    (tmp_path / "later_for_verifiers.py").write_text("def load_taskset(): ...")
    (tmp_path / "broken_for_verifiers.py").write_text("import nothing_of_this_name")
    before = [*sys.path]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    logger = logging.getLogger("verifiers")
    state = logger.level, logger.propagate, logger.handlers[:]
    yield tmp_path
    logger.level, logger.propagate, logger.handlers = state
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.path[:] = before
    for name in [name for name in sys.modules if name.endswith("_for_verifiers")]:
        del sys.modules[name]


def load(base_dir: Path, package: str = "owner/mine-for-verifiers", **arguments: Any) -> Any:
    return load_package("environment.mine", package, arguments, base_dir)


def test_a_package_is_found_by_its_name_on_the_hub(theirs: Path) -> None:
    assert isinstance(load(theirs, rows=2), Environment)


def test_the_process_keeps_its_signals_and_its_log(theirs: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    logger = logging.getLogger("verifiers")
    logger.propagate = False
    load(theirs, key="k")
    assert {number: signal.getsignal(number) for number in before} == before
    assert [record.getMessage() for record in caplog.records] == [
        "made with k"
    ]  # by the handlers of this process
    assert logger.propagate
    assert not logger.handlers
    assert not logger.isEnabledFor(logging.ERROR)  # of failed rollouts the worker tells


def test_a_package_draws_the_same_rows_each_time_and_the_process_goes_on_as_before(theirs: Path) -> None:
    random.seed(7)
    expected = random.random(), random.random()
    random.seed(7)
    first = random.random()
    load(theirs)
    load(theirs)
    assert (first, random.random()) == expected
    one, other = sys.modules["mine_for_verifiers"].drawn
    assert one == other


def test_a_failing_package_gives_the_signals_back(theirs: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError):
        load(theirs, fail="luck")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("version", ["0.1.13", "0.5.0", "0.5.0rc1", "1.0"])
def test_another_version_is_refused(theirs: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(package_module, "version", lambda _: version)
    with pytest.raises(
        ConfigError, match=rf"environment.mine.verifiers: .*0.1.14 and below 0.5 \(got {version}\)"
    ):
        load(theirs)


@pytest.mark.parametrize("version", ["0.1.14", "0.2.0", "0.3.1", "0.3.1.post2"])
def test_known_versions_are_taken(theirs: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(package_module, "version", lambda _: version)
    assert load(theirs)


@pytest.mark.parametrize(
    ("version", "tasksets"), [("0.1.14", False), ("0.3.1", False), ("0.4.0rc1", True), ("0.4.2", True)]
)
def test_the_version_chooses_the_interface(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, version: str, tasksets: bool
) -> None:
    monkeypatch.setattr(package_module, "version", lambda _: version)
    check_entry("mine", EnvironmentConfig(verifiers="mine-for-verifiers"), theirs)
    assert has_tasksets() is tasksets


def test_a_taskset_of_verifiers_itself_is_found(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs / "verifiers" / "v1" / "tasksets" / "textarena").mkdir(parents=True)
    spec = ModuleSpec("verifiers", None, is_package=True)
    spec.submodule_search_locations = [str(theirs / "verifiers")]
    monkeypatch.setattr(sys.modules["verifiers"], "__spec__", spec)
    monkeypatch.setattr(package_module, "version", lambda _: "0.4.0")
    check_entry("mine", EnvironmentConfig(verifiers="textarena"), theirs)
    monkeypatch.setattr(package_module, "version", lambda _: "0.3.1")
    with pytest.raises(ConfigError, match="there is no module textarena"):
        check_entry("mine", EnvironmentConfig(verifiers="textarena"), theirs)


def test_without_verifiers_the_error_says_how_to_install_it(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package_module, "version", absent)
    config = EnvironmentConfig(verifiers="mine-for-verifiers")
    with pytest.raises(
        ConfigError, match=r"environment.mine.verifiers: .*pip install 'rolloutmq\[verifiers\]'"
    ):
        check_entry("mine", config, theirs)


def test_an_absent_package_is_told_without_running_anything(theirs: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment.mine.verifiers: there is no module wordl"):
        check_entry("mine", EnvironmentConfig(verifiers="owner/wordl"), theirs)
    check_entry("mine", EnvironmentConfig(verifiers="broken-for-verifiers"), theirs)


@pytest.mark.parametrize(
    ("package", "arguments", "key", "problem"),
    [
        ("later-for-verifiers", {}, "verifiers", "later_for_verifiers has no function `load_environment`"),
        (
            "broken-for-verifiers",
            {},
            "verifiers",
            "importing broken_for_verifiers raised ModuleNotFoundError: No",
        ),
        (
            "mine-for-verifiers",
            {"row": 1},
            "options",
            r"unexpected keyword argument 'row'; .*load_environment\(rows=1",
        ),
        ("mine-for-verifiers", {"fail": "luck"}, "verifiers", "raised ValueError: no luck for"),
        ("mine-for-verifiers", {"fail": "exit"}, "verifiers", "raised SystemExit: 1"),
        (
            "mine-for-verifiers",
            {"rows": 0},
            "verifiers",
            r"returned no environment of verifiers \(got object\)",
        ),
    ],
)
def test_every_mistake_names_its_key(
    theirs: Path, package: str, arguments: dict[str, Any], key: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load(theirs, package, **arguments)
    assert caught.value.path == f"environment.mine.{key}"
