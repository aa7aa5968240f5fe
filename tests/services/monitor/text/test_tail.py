"""Events as JSON lines."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

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
    async with asyncio.timeout(10):
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
