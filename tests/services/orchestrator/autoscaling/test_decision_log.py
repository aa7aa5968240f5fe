import json
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.autoscaling import decision_log
from rolloutmq.services.orchestrator.autoscaling.control_law import ControllerState, PressureController
from rolloutmq.services.orchestrator.autoscaling.decision_log import (
    HEADERS_EVERY,
    DecisionLog,
    DecisionLogHeader,
    LoggedDecision,
    previous_file,
    read,
    replay,
    resume,
)
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample, WorkerCounts, WorkerRoom

BOOTED = 1_700_000_000.0
"""Wall-clock time at which the monotonic clock was 0."""


class Life:
    """A law that decides and writes down what it does."""

    def __init__(self, path: Path, limit_bytes: int = 1 << 20) -> None:
        self.law = PressureController(1, 40, ScalingConfig())
        self.state = self.law.initial(4)
        self.log = DecisionLog(path, limit_bytes)
        self.now = 100.0
        self.sample = PressureSample(crew=WorkerCounts(ready=4), slots=2, room=WorkerRoom(30, "budget"))

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            if self.log.begins:
                scaling = self.law.scaling.model_dump()
                self.log.begin([DecisionLogHeader("e", 1, 40, scaling, self.state)])
            self.now += 1.0
            number = self.sample.number + 1
            crew = WorkerCounts(ready=self.state.target)
            self.sample = PressureSample(
                crew=crew,
                heard_at=self.now,
                number=number,
                pressure=0.1 * (number % 20),
                batch_sequences=60.0,
                eaten=50 * number,
                made=3 * number * crew.ready,
                starved_s=0.25 * number,
                slots=2,
                room=WorkerRoom(30, "budget"),
                rollout_s=7.25,
            )
            self.state, decision = self.law.decide(self.state, self.sample, self.now)
            self.log.add(LoggedDecision("e", BOOTED + self.now, self.now, self.sample, decision))


def test_the_law_gives_the_same_decisions_again_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    life = Life(path)
    life.live(200)
    again = replay(read(path))
    assert (again.decisions, again.differences, again.orphans) == (200, 0, 0)
    assert len({one.decision.target for one in read(path) if isinstance(one, LoggedDecision)}) > 2


def test_a_full_file_makes_room_and_each_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    life = Life(path, limit_bytes=60_000)
    life.live(400)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["decisions.1.jsonl", "decisions.jsonl"]
    for one in (path, previous_file(path)):
        again = replay(read(one))
        assert again.decisions > 0
        assert (again.differences, again.orphans) == (0, 0)
        assert one.stat().st_size < 70_000


def test_another_life_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    Life(path).live(30)
    Life(path).live(30)
    again = replay(read(path))
    assert (again.decisions, again.differences) == (60, 0)


def test_another_wording_of_a_reason_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    Life(path).live(30)
    first, *lines = map(json.loads, path.read_text().splitlines())
    for line in lines:
        line["made"]["decision"]["reason"] = "as an older version said it"
    path.write_text("".join(json.dumps(line) + "\n" for line in [first, *lines]))
    again = replay(read(path))
    assert (again.decisions, again.differences) == (30, 0)


def test_a_law_that_is_another_shows(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    Life(path).live(200)
    lines = path.read_text().splitlines()
    begin = json.loads(lines[0])
    begin["begin"]["scaling"]["setpoint_batches"] = 9.0
    path.write_text("\n".join([json.dumps(begin), *lines[1:], ""]))
    again = replay(read(path))
    assert again.differences > 0
    assert again.first is not None
    assert again.first.now != again.first.recorded.decision


def test_a_line_that_was_torn_by_a_kill_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    Life(path).live(30)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 40)
    Life(path).live(30)
    again = replay(read(path))
    assert (again.decisions, again.differences) == (59, 0)


def test_after_a_write_that_failed_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log" / "decisions.jsonl"
    path.parent.mkdir()
    life = Life(path)
    life.live(20)
    path.parent.rename(tmp_path / "away")
    life.live(20)
    (tmp_path / "away").rename(path.parent)
    life.live(20)
    again = replay(read(path))
    assert (again.decisions, again.differences, again.orphans) == (40, 0, 0)


def test_a_torn_last_line_is_left_out_and_what_has_no_beginning_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    Life(path).live(20)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]) + lines[0][:40])
    again = replay(read(path))
    assert (again.decisions, again.orphans) == (0, 20)


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"made": {"env": 3}}', '{"begin": null}'])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"decisions\.jsonl:1: "):
        list(read(path))


def test_a_disk_that_takes_nothing_costs_lines_and_no_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        Life(tmp_path / "gone" / "decisions.jsonl").live(3)
    assert "decisions not logged" in caplog.text
    assert len(caplog.records) == 1, "told at intervals, although a decision follows every second"


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[" * 5000])
def test_a_line_of_other_bytes_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "decisions.jsonl"
    Life(path).live(3)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=r"decisions\.jsonl:5: "):
        list(read(path))


def resumed(path: Path, now: float, booted: float = BOOTED) -> ControllerState | None:
    found = resume(path, 1, now, booted + now).get("e")
    return None if found is None else found.state


@pytest.mark.parametrize("seconds", [1, 30, 100, 101, 250, 990])
def test_a_restarted_orchestrator_continues_where_the_last_one_was_killed(
    tmp_path: Path, seconds: int
) -> None:
    path = tmp_path / "decisions.jsonl"
    life = Life(path, limit_bytes=300_000)
    life.live(seconds)
    assert resumed(path, life.now + 30.0) == life.state


def test_it_continues_after_lines_that_kills_tore(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    Life(path).live(30)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 40)
    life = Life(path)
    life.live(30)
    with path.open("ab") as file:
        file.write(b'{"made": {"env": ')
    assert resumed(path, life.now) == life.state


def test_it_measures_anew_after_a_long_absence_or_a_reboot(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    life = Life(path)
    life.live(30)
    assert resumed(path, life.now + 119.0) == life.state
    assert resumed(path, life.now + 121.0) is None
    assert resumed(path, life.now - 10.0) is None
    assert resumed(path, life.now + 10.0, BOOTED + 3600.0) is None, "the same uptime after a reboot"


@pytest.mark.parametrize(
    "data", [b"", b"nonsense\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"made": {"env": 3}}\n']
)
def test_it_measures_anew_without_a_record(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "decisions.jsonl"
    assert resume(path, 1, 0.0, 0.0) == {}
    path.write_bytes(data)
    assert resume(path, 1, 0.0, 0.0) == {}


def test_only_the_end_of_a_long_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decisions.jsonl"
    life = Life(path)
    life.live(990)
    monkeypatch.setattr(decision_log, "TAIL_BYTES", path.stat().st_size // 4)
    assert resumed(path, life.now) == life.state
    monkeypatch.setattr(decision_log, "TAIL_BYTES", 100)
    assert resumed(path, life.now) is None


def test_forty_environments_continue_from_a_kill_before_the_next_headers(tmp_path: Path) -> None:
    path, environments = tmp_path / "decisions.jsonl", [f"environment-{number}" for number in range(40)]
    life = Life(tmp_path / "life.jsonl")
    life.live(60)
    log = DecisionLog(path)
    log.begin(
        [DecisionLogHeader(env, 1, 40, life.law.scaling.model_dump(), life.state) for env in environments]
    )
    made = [one for one in read(tmp_path / "life.jsonl") if isinstance(one, LoggedDecision)][-1]
    for second in range(1, HEADERS_EVERY):
        sample = replace(made.sample, number=made.sample.number + second, heard_at=life.now + second)
        now_made = replace(made, at=made.at + second, now=life.now + second, sample=sample)
        for env in environments:
            log.add(replace(now_made, env=env))
    now = life.now + HEADERS_EVERY
    assert list(resume(path, len(environments), now, BOOTED + now)) == environments


def test_a_record_that_is_no_file_costs_the_measurements_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "decisions.jsonl").mkdir()
    assert resume(tmp_path / "decisions.jsonl", 1, 0.0, 0.0) == {}
    assert "measures anew" in caplog.text
