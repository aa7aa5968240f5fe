"""A worker is one row, whoever knows of it."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Hang, RunLayout, Supervision, Target, WorkerRecord
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import WorkerState, WorkerStatus
from rolloutmq.services.monitor.status.worker_view import (
    WorkerRow,
    fields,
    joined,
    slots_of,
    supervision_of,
    target_text,
    trouble_text,
    with_hangs,
)
from rolloutmq.services.process.identity import identify

MakeWorker = Callable[..., WorkerStatus]
ME = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
NOW = 1000.0


def known(*workers: WorkerRecord) -> Supervision:
    return Supervision(orchestrator=ME, workers=workers)


def worker(name: str = "e-0", phase: str = "running", **about: Any) -> WorkerRecord:
    return WorkerRecord(worker=name, env="e", phase=phase, since=NOW - 5.0, **about)


def test_both_sides_are_joined(make_worker: MakeWorker) -> None:
    heard = make_worker("e-0", pid=7, in_hand=3, produced=9, silent_s=0.5)
    (row,) = joined(known(worker(pid=7, started=NOW - 60.0)), [heard], NOW)
    assert (row.state, row.pid, row.age_s, row.phase_s) == ("ready", 7, 60.0, 5.0)
    assert (row.in_hand, row.produced, row.silent_s) == (3, 9, 0.5)
    assert not row.is_unwell


def test_rollouts_about_to_be_abandoned_are_trouble_before_they_are(make_worker: MakeWorker) -> None:
    heard = [make_worker("e-0", pid=7, in_hand=3, state=WorkerState.DRAINING)]
    (row,) = joined(known(worker(phase="stopping", pid=7, ends=NOW + 12.0)), heard, NOW)
    assert row.ends_s == 12.0
    assert row.is_unwell
    assert trouble_text(row) == "draining for 5 s; 3 rollouts are abandoned within 12 s unless they finish"
    (later,) = joined(known(worker(phase="stopping", pid=7, ends=NOW + 500.0)), heard, NOW)
    assert not later.is_unwell


def test_a_killed_worker_that_the_orchestrator_let_go_is_not_shown(make_worker: MakeWorker) -> None:
    dead, here = 2**22 + 1, socket.gethostname()
    killed = make_worker("e-0", pid=dead, host=here, silent_s=9.0)
    assert joined(known(), [killed], NOW) == []
    others = [
        make_worker("e-0", pid=dead, host="elsewhere", silent_s=9.0),
        make_worker("e-1", pid=dead, host=here, silent_s=0.5),
        make_worker("e-2", pid=os.getpid(), host=here, silent_s=9.0),
        make_worker("e-3", pid=dead, host=here, silent_s=9.0, state=WorkerState.FAILED),
    ]
    assert [row.worker for row in joined(known(), others, NOW)] == ["e-0", "e-1", "e-2", "e-3"]


def test_without_a_broker_nobody_knows_what_a_worker_does() -> None:
    rows = joined(known(worker("e-0", pid=7), worker("e-1", "fatal")), None, NOW)
    assert [row.state for row in rows] == ["running", "fatal"]


def test_what_was_heard_of_an_earlier_process_is_not_the_new_one(make_worker: MakeWorker) -> None:
    (row,) = joined(known(worker(pid=8)), [make_worker("e-0", pid=7)], NOW)
    assert (row.state, row.pid, row.produced) == ("starting", 8, None)


def test_one_that_hangs_for_minutes_is_silent_and_does_not_start() -> None:
    (row,) = joined(known(worker(pid=os.getpid(), ready=True)), [], NOW)
    assert (row.state, row.counts_as, row.is_unwell) == ("silent", "silent", True)
    (row,) = joined(known(worker(pid=os.getpid())), [], NOW)
    assert (row.state, row.is_unwell) == ("starting", False)


@pytest.mark.parametrize(
    ("phase", "state", "draining", "shown"),
    [
        ("running", WorkerState.READY, False, "ready"),
        ("running", WorkerState.READY, True, "draining"),
        ("running", WorkerState.FAILED, False, "failed"),
        ("stopping", WorkerState.DRAINING, True, "draining"),
        ("stopping", WorkerState.READY, False, "stopping"),
    ],
)
def test_a_worker_that_lives_says_its_state(
    make_worker: MakeWorker, phase: str, state: WorkerState, draining: bool, shown: str
) -> None:
    heard = make_worker("e-0", pid=7, state=state, draining=draining)
    (row,) = joined(known(worker(phase=phase, pid=7)), [heard], NOW)
    assert row.state == shown


def test_one_that_was_given_up_is_there_though_the_broker_has_forgotten_it() -> None:
    (row,) = joined(known(worker(phase="fatal", reason="crashed", last_lines=("a", "b"))), [], NOW)
    assert row.is_unwell
    assert (row.state, row.pid, row.silent_s, row.last_lines) == ("fatal", 0, None, ("a", "b"))
    assert trouble_text(row) == "fatal; crashed"


def test_one_that_waits_says_for_how_long() -> None:
    (row,) = joined(known(worker(phase="waiting", due=NOW + 4.0, reason="exit code 1: no")), [], NOW)
    assert trouble_text(row) == "waiting; restart in 4 s; exit code 1: no"


def test_one_that_is_silent_is_not_well(make_worker: MakeWorker) -> None:
    (row,) = joined(known(worker(pid=7)), [make_worker("e-0", pid=7, silent_s=12.0)], NOW)
    assert row.is_unwell
    assert trouble_text(row) == "silent for 12 s"


@pytest.mark.parametrize(
    ("phase", "state", "silent_s", "counted"),
    [
        ("running", WorkerState.READY, 12.0, "silent"),
        ("running", WorkerState.DRAINING, 12.0, "silent"),
        ("running", WorkerState.READY, 1.0, "ready"),
        ("running", WorkerState.FAILED, 12.0, "failed"),
        ("stopping", WorkerState.READY, 12.0, "stopping"),
    ],
)
def test_a_silent_worker_counts_as_silent_unless_its_end_is_known(
    make_worker: MakeWorker, phase: str, state: WorkerState, silent_s: float, counted: str
) -> None:
    heard = make_worker("e-0", pid=7, state=state, silent_s=silent_s)
    (row,) = joined(known(worker(phase=phase, pid=7)), [heard], NOW)
    assert row.counts_as == counted


def test_workers_of_others_are_there_too_and_those_that_went_are_not(make_worker: MakeWorker) -> None:
    heard = [make_worker("far-0"), make_worker("e-1", state=WorkerState.GONE)]
    assert [row.worker for row in joined(None, heard, NOW)] == ["far-0"]


def test_numbers_in_names_sort_by_value(make_worker: MakeWorker) -> None:
    heard = [make_worker(name) for name in ("w-10", "w-2", "a-3", "w", "7")]
    assert [row.worker for row in joined(None, heard, NOW)] == ["7", "a-3", "w", "w-2", "w-10"]


def test_what_another_boot_left_is_not_believed(layout: RunLayout) -> None:
    assert supervision_of(layout) is None
    write_json(layout.supervision, known())
    assert supervision_of(layout) == known()
    old = Supervision(orchestrator=type(ME)(**{**_plain(), "boot_id": "another"}))
    write_json(layout.supervision, old)
    assert supervision_of(layout) is None
    layout.supervision.write_text("{}")
    assert supervision_of(layout) is None


def _plain() -> dict[str, Any]:
    return {name: getattr(ME, name) for name in ME.__struct_fields__}


def test_plain_data_has_everything() -> None:
    target = Target(env="e", target=3, current=2, reason="pressure")
    found = fields(
        Supervision(orchestrator=ME, targets=(target,)), [WorkerRow(worker="e-0", env="e", state="ready")]
    )
    assert list(found["targets"]) == [
        {"env": "e", "target": 3, "current": 2, "reason": "pressure", "wanted": None, "joined": 0}
    ]
    assert found["workers"][0]["worker"] == "e-0"
    assert target_text(target) == "target 3, current 2; pressure"
    others = msgspec.structs.replace(target, joined=1)
    assert target_text(others) == "target 3, current 2, 1 of them joined by themselves; pressure"
    assert fields(None, []) == {"targets": (), "workers": []}


def test_one_that_starts_again_after_a_crash_says_so(make_worker: MakeWorker) -> None:
    again = worker(pid=8, crashes=3, restarts=3, reason="exit code 1: no", last_lines=("a", "b"))
    (row,) = joined(known(again), [], NOW)
    assert row.is_unwell
    assert row.last_lines == ("a", "b")
    assert trouble_text(row) == "starting; after crash 3 in a row; exit code 1: no"
    (row,) = joined(known(again), [make_worker("e-0", pid=8, silent_s=0.1)], NOW)
    assert not row.is_unwell, "it is ready"


def test_one_that_is_replaced_says_when() -> None:
    (row,) = joined(known(worker(phase="fatal", due=NOW + 8.0, crashes=5, reason="crashed 5 times")), [], NOW)
    assert trouble_text(row) == "fatal; replaced in 8 s; crashed 5 times"


def test_a_failed_worker_that_was_replaced_is_no_row(make_worker: MakeWorker) -> None:
    failed = make_worker("e-0", pid=7, env="e", state=WorkerState.FAILED)
    target = Target(env="e", target=1, current=1, reason="")
    supervision = msgspec.structs.replace(known(worker("e-1", pid=8)), targets=(target,))
    assert [row.worker for row in joined(supervision, [failed], NOW)] == ["e-1"]
    assert [row.worker for row in joined(None, [failed], NOW)] == ["e-0"]


@pytest.mark.parametrize("phase", ["running", "stopping"])
def test_a_process_that_has_ended_is_gone_though_the_last_report_has_it(
    phase: str, make_worker: MakeWorker
) -> None:
    me = identify("e-0", Role.WORKER, os.getpid(), "t/e-0")
    lives = worker(phase=phase, pid=me.pid, started=NOW - 60.0, start_ticks=me.start_ticks)
    died = msgspec.structs.replace(lives, start_ticks=me.start_ticks - 1)
    silent = make_worker("e-0", pid=me.pid, silent_s=60.0)
    assert [row.state for row in joined(known(lives), None, NOW)] == [phase]
    for heard in (None, [], [silent]):
        (row,) = joined(known(died), heard, NOW)
        assert (row.state, row.pid, row.age_s, row.is_unwell) == ("gone", me.pid, None, False)
        assert row.reason.startswith("its process has ended")
    beats = make_worker("e-0", pid=me.pid, silent_s=0.1)
    assert [row.state for row in joined(known(died), [beats], NOW)] != ["gone"], (
        "it is heard, maybe from elsewhere"
    )


def test_a_process_of_another_node_is_not_looked_for_here() -> None:
    far = worker(pid=os.getpid(), start_ticks=1, node="n-1", host="h1")
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    living = msgspec.structs.replace(known(far), orchestrator=me)
    (row,) = joined(living, [], NOW)
    assert (row.state, row.host, row.node) == ("starting", "h1", "n-1")
    dead = msgspec.structs.replace(me, start_ticks=1)
    (row,) = joined(msgspec.structs.replace(living, orchestrator=dead), [], NOW)
    assert row.state == "gone"


def test_no_worker_was_blocked_for_longer_than_it_lives(make_worker: MakeWorker) -> None:
    """The worker adds the waits of its slots up: `blocked 399 s` of a process 61 s old."""
    heard = [
        make_worker("e-0", env="e", pid=7, blocked_s=400.0),
        make_worker("other-0", env="o", blocked_s=9.0),
    ]
    rows = joined(known(worker(pid=7, started=NOW - 61.0)), heard, NOW, {"e": 8})
    assert [row.blocked_s for row in rows] == [50.0, 9.0]


def test_slots_are_those_of_the_configuration(layout: RunLayout) -> None:
    assert slots_of(layout) == {}
    section = {"entry": "a:B", "concurrency": 16}
    write_json(layout.config, RunConfig.model_validate({"environment": {"e": section}}))
    assert slots_of(layout) == {"e": 16}


def test_a_silent_worker_tells_what_holds_its_event_loop(make_worker: MakeWorker, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.hangs.mkdir()
    workers = known(worker(pid=7))
    for silent_s, pid, told in (
        (12.0, 7, "silent for 12 s: its code is at sums.py:14, with task (3, 4)"),
        (12.0, 8, "silent for 12 s"),
        (0.1, 7, ""),
    ):
        write_json(layout.hang("e-0"), Hang(pid=pid, where="sums.py:14", task="(3, 4)"))
        (row,) = with_hangs(joined(workers, [make_worker("e-0", pid=7, silent_s=silent_s)], NOW), layout)
        assert (trouble_text(row) if row.is_silent else row.hang) == told
