"""Signs of life: who is at work, and who has been silent for how long."""

from pathlib import Path

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import InferenceAddress, Sign
from rolloutmq.services.monitor.probes.signs import FRESH_S, Signs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own-far.0.json"


def test_a_ready_program_is_at_work_until_it_is_silent(path: Path) -> None:
    signs = Signs({"a": path})
    signs.look({"a": 7}, 0.0)
    assert not signs.are_at_work()
    write_json(path, Sign(pid=7))
    signs.look({"a": 7}, 1.0)
    assert signs.are_at_work()
    for second in range(2, 12):
        signs.look({"a": 7}, float(second))
        assert signs.are_at_work() == (second - 1 <= FRESH_S)
    assert signs.silent_s("a") == 10.0
    write_json(path, Sign(pid=7))
    signs.look({"a": 7}, 12.0)
    assert signs.are_at_work()
    assert not signs.silent_s("a")


@pytest.mark.parametrize(
    "sign", [Sign(pid=7, state="starting"), Sign(pid=7, answered=False), Sign(pid=7, draining=True)]
)
def test_who_starts_is_unheard_or_drains_is_not_at_work(path: Path, sign: Sign) -> None:
    write_json(path, sign)
    signs = Signs({"a": path})
    signs.look({"a": 7}, 0.0)
    assert not signs.are_at_work()


@pytest.mark.parametrize("pids", [{"a": 8}, {}])
def test_what_an_earlier_process_left_says_nothing(path: Path, pids: dict[str, int]) -> None:
    write_json(path, Sign(pid=7))
    signs = Signs({"a": path})
    for second in range(10):
        signs.look(pids, float(second))
    assert not signs.are_at_work()
    assert not signs.silent_s("a")


def test_a_pause_of_the_reader_is_no_silence(path: Path) -> None:
    write_json(path, Sign(pid=7))
    signs = Signs({"a": path})
    signs.look({"a": 7}, 0.0)
    signs.look({"a": 7}, 1000.0)
    assert signs.silent_s("a") == 2.0


def test_the_address_of_an_engine_is_a_sign(path: Path) -> None:
    write_json(path, InferenceAddress(url="http://127.0.0.1:1", pid=7, name="inference"))
    signs = Signs({"a": path})
    signs.look({"a": 7}, 0.0)
    assert signs.are_at_work()


def test_a_damaged_file_is_none(path: Path) -> None:
    path.write_text("{")
    signs = Signs({"a": path})
    signs.look({"a": 7}, 0.0)
    assert not signs.are_at_work()


def test_who_has_no_programs_with_signs_is_at_work() -> None:
    assert Signs({}).are_at_work()
