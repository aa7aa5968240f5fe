"""Engines are found by their address files, and alive while these change."""

import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.bus.engine_registry import (
    SILENT_S,
    EngineSighting,
    EngineWatch,
    engine_name,
    engine_number,
    engines_of,
    is_reachable,
    own_network,
)
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import InferenceAddress, RunLayout


@pytest.mark.parametrize(("number", "name"), [(0, "inference"), (1, "inference-1"), (12, "inference-12")])
def test_names_and_numbers(number: int, name: str) -> None:
    assert engine_name(number) == name
    assert engine_number(name) == number


@pytest.mark.parametrize("name", ["", "inference-", "inference-0", "inference-01", "inference-x", "math-1"])
def test_what_is_no_engine_has_no_number(name: str) -> None:
    assert engine_number(name) == -1


def test_addresses_are_read_by_number_and_other_files_left_alone(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    assert engines_of(layout) == []
    for name in ("inference-10", "inference-2", "inference"):
        write_json(layout.engine(name), InferenceAddress(url=f"http://{name}", pid=1, name=name))
    (run_dir / "inference-notes.json").write_text("mine")
    (run_dir / "inference-3.json.17.tmp").write_text("half")
    assert [address.name for address in engines_of(layout)] == ["inference", "inference-2", "inference-10"]
    layout.engine("inference-2").unlink()
    assert [address.name for address in engines_of(layout)] == ["inference", "inference-10"]


def test_a_file_that_cannot_be_read_hides_no_other(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = RunLayout(run_dir)
    write_json(layout.inference, InferenceAddress(url="http://x", pid=1))
    layout.engine("inference-1").write_text('{"url": 7}')
    assert [address.name for address in engines_of(layout)] == ["inference"]
    assert "engine address unreadable" in caplog.text


def test_an_address_of_an_earlier_version_is_understood(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    layout.inference.write_text('{"url": "http://x", "pid": 3}')
    assert engines_of(layout) == [InferenceAddress(url="http://x", pid=3)]


@pytest.mark.parametrize(
    ("url", "network", "reachable"),
    [
        ("http://127.0.0.1:1", own_network(), True),
        ("http://127.0.0.1:1", "another host", False),
        ("http://[::1]:1", "another host", False),
        ("http://127.0.0.1:1", "", True),  # of an earlier version
        ("http://gpu7:1", "another host", True),
    ],
)
def test_loopback_reaches_engines_of_the_same_network_alone(url: str, network: str, reachable: bool) -> None:
    assert is_reachable(InferenceAddress(url=url, pid=1, network=network)) == reachable


def test_another_network_namespace_has_another_name() -> None:
    told = "from rolloutmq.bus.engine_registry import own_network as n; print(n())"
    command = ["unshare", "-Urn", sys.executable, "-c", told]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is missing")
    if found.returncode:
        pytest.skip(f"no network namespace for this user: {found.stderr}")
    assert found.stdout.strip() not in {"", own_network()}


def test_an_address_that_stands_still_is_silent_until_it_moves() -> None:
    watch = EngineWatch()

    def seen(number: int, now: float, pid: int = 7) -> EngineSighting:
        (one,) = watch.look([InferenceAddress(url="http://x", pid=pid, number=number)], now)
        return one

    assert seen(1, 10.0).silent_s == 0.0  # whether it moves is not known yet
    assert seen(2, 11.0).silent_s == 0.0
    assert not seen(2, 11.0 + SILENT_S).is_silent
    assert seen(2, 11.1 + SILENT_S).is_silent
    assert not seen(2, 30.0, pid=8).is_silent  # another life counts from the beginning
    assert seen(2, 60.0, pid=8).is_silent
    assert not seen(3, 61.0, pid=8).is_silent
    assert watch.look([], 62.0) == []


def test_an_address_that_counts_no_beats_is_never_silent() -> None:
    watch = EngineWatch()
    for now in (0.0, 1000.0):
        (one,) = watch.look([InferenceAddress(url="http://x", pid=0)], now)
        assert not one.is_silent
