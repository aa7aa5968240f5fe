"""What a page sees of a run: living, ended, damaged, begun again, or gone."""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.dashboard.browser import Browser, Stream
from tests.services.dashboard.record import lines
from tests.services.dashboard.serving import opened, serving

from rolloutmq.bus.rundir import read_run, write_json
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerState
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.dashboard import app, watch
from rolloutmq.services.dashboard.entry.sessions import Sessions
from rolloutmq.services.dashboard.record import record_file
from rolloutmq.services.dashboard.watch import STREAMS_LIMIT

WAIT_S = 60.0


class Page:
    """The page's view: sections and series, put together from a stream as the page does."""

    def __init__(self, stream: Stream) -> None:
        self._events = stream.events()
        self.sections: dict[str, Any] = {}
        self.series: dict[tuple[str, str], dict[str, list[Any]]] = {}
        self.ended = ""
        self.taken = 0

    def until(self, holds: Callable[["Page"], Any]) -> "Page":
        """Apply events until a condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not (self.sections and holds(self)):
            assert time.monotonic() < deadline, self.sections
            self._apply(*next(self._events))
        return self

    def _apply(self, name: str, data: Any) -> None:
        self.taken += 1
        if name == "state":
            self.sections = data["sections"] if data["full"] else self.sections | data["sections"]
        elif name == "history":
            self.series = {} if data["reset"] else self.series
            for one in data["series"]:
                known = self.series.setdefault((one["name"], one["key"]), {})
                for column, values in one["columns"].items():
                    known[column] = known.get(column, [])[: one["from"]] + values
        elif name == "end":
            self.ended = data["text"]


def beat(broker: Broker, *names: str, produced: int = 0, state: WorkerState = WorkerState.READY) -> None:
    """Report workers to a broker."""
    with BlockingClient(broker.endpoints.serve) as client:
        for name in names:
            told = WorkerBeat(worker=name, env="sort3", state=state, pid=os.getpid(), produced=produced)
            client.request(msgspec.structs.replace(told, host=socket.gethostname()))


def test_an_ended_run_is_shown_from_its_record(at_ended: Browser) -> None:
    with at_ended.stream() as stream:
        page = Page(stream).until(lambda page: page.ended and page.series)
    told = page.sections
    assert told["run"]["life"] == "ended"
    assert told["run"]["read_only"]
    assert "the trainer is done" in page.ended
    assert told["run"]["step"] == 5
    assert told["run"]["reward"] == pytest.approx(0.3)
    assert told["summary"]["wall_s"] == 2.5
    assert told["queue"]["queued_sequences"] == 32
    assert told["ledger"]["accepted"] == 10
    assert [one["env"] for one in told["environments"]] == ["sort3"]
    assert told["run"]["lanes"] == 1
    assert [one["name"] for one in told["processes"]] == ["broker"]
    assert [one["hop"] for one in told["hops"]] == ["queue"]
    assert [one["text"] for one in told["decisions"]] == ["2 workers: want 1.9"]
    assert page.series["steps", ""]["reward"] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert at_ended.state() == told
    history = at_ended.get("/api/history").json
    assert {(one["name"], one["key"]) for one in history["series"]} == page.series.keys()
    again = at_ended.get(f"/api/history?since={history['cursor']}").json
    assert (again["reset"], again["series"]) == (False, [])


def test_a_living_run_comes_by_its_events(broker: Broker, at_living: Browser) -> None:
    beat(broker, "sort3-0", "sort3-1")
    with at_living.stream() as stream, Publisher(broker.endpoints.publish) as publisher:
        page = Page(stream).until(lambda page: page.sections["worker_counts"] == {"ready": 2})
        assert page.sections["run"]["life"] == "living"
        assert not page.sections["run"]["read_only"]
        assert page.sections["queue"]["batch_sequences"] > 0
        assert page.sections["waits"]["why"]
        before = page.sections["workers_version"]
        beat(broker, "sort3-1", produced=7)
        page.until(lambda page: page.sections["workers_version"] > before)
        publisher.publish(b"telemetry.host.here", lines.host())
        publisher.publish(b"telemetry.health.sort3", lines.finding("collapse"))
        publisher.publish(b"telemetry.gpu.GPU-1", lines.gpu())
        page.until(lambda page: page.sections["findings"] and page.sections["gpus"] and page.sections["host"])
        assert page.sections["findings"][0]["problem"] == "collapse was found"
        assert page.sections["gpus"][0]["uuid"] == "GPU-1"
        beat(broker, "sort3-1", state=WorkerState.GONE)
        page.until(lambda page: sum(page.sections["worker_counts"].values()) == 1)
    rows = at_living.get("/api/workers").json["rows"]
    assert [row["worker"] for row in rows] == ["sort3-0"]


def test_whoever_asks_once_gets_the_state_of_now(
    broker: Broker, at_living: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FIRST_S", WAIT_S)
    beat(broker, "sort3-0", "sort3-1")
    told = json.loads(at_living.get("/api/state").body)
    assert told["queue"] is not None
    assert told["worker_counts"] == {"ready": 2}


def test_the_record_grows_on_the_page(at_living: Browser, run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with at_living.stream() as stream:
        page = Page(stream).until(lambda page: page.sections["run"]["life"] == "living")
        for step in range(1, 4):
            with layout.metrics.open("ab") as record:
                record.write(lines.line(lines.settled(step), step, b"telemetry.settled.run") + b"\n")
            page.until(lambda page: len(page.series.get(("steps", ""), {}).get("step", [])) == step)  # noqa: B023
        layout.metrics.write_bytes(lines.line(lines.settled(9), 1.0) + b"\n")
        page.until(lambda page: page.series.get(("steps", ""), {}).get("step") == [9])


def test_the_end_of_the_broker_and_its_next_life(run_dir: Path) -> None:
    config = validate(
        {"trainer": {"enabled": False}, "broker": {"durability": "os", "segment_bytes": 1 << 24}}
    )
    layout = RunLayout(run_dir)
    write_json(layout.config, config)
    with opened(run_dir) as browser, browser.stream() as stream:
        page = Page(stream).until(lambda page: page.sections["run"]["life"] == "absent")
        for _ in range(2):
            with running_broker(config, layout):
                page.until(lambda page: page.sections["run"]["life"] == "living" and page.sections["queue"])
                page.ended = ""
            page.until(lambda page: page.sections["run"]["read_only"] and page.ended)
            assert "by hand" in page.ended
            assert browser.post("/api/actions/requeue", {"all": True}).code == "read_only"


def test_waits_count_every_life_of_the_broker(ended: RunLayout) -> None:
    lives = [
        lines.pressure(9, starved_s=100.0, trainer_waits_s={"no_batch": 100.0}),
        lines.pressure(9, epoch=2, starved_s=5.0, trainer_waits_s={"no_batch": 5.0}),
    ]
    record = b"".join(lines.line(one, after_s, b"pressure") + b"\n" for after_s, one in enumerate(lives, 10))
    with ended.metrics.open("ab") as file:
        file.write(record)
    with opened(ended.root) as browser:
        told = browser.state()
    assert told["queue"]["starved_s"] == 105.0
    assert told["waits"]["seconds"] == [{"who": "trainer", "reason": "no_batch", "seconds": 105.0}]


def test_a_run_that_begins_again_in_its_directory(ended: RunLayout) -> None:
    with opened(ended.root) as browser, browser.stream() as stream:
        page = Page(stream).until(lambda page: page.series)
        other = ended.root.with_name("moved")
        ended.root.rename(other)
        page.until(lambda page: page.sections["run"]["life"] == "removed")
        ended.root.mkdir(mode=0o700)
        write_json(
            ended.config,
            validate({"run": {"name": "second", "dir": str(ended.root)}, "trainer": {"steps": 7}}),
        )
        ended.metrics.write_bytes(lines.line(lines.settled(3), 1.0) + b"\n")
        page.until(lambda page: page.sections["run"]["name"] == "second")
        page.until(lambda page: page.series.get(("steps", ""), {}).get("step") == [3])
        assert page.sections["run"]["total_steps"] == 7
        assert page.sections["decisions"] == []


def test_a_removed_directory_is_said_and_the_server_goes_on(at_ended: Browser, ended: RunLayout) -> None:
    with at_ended.stream() as stream:
        page = Page(stream).until(lambda page: page.series)
        shutil.rmtree(ended.root)
        page.until(lambda page: page.sections["run"]["life"] == "removed")
        assert "is gone" in page.sections["run"]["text"]
    assert (at_ended.get("/api/dead").status, at_ended.get("/api/dead/g1").status) == (410, 410)
    assert at_ended.get("/api/workers").status == 200
    assert at_ended.post("/api/actions/drain", {"worker": "x"}).code == "read_only"


def pipe_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def file_instead(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("x")


DAMAGES: dict[str, Callable[[RunLayout], object]] = {
    "record": lambda run: run.metrics.write_bytes(b"\xff" * 100 + b"\n" + run.metrics.read_bytes() + b"{"),
    "record is a pipe": lambda run: pipe_instead(run.metrics),
    "record is a folder": lambda run: folder_instead(run.metrics),
    "configuration": lambda run: run.config.write_text('{"broker": 3}'),
    "configuration is a folder": lambda run: folder_instead(run.config),
    "summary": lambda run: run.summary.write_text('{"wall_s": [], "ended": 3}'),
    "summary is no text": lambda run: run.summary.write_bytes(b"\xff\xfe"),
    "summary is deep": lambda run: run.summary.write_text("[" * 100_000),
    "supervision": lambda run: run.supervision.write_text("[1, 2"),
    "supervision is a pipe": lambda run: pipe_instead(run.supervision),
    "endpoints": lambda run: run.endpoints.write_text('{"pid": 99999999999999999999}'),
    "gpus": lambda run: run.gpus.write_text('{"gpus": 7}'),
    "lives": lambda run: run.lives.write_text('[{"began": "x"}]'),
    "owner": lambda run: run.owner.write_text('{"pid": -1}'),
    "owner is a folder": lambda run: folder_instead(run.owner),
    "processes": lambda run: run.processes.write_text('{"a": [[[[[['),
    "evaluations": lambda run: run.evaluations.write_text('{"id": 3}\n{"x'),
    "dead letters are a file": lambda run: file_instead(run.dead),
    "engine": lambda run: run.engine("inference").write_text("{"),
    "logs are a file": lambda run: file_instead(run.logs),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_shown_as_far_as_it_goes(ended: RunLayout, damage: str) -> None:
    DAMAGES[damage](ended)
    with opened(ended.root) as browser:
        told = browser.state()
        assert told["run"]["life"] in {"ended", "absent", "dead", "living"}
        for path in ("/api/history", "/api/workers", "/api/dead"):
            assert browser.get(path).status == 200, path
        if not damage.startswith("record is"):
            assert told["run"]["step"] == 5
        if damage == "record":
            assert told["record"]["damaged_lines"] == 1
            assert any("damaged" in one["text"] for one in told["problems"])
        with browser.stream() as stream:
            assert stream.until("state")["full"]


def test_hostile_names_are_data(run_dir: Path) -> None:
    name = "\u202e</script>\x1b[31m" + "x" * 1500
    root = run_dir / "a\udcff<b>"
    root.mkdir()
    layout = RunLayout(root)
    write_json(layout.config, validate({}))
    record = [
        lines.line(
            lines.pressure(1, (lines.worker(0, error=name[:2000]),), trainer_wait=name), 0.0, b"pressure"
        ),
        lines.line(lines.decision(2, name), 0.0, b"telemetry.scale.x"),
        lines.line(lines.finding(name), 0.0, b"telemetry.health.x"),
    ]
    layout.metrics.write_bytes(b"\n".join(record) + b"\n")
    with opened(root) as browser:
        told = browser.get("/api/state")
        assert told.headers["Content-Type"].startswith("application/json")
        assert name in told.json["decisions"][0]["text"]
        with browser.stream() as stream:
            assert name in stream.until("state")["sections"]["findings"][0]["finding"]


def test_a_slow_reader_gets_the_newest_state(ended: RunLayout) -> None:
    """It takes nothing while another one sees four steps; then it meets the last of them, and not each of them."""
    write_much(ended)
    with opened(ended.root) as browser, browser.stream(buffer_bytes=4096) as slow, browser.stream() as fast:
        page = Page(fast).until(lambda page: page.series and page.sections["run"]["step"] == 5)
        for step in range(6, 10):
            with ended.metrics.open("ab") as record:
                record.write(lines.line(lines.settled(step), step, b"telemetry.settled.run") + b"\n")
            page.until(lambda page: page.series["steps", ""]["step"][-1] == step)  # noqa: B023
        tardy = Page(slow).until(lambda page: page.series.get(("steps", ""), {}).get("step", [0])[-1] == 9)
        assert tardy.taken < page.taken
        assert tardy.series == page.series


def test_a_reader_that_takes_nothing_loses_its_stream(
    ended: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place is free for another page; what the kernel holds for it ends with the connection."""
    monkeypatch.setattr(app, "SEND_S", 2.0)
    monkeypatch.setattr(app, "STREAMS_LIMIT", 1)
    write_much(ended)
    with opened(ended.root) as browser, browser.stream(buffer_bytes=4096):
        assert browser.ask("HEAD", "/api/events", Cookie=browser.cookie).status == 503
        await_place(browser)


def await_place(browser: Browser) -> None:
    """Wait until a further stream is allowed."""
    deadline = time.monotonic() + WAIT_S
    while browser.ask("HEAD", "/api/events", Cookie=browser.cookie).status == 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def write_much(layout: RunLayout) -> None:
    """Let the state be larger than the buffers of a connection."""
    with layout.metrics.open("ab") as record:
        for number in range(250):
            told = lines.decision(number, "x" * 20_000, f"env{number}")
            record.write(lines.line(told, 6.0, b"telemetry.scale.env%d" % number) + b"\n")


def test_so_many_pages_and_no_more(at_ended: Browser) -> None:
    streams = [at_ended.stream() for _ in range(STREAMS_LIMIT)]
    try:
        for stream in streams:
            stream.until("state")
        assert (at_ended.get("/api/events").status, at_ended.get("/api/events").code) == (503, "too_many")
        assert at_ended.get("/api/state").status == 200
    finally:
        for stream in streams:
            stream.__exit__()
    await_place(at_ended)


def test_a_quiet_stream_beats_and_says_when_the_server_ends(ended: RunLayout) -> None:
    with serving(ended.root) as browser:
        browser.enter()
        stream = browser.stream()
        events = stream.events()
        assert next(name for name, _ in events if name not in {"state", "history", "end"}) == "beat"
    assert [name for name, _ in events][-1] == "leave"
    stream.__exit__()


def test_the_page_outlives_its_server(ended: RunLayout) -> None:
    """With the key of before, the next server on the port takes the same cookie."""
    first = Sessions()
    with serving(ended.root, first) as browser:
        browser.enter()
        assert browser.state()
    with serving(ended.root, Sessions(key=first._key), browser.port):
        assert browser.state()
    with serving(ended.root, port=browser.port):
        assert browser.get("/api/state").code == "session"


def test_a_thousand_workers(broker: Broker, at_living: Browser, run_dir: Path) -> None:
    names = [f"sort3-{number}" for number in range(1000)]
    with at_living.stream() as stream:
        page = Page(stream)
        beat(broker, *names)
        page.until(lambda page: sum(page.sections["worker_counts"].values()) == 1000)
        assert "rows" not in json.dumps(page.sections)
        beat(broker, "sort3-500", produced=77)
        version = page.sections["workers_version"]
        page.until(lambda page: page.sections["workers_version"] > version)
    told = at_living.get("/api/workers?limit=3").json
    assert (told["total"], told["matching"]) == (1000, 1000)
    assert [row["worker"] for row in told["rows"]] == names[:3]
    told = at_living.get("/api/workers?sort=worker&order=desc&offset=998&limit=1000").json
    assert [row["worker"] for row in told["rows"]] == ["sort3-1", "sort3-0"]
    assert (
        at_living.get("/api/workers?sort=produced&order=desc&limit=1").json["rows"][0]["worker"]
        == "sort3-500"
    )
    told = at_living.get("/api/workers?filter=SORT3-99").json
    assert told["matching"] == 11
    assert len(at_living.get("/api/workers?limit=100000").json["rows"]) == 1000
    assert read_run(run_dir)


def test_nothing_is_told_of_a_run_whose_record_is_still_read(
    ended: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOAD_S", 0.0)
    monkeypatch.setattr(record_file, "PART_BYTES", ended.metrics.stat().st_size // 8)
    fetch, going_on = record_file.RecordFile.fetch, threading.Event()

    def fetch_slowly(self: record_file.RecordFile) -> record_file.Part:
        if self.offset > self.size // 2:
            assert going_on.wait(WAIT_S)
        return fetch(self)

    monkeypatch.setattr(record_file.RecordFile, "fetch", fetch_slowly)
    with opened(ended.root) as browser, browser.stream() as stream:
        try:
            page = Page(stream).until(lambda page: page.sections["record"]["loaded"] < 1)
            assert page.sections["run"] | {"step": None} == page.sections["run"]
            assert page.sections["waits"]["seconds"] == []
            use = page.sections["use"]
            assert (use["starved_of_run"], use["starved"], use["blocked"]) == (None, None, None)
        finally:
            going_on.set()
        page = page.until(lambda page: page.sections["record"]["loaded"] == 1)
        assert page.sections["run"]["step"] == 5
        assert page.sections["queue"]["starved_s"] is not None
