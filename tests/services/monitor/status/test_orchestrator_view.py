"""An orchestrator that is not heard is told, unless it ended in order or nobody would restart it."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import Endpoints, RunLayout, Supervision
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.monitor.status import orchestrator_view
from rolloutmq.services.monitor.status.orchestrator_view import (
    DECISIONS,
    MEANWHILE,
    SILENT_S,
    fields,
    listen,
    problem,
    silence_s,
)
from rolloutmq.services.process.identity import identify, started_at

ME = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
GONE = msgspec.structs.replace(ME, start_ticks=1)


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def known(
    silent_s: float, now: float, orchestrator: ProcessIdentity = ME, *, over: bool = False
) -> Supervision:
    return Supervision(orchestrator=orchestrator, at=now - silent_s, over=over)


def test_a_process_that_lives_and_says_nothing_is_silent(layout: RunLayout) -> None:
    now = time.monotonic()
    assert silence_s(layout, known(60.0, now), now) == 60.0
    assert problem(layout, known(SILENT_S, now), now, 0.0) == ""
    said = problem(layout, known(60.0, now), now, 0.0)
    assert said.startswith("not heard for 1:00, since ")
    told = {"pid": os.getpid(), "alive": True, "silent_s": 60.0, "problem": said}
    assert fields(layout, known(60.0, now), now, 0.0) == told
    assert fields(layout, None, now, 0.0) is None


def test_an_end_is_no_silence_unless_a_launcher_would_restart_it(layout: RunLayout) -> None:
    now = started_at(ME) + 1000.0
    assert silence_s(layout, None, now) is None
    assert silence_s(layout, known(60.0, now, over=True), now) is None
    assert silence_s(layout, known(60.0, now, GONE), now) is None
    write_json(layout.owner, identify("up", Role.LAUNCHER, os.getpid(), "t"))
    assert silence_s(layout, known(60.0, now, GONE), now) == 60.0
    assert "has ended" in problem(layout, known(60.0, now, GONE), now, 0.0)


def test_the_silence_of_an_earlier_life_does_not_count(layout: RunLayout) -> None:
    write_json(layout.owner, identify("up", Role.LAUNCHER, os.getpid(), "t"))
    now = started_at(ME) + 2.0
    assert silence_s(layout, known(3600.0, now, GONE), now) == pytest.approx(2.0)


def test_a_damaged_owner_is_nobody(layout: RunLayout) -> None:
    layout.owner.write_text("{")
    now = time.monotonic()
    assert silence_s(layout, known(60.0, now), now) == 60.0


def test_one_that_is_heard_on_the_bus_only_cannot_write_its_report(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    old = known(60.0, now)
    said = problem(layout, old, now, 0.0, now - 1.0)
    assert said.startswith("at work, but its report has not been written for 1:00, since ")
    assert f"(see {layout.log('orchestrator')}): what it knows of the workers" in said
    assert MEANWHILE not in said
    told = fields(layout, old, now, 0.0, now - 1.0)
    assert told == {"pid": os.getpid(), "alive": True, "silent_s": pytest.approx(1.0), "problem": said}
    monkeypatch.setattr(orchestrator_view, "full_disk", lambda _: "the disk is full")
    assert "(the disk is full): " in problem(layout, old, now, 0.0, now - 1.0)
    assert problem(layout, old, now, 0.0, now - SILENT_S - 1.0).endswith(MEANWHILE), "it was heard once"


@contextmanager
def events(layout: RunLayout, topic: bytes) -> Iterator[None]:
    """Publish one topic again and again, as the broker of a run."""
    over = threading.Event()
    address = f"ipc://{layout.root}/events"
    write_json(layout.endpoints, Endpoints(ingest="", serve="", events=address, publish="", pid=1, epoch=1))
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind(address)

        def publish() -> None:
            while not over.wait(0.01):
                socket.send_multipart([topic, b""])

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_the_bus_is_listened_to_only_for_an_old_report(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator_view, "LISTEN_S", 30.0)
    began = time.monotonic()
    old = known(60.0, began)
    assert listen(layout, old) is None, "there is no broker"
    with events(layout, DECISIONS + b"env"):
        heard_at = listen(layout, old)
        assert heard_at is not None
        assert began <= heard_at <= time.monotonic()
        assert listen(layout, known(0.0, time.monotonic() + 3600.0)) is None
        assert listen(layout, known(60.0, began, over=True)) is None


def test_other_events_are_not_of_the_orchestrator(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator_view, "LISTEN_S", 0.2)
    with events(layout, b"telemetry.host.h"):
        assert listen(layout, known(60.0, time.monotonic())) is None
