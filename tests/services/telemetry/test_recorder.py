"""The record holds what was published, in whole lines of bounded length."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.encoding import codec
from rolloutmq.schemas.wire.control import LedgerCounts, Pressure, StepDone, WorkerState, WorkerStatus
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.services.telemetry.recorder import (
    DENSE_S,
    LINE_LIMIT_BYTES,
    RECORDED,
    Recorder,
    line_of,
)


def worker(name: str, state: WorkerState, silent_s: float = 0.0) -> WorkerStatus:
    return WorkerStatus(
        worker=name,
        env="e",
        state=state,
        pid=1,
        host="h",
        in_hand=0,
        produced=0,
        abandoned=0,
        blocked_s=0.0,
        silent_s=silent_s,
        draining=False,
        error="",
    )


def pressure(*workers: WorkerStatus, number: int = 1) -> Pressure:
    return Pressure(
        epoch=1,
        number=number,
        at=0.0,
        rollout_pressure=1.5,
        queued_sequences=1,
        batch_sequences=1,
        queued_groups=1,
        queued_bytes=1,
        leased_bytes=1,
        high_bytes=1,
        step=1,
        consumed_per_s=0.0,
        produced_per_s=0.0,
        staleness_max=0,
        trainer_wait="",
        ledger=LedgerCounts(accepted=3, queued=3),
        lanes=(),
        workers=workers,
    )


STEP = StepDone(
    run="r",
    incarnation=0,
    step=3,
    at=9.0,
    reward=0.5,
    loss=0.1,
    tokens=7,
    groups=2,
    filtered=0,
    staleness_max=1,
    staleness_mean=0.5,
    pull_s=0.1,
    step_s=0.2,
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_event_is_one_line_with_its_fields(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "metrics.jsonl")
    recorder.record(b"step", codec.encode(STEP), 100.25)
    recorder.flush()

    (line,) = lines(tmp_path / "metrics.jsonl")

    assert line["t"] == 100.25
    assert line["topic"] == "step"
    assert (line["kind"], line["step"], line["reward"], line["tokens"]) == ("step_done", 3, 0.5, 7)


def test_the_state_of_other_hosts_is_passed_on_and_not_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "metrics.jsonl")
    status = NetworkStatus(listen="tcp://h:1")
    assert recorder.record(b"telemetry.network.run", codec.encode(status), 1.0) == status
    recorder.record(b"step", codec.encode(STEP), 2.0)
    recorder.flush()
    assert [line["kind"] for line in lines(tmp_path / "metrics.jsonl")] == ["step_done"]


def test_nothing_is_written_before_a_flush_and_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    recorder.record(b"step", codec.encode(STEP), 1.0)
    assert not path.exists()

    recorder.flush()
    recorder.flush()

    assert len(lines(path)) == 1


def test_pressure_carries_workers_by_state() -> None:
    line = line_of(
        b"pressure",
        pressure(
            worker("a", WorkerState.READY),
            worker("b", WorkerState.READY),
            worker("c", WorkerState.DRAINING),
        ),
        1.0,
    )

    assert json.loads(line)["worker_states"] == {"ready": 2, "draining": 1}


def test_line_stays_below_its_limit_and_says_what_it_lost() -> None:
    many = [worker(f"w-{index}", WorkerState.READY) for index in range(5000)]

    line = line_of(b"pressure", pressure(*many), 1.0)

    fields = json.loads(line)
    assert len(line) <= LINE_LIMIT_BYTES
    assert fields["trimmed"] == ["workers"]
    assert fields["worker_states"] == {"ready": 5000}
    assert fields["rollout_pressure"] == 1.5


def test_pressure_is_thinned_and_steps_are_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    for index in range(100):
        now = 1000.0 + index * 0.05
        recorder.record(b"pressure", codec.encode(pressure(number=index)), now)
        recorder.record(b"step", codec.encode(STEP), now)
    recorder.flush()
    early = [line["topic"] for line in lines(path)]
    path.unlink()

    for index in range(100):
        now = 1000.0 + DENSE_S + index * 0.05
        recorder.record(b"pressure", codec.encode(pressure(number=index)), now)
    recorder.flush()

    assert early.count("step") == 100
    assert 20 <= early.count("pressure") <= 26
    assert len(lines(path)) == 5


def test_clock_that_is_set_back_does_not_silence_the_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    for now in (1000.0, 500.0):
        recorder.record(b"pressure", codec.encode(pressure()), now)
    recorder.flush()

    assert [line["t"] for line in lines(path)] == [1000.0, 500.0]


def test_what_does_not_decode_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    recorder.record(b"step", b"\xc1", 1.0)
    recorder.record(b"step", codec.encode(STEP), 1.0)
    recorder.flush()

    assert recorder.malformed == 1
    assert len(lines(path)) == 1


def test_torn_last_line_of_a_killed_recorder_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for torn in (b'{"a":1}\n{"b":', b'{"a":1}\n' + b"x" * (3 * LINE_LIMIT_BYTES), b'{"a":1}\n'):
        path.write_bytes(torn)
        recorder = Recorder(path)
        recorder.record(b"step", codec.encode(STEP), 1.0)
        recorder.flush()
        assert [line.get("a", line.get("kind")) for line in lines(path)] == [1, "step_done"]


def test_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"half')

    Recorder(path)

    assert path.read_bytes() == b""


def test_acks_and_drains_are_not_asked_for() -> None:
    assert not any(b"ack.w/".startswith(topic) or b"control.w/".startswith(topic) for topic in RECORDED)


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Let files of this process grow to a size, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("left", [0, 1, 100], ids=["none", "a byte", "a part of a line"])
def test_a_full_disk_costs_events_and_leaves_no_torn_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    recorder.record(b"step", codec.encode(STEP), 1.0)
    recorder.flush()
    for now in (2.0, 3.0):
        recorder.record(b"step", codec.encode(STEP), now)
        with room(path.stat().st_size + left):
            recorder.flush()
        assert path.read_bytes().endswith(b"\n")
    assert (recorder.lost, [line["t"] for line in lines(path)]) == (2, [1.0])
    recorder.record(b"step", codec.encode(STEP), 4.0)
    recorder.flush()
    assert [line["t"] for line in lines(path)] == [1.0, 4.0]
    told, again = caplog.messages
    assert told.startswith(f"events not recorded, they are dropped path={path} error=")
    assert again == f"events recorded again path={path} lost=2"


def test_a_file_that_cannot_be_opened_costs_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    recorder = Recorder(path)
    recorder.record(b"step", codec.encode(STEP), 1.0)
    recorder.flush()
    assert recorder.lost == 1
    assert caplog.text.count("events not recorded") == 1
    path.rmdir()
    recorder.record(b"step", codec.encode(STEP), 2.0)
    recorder.flush()
    assert [line["t"] for line in lines(path)] == [2.0]


def test_silent_workers_are_counted_apart() -> None:
    workers = (worker("a", WorkerState.READY), worker("b", WorkerState.READY, 14.0))
    fields = json.loads(line_of(b"pressure", pressure(*workers), 0.0))
    assert fields["worker_states"] == {"ready": 1, "silent": 1}
