"""Events as JSON lines."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.control import Drain, StepDone
from rolloutmq.schemas.wire.replies import Ack
from rolloutmq.services.monitor.text import tail as command
from rolloutmq.services.monitor.text.tail import line_of, tail, wanted


@pytest.mark.parametrize(
    ("asked", "topics"),
    [
        ("", (b"",)),
        ("*", (b"",)),
        ("step", (b"step", b"step.", b"step/")),
        ("telemetry.*", (b"telemetry", b"telemetry.", b"telemetry/")),
        ("ack.w-1/", (b"ack.w-1", b"ack.w-1.", b"ack.w-1/")),
    ],
)
def test_topic_stands_for_itself_and_all_below(asked: str, topics: tuple[bytes, ...]) -> None:
    assert wanted(asked) == topics


def test_each_kind_of_event_is_decoded(make_step: Callable[..., StepDone]) -> None:
    ack = Ack(epoch=1, session=2, cumulative=3, byte_limit=4, start_limit=5)
    lines = [
        json.loads(line_of(b"step", codec.encode(make_step(4)), 1.0)),
        json.loads(line_of(b"ack.w/", codec.encode(ack), 1.0)),
        json.loads(line_of(b"control.w/", codec.encode(Drain(worker="w")), 1.0)),
        json.loads(line_of(b"step", b"\xc1", 1.0)),
    ]

    assert [line.get("kind") for line in lines] == ["step_done", "ack", "drain", None]
    assert lines[1]["cumulative"] == 3
    assert lines[3]["error"]
    assert lines[0]["topic"] == "step"


async def test_events_are_printed_as_they_come(run_dir: Path, make_step: Callable[..., StepDone]) -> None:
    layout = RunLayout(run_dir)
    address = f"ipc://{run_dir}/events"
    endpoints = Endpoints(ingest="", serve="", events=address, publish="", pid=1, epoch=1)
    write_json(layout.endpoints, endpoints)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind(address)
    lines: list[str] = []
    task = asyncio.create_task(command.print_events(layout, wanted("step"), 2, lines.append))
    async with asyncio.timeout(30):
        while not task.done():
            socket.send_multipart([b"stepless", b"?"])
            socket.send_multipart([b"step", codec.encode(make_step(8))])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), 0.02)
    socket.close(linger=0)
    context.term()

    assert [json.loads(line)["step"] for line in lines] == [8, 8]


def test_unknown_topic_lists_those_there_are(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tail(run_dir, "nonsense") == 2
    assert "unknown topic (got 'nonsense'); topics start with: ack, control" in capsys.readouterr().err


def test_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    assert tail(tmp_path / "none", "step") == 2


def ended(layout: RunLayout, *events: tuple[str, int]) -> None:
    """Leave what a run in order leaves: its summary and its events."""
    write_json(layout.summary, {"ended": "the trainer is done"})
    lines = [json.dumps({"t": 1.0, "topic": topic, "number": number}) for topic, number in events]
    layout.metrics.write_text("".join(f"{line}\n" for line in lines) + '{"t": 2.0, "topic": "st')


def test_of_an_ended_run_the_recorded_events_are_printed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(RunLayout(run_dir), ("step", 1), ("telemetry.health.add", 2), ("telemetry.health.add", 3))
    assert tail(run_dir, "telemetry.health.") == 0
    told = capsys.readouterr()
    assert [json.loads(line)["number"] for line in told.out.splitlines()] == [2, 3]
    assert f"the run in {run_dir} has ended: the trainer is done" in told.err
    assert tail(run_dir, "", count=2) == 0
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_a_line_nested_too_deep_is_left_out(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = RunLayout(run_dir)
    ended(layout, ("step", 1))
    whole = layout.metrics.read_text()
    layout.metrics.write_text("[" * 100_000 + "\n" + '{"a":' * 100_000 + "\n" + whole)
    assert tail(run_dir, "") == 0
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [1]


def test_a_reader_that_leaves_ends_the_command_quietly(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(RunLayout(run_dir), *(("step", number) for number in range(5000)))  # more than a buffer
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert tail(run_dir, "step") == 0
    assert capsys.readouterr().err == ""


def test_an_ended_run_without_such_an_event_is_an_error(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = RunLayout(run_dir)
    ended(layout, ("step", 1))
    assert tail(run_dir, "ack.w") == 1
    problem = (
        f"error: the run in {run_dir} has ended: the trainer is done; {layout.metrics} has no event of ack.w"
    )
    assert capsys.readouterr().err == f"{problem}\n"
    layout.metrics.unlink()
    assert tail(run_dir, "step") == 1


async def until_said(capsys: pytest.CaptureFixture[str], text: str, task: "asyncio.Task[Any]") -> None:
    said = ""
    async with asyncio.timeout(30):
        while text not in said:
            assert not task.done()
            await asyncio.sleep(0.02)
            said += capsys.readouterr().err


async def test_a_run_without_a_broker_is_named_and_its_end_ends_the_command(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(run_dir)
    monkeypatch.setattr(command, "PATIENCE_S", 0.05)
    monkeypatch.setattr(command, "GONE_S", 3600.0)
    task = asyncio.create_task(command.print_events(layout, wanted("step"), None, lambda _: None))
    await until_said(capsys, f"no broker serves {run_dir} ({layout.endpoints} does not exist); start", task)
    gone = Endpoints(ingest="", serve="", events=f"ipc://{run_dir}/e", publish="", pid=1 << 30, epoch=1)
    write_json(layout.endpoints, gone)
    await until_said(capsys, f"the broker of {layout.endpoints} does not run on this machine", task)
    layout.endpoints.unlink()
    ended(layout)
    fate = await asyncio.wait_for(task, 30)
    assert fate is not None
    assert fate.say(layout) == f"the run in {run_dir} has ended: the trainer is done"


async def test_a_broker_started_by_hand_may_come_back_for_a_while(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who follows it through a restart is not sent away; once it stays away, the run has ended."""
    layout = RunLayout(run_dir)
    layout.journal.mkdir()
    monkeypatch.setattr(command, "PATIENCE_S", 0.01)
    monkeypatch.setattr(command, "GONE_S", 3600.0)
    follow = command.print_events(layout, wanted("step"), None, lambda _: None)
    task = asyncio.create_task(follow)
    looked = asyncio.Event()
    given_up = command._given_up

    def look(where: RunLayout, quiet_s: float) -> Any:
        looked.set()
        return given_up(where, quiet_s)

    monkeypatch.setattr(command, "_given_up", look)
    await asyncio.wait_for(looked.wait(), 30)
    assert not task.done()
    monkeypatch.setattr(command, "GONE_S", 0.0)
    fate = await asyncio.wait_for(task, 30)
    assert fate is not None
    assert fate.by_hand


def test_of_a_run_by_hand_that_has_ended_the_record_is_printed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = RunLayout(run_dir)
    ended(layout, ("step", 1))
    layout.summary.unlink()
    layout.journal.mkdir()
    assert tail(run_dir, "step") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["number"] == 1
    assert "its broker, which was started by hand, has ended" in told.err


def test_a_run_of_which_nothing_comes_is_given_up(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose broker was killed: its address stays, and nobody answers there."""
    layout = RunLayout(run_dir)
    gone = Endpoints(ingest="", serve="", events=f"ipc://{run_dir}/e", publish="", pid=1 << 30, epoch=1)
    write_json(layout.endpoints, gone)
    monkeypatch.setattr(command, "PATIENCE_S", 0.01)
    monkeypatch.setattr(command, "GONE_S", 0.0)
    assert tail(run_dir, "step") == 1
    assert f"no broker runs in {run_dir}" in capsys.readouterr().err
