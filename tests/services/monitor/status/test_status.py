"""Status answers a person and a program, and says what is wrong where there is no broker."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace
from tests.services.monitor.report.test_evaluation import late, point

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.engine_registry import engine_name
from rolloutmq.bus.evaluation.log import record
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import (
    Endpoints,
    GpuBook,
    GpuRecord,
    InferenceAddress,
    OpenPoint,
    RunLayout,
    SentAddress,
    Supervision,
    WeightsAddress,
    WorkerRecord,
)
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import (
    JournalStatus,
    LaneStatus,
    Pressure,
    StatusReply,
    StepDone,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.joining import JoinedEngine, NetworkStatus
from rolloutmq.schemas.wire.tasks import TaskCounts
from rolloutmq.schemas.wire.telemetry import CurriculumProgress, GpuSample
from rolloutmq.services.monitor import liveness
from rolloutmq.services.monitor.report.evaluation import Evaluations
from rolloutmq.services.monitor.status import orchestrator_view
from rolloutmq.services.monitor.status import status as command
from rolloutmq.services.monitor.status.lately import Lately
from rolloutmq.services.monitor.status.status import RunDetails, status, status_json, status_text
from rolloutmq.services.monitor.status.waits import outside
from rolloutmq.services.monitor.status.worker_view import joined
from rolloutmq.services.process.identity import identify
from rolloutmq.services.telemetry.recorder import line_of


@pytest.fixture
def reply(
    make_pressure: Callable[..., Pressure],
    make_lane: Callable[..., LaneStatus],
    make_worker: Callable[..., WorkerStatus],
) -> StatusReply:
    lanes = (make_lane(wait="stale_guard", queued_groups=24, producers=2),)
    return StatusReply(
        pressure=make_pressure(lanes=lanes, workers=(make_worker("a"), make_worker("b"))),
        run="quickstart",
        total_steps=400,
        durability="memory",
        uptime_s=75.0,
        rejected_messages=2,
        rejected_by_reason={"malformed": 2},
        as_frames={"arena_full": 1200, "not_offered": 3},
    )


@pytest.fixture
def answering(run_dir: Path, reply: StatusReply) -> Iterator[RunLayout]:
    """A run directory whose broker answers one request with the status."""
    layout = RunLayout(run_dir)
    address = f"ipc://{run_dir}/serve"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.bind(address)

    def answer() -> None:
        if server.poll(10_000):
            *route, _ = server.recv_multipart()
            server.send_multipart([*route, codec.encode(reply)])

    thread = threading.Thread(target=answer)
    thread.start()
    write_json(layout.endpoints, Endpoints(ingest="", serve=address, events="", publish="", pid=1, epoch=1))
    yield layout
    thread.join()
    server.close(linger=0)
    context.term()


def test_json_says_why_and_holds_everything(answering: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(answering.root, as_json=True) == 0

    fields = json.loads(capsys.readouterr().out)
    assert fields["why"].startswith("workers wait: stale_guard, environment sort3: 24 groups ahead")
    assert fields["pressure"]["ledger"]["accepted"] == 50
    assert fields["pressure"]["workers"][1]["worker"] == "b"
    assert fields["run"] == "quickstart"


def test_a_trainer_that_cannot_send_its_weights_says_why(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(answering.weights, SentAddress(sender=SegmentOwner.current(), waits="no vLLM is there"))
    assert status(answering.root, as_json=True) == 0
    why = json.loads(capsys.readouterr().out)["why"]
    assert why.startswith("trainer waits: weights_unsent, no vLLM is there; workers wait: ")


def test_workers_that_wait_for_weights_say_so(
    reply: StatusReply, make_worker: Callable[..., WorkerStatus]
) -> None:
    starting = make_worker("a", state=WorkerState.STARTING)
    waiting = replace(reply, pressure=replace(reply.pressure, workers=(starting,), lanes=()))
    also = RunDetails(unserved="weights_missing, nobody has published any")
    assert "why      workers wait: weights_missing, nobody has published any\n" in status_text(waiting, also)
    assert status_json(waiting, also)["why"] == "workers wait: weights_missing, nobody has published any"


def test_a_trainer_that_waits_for_an_evaluation_says_so(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    me = SegmentOwner.current()
    write_json(answering.evaluation, OpenPoint("eval-1.0-ab", ("a", "b"), me))
    assert status(answering.root, as_json=True) == 0
    why = json.loads(capsys.readouterr().out)["why"]
    assert why.startswith("trainer waits: evaluation, point eval-1.0-ab of 2 tasks; workers wait: ")
    dead = (me.pid, me.start_ticks - 1, me.namespace)
    for other in (OpenPoint("eval-1.0-ab", ("a",)), OpenPoint("eval-1.0-ab", ("a",), dead)):
        write_json(answering.evaluation, other)
        assert outside(answering) == ""


def test_weights_that_are_not_waited_for_are_no_reason(run_dir: Path) -> None:
    layout, me = RunLayout(run_dir), SegmentOwner.current()
    assert outside(layout) == ""
    dead = SentAddress(sender=(me.pid, me.start_ticks - 1, me.namespace), waits="no vLLM is there")
    for other in (SentAddress(sender=me), dead, WeightsAddress(path="/dev/shm/a", nonce="0")):
        write_json(layout.weights, other)
        assert outside(layout) == ""


def test_text_is_for_a_person(answering: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(answering.root, as_json=False) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run      quickstart, up 1:15, durability memory"
    assert "step     7 of 400" in lines
    assert "workers  2 ready" in lines
    assert "refused  2 messages (malformed 2)" in lines
    assert "frames   1,203 groups not through shared memory (arena_full 1,200, not_offered 3)" in lines
    assert any(line.startswith("why      workers wait: ") for line in lines)
    assert not any(line.startswith("journal") for line in lines)


def test_a_run_without_workers_by_design_misses_none(reply: StatusReply, run_dir: Path) -> None:
    alone = replace(reply, pressure=replace(reply.pressure, workers=(), lanes=()))
    assert "why      no worker is ready\n" in status_text(alone)
    assert "why      nobody waits\n" in status_text(alone, RunDetails(has_workers=False))
    layout = RunLayout(run_dir)
    assert command._configures_workers(layout), "nothing says that it has none"
    write_json(layout.config, validate({}))
    assert not command._configures_workers(layout)
    write_json(layout.config, validate({"environment": {"sort3": {"entry": "a:B"}}}))
    assert command._configures_workers(layout)


def test_a_door_without_keys_is_told(reply: StatusReply) -> None:
    assert "insecure" not in status_text(reply)
    opened = replace(reply, pressure=replace(reply.pressure, insecure="tcp://0.0.0.0:7760"))
    clear = replace(reply, pressure=replace(reply.pressure, unencrypted=("gateway (0.0.0.0)",)))
    assert "insecure tokens travel unencrypted to gateway (0.0.0.0); set run.tls_cert" in status_text(clear)
    assert "insecure whoever reaches tcp://0.0.0.0:7760 may use the run, unencrypted; set" in status_text(
        opened
    )


def test_other_hosts_are_told(reply: StatusReply, make_worker: Callable[..., WorkerStatus]) -> None:
    worker = make_worker("a-far.0", joined=True, host="gpu7")
    told = replace(
        reply,
        pressure=replace(reply.pressure, workers=(worker,)),
        network=NetworkStatus(listen="tcp://h:1", known_keys=2, workers={"a-far.0": "worker-7"}),
    )
    assert "listen   tcp://h:1, keys in use: 0 of 2" in status_text(told)
    assert "joined   1 worker on gpu7, key worker-7: a-far.0" in status_text(told)
    assert status_json(told)["network"]["workers"] == {"a-far.0": "worker-7"}
    assert status_json(reply)["network"] is None
    engine = JoinedEngine(name="inference.far", host="gpu7", silent_s=9.0)
    lost = replace(told, network=NetworkStatus(listen="tcp://h:1", engines=(engine,)))
    assert status_json(lost)["why"].endswith("; engine inference.far has not been heard for 9 s")


def test_the_journal_says_how_it_does(reply: StatusReply) -> None:
    journal = JournalStatus(
        health="slow", segments=3, nbytes=640 << 20, behind_bytes=9 << 20, commits=200, commit_s=1.0
    )
    line = "journal  slow, 640 MiB in 3 segments, 9.0 MiB behind, 5.0 ms a commit"
    assert line in status_text(replace(reply, journal=journal)).splitlines()
    damaged = replace(journal, health="ok", commits=0, quarantined=2)
    line = "journal  ok, 640 MiB in 3 segments, 9.0 MiB behind, 2 damaged records quarantined"
    assert line in status_text(replace(reply, durability="disk", journal=damaged)).splitlines()


def test_nothing_refused_is_not_told(reply: StatusReply) -> None:
    quiet = msgspec.structs.replace(reply, rejected_messages=0)

    assert "refused" not in status_text(quiet)
    assert status_json(quiet)["rejected_messages"] == 0


def test_shared_memory_that_was_not_opened_is_told_with_what_it_means(reply: StatusReply) -> None:
    refused = replace(reply, rejected_messages=0, rejected_by_reason={"arena_unreachable": 1, "duplicate": 4})
    told = "arenas   1 offers of shared memory not opened (arena_unreachable 1); "
    assert f"{told}groups came as frames" in status_text(refused).splitlines()
    harmless = f"{told}no group was affected: the producer offered another"
    assert harmless in status_text(replace(refused, as_frames={})).splitlines()


def test_the_evaluation_is_told_with_the_points_left_out(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    record(answering.evaluations, point(0))
    record(answering.evaluations, late(10))
    assert status(answering.root, as_json=False) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("eval ")]
    assert rows[0].startswith("eval     step 0: greedy 0.750, mean 0.500")
    assert rows[1].startswith(
        "eval     1 point of evaluation.every = 10 left out (1 by evaluation.max_share = 0.1); "
    )


def test_the_part_of_the_evaluation_is_that_of_the_run_so_far(
    reply: StatusReply, answering: RunLayout
) -> None:
    record(answering.evaluations, point(0))
    found = Evaluations.read(answering)
    ran_s = 4 * found.seconds
    assert found.share(None) != 0.25
    also = RunDetails(evaluations=found, ran_s=ran_s)
    (row,) = (row for row in status_text(reply, also).splitlines() if row.startswith("eval "))
    assert row.endswith("25.0% of the wall time")
    assert status_json(reply, also)["evaluation"]["share"] == 0.25


def test_a_lane_says_how_many_producers_wait_and_for_what(
    reply: StatusReply, make_lane: Callable[..., LaneStatus]
) -> None:
    lanes = (
        make_lane(producers=8, waiting=3, wait="stale_guard"),
        make_lane("idle", producers=2, wait="none"),
    )
    rows = status_text(replace(reply, pressure=replace(reply.pressure, lanes=lanes))).splitlines()
    waiting, idle = (row for row in rows if row.startswith("lane "))
    assert waiting.endswith(", 3 of 8 producers wait: stale_guard")
    assert "wait" not in idle


def test_of_a_thousand_lanes_those_that_wait_are_shown(
    reply: StatusReply, make_lane: Callable[..., LaneStatus]
) -> None:
    lanes = [make_lane(f"env-{number:04}", producers=1, wait="none") for number in range(1000)]
    lanes[700] = make_lane("env-0700", producers=1, waiting=1, wait="lane_full")
    rows = status_text(replace(reply, pressure=replace(reply.pressure, lanes=tuple(lanes)))).splitlines()
    shown = [row for row in rows if row.startswith("lane ")]
    assert len(shown) == 65
    assert "env-0700" in shown[0]
    assert "env-0000" in shown[1]
    assert shown[-1].endswith("936 more; `--json` has all")


def test_a_permit_of_the_evaluation_is_no_rollout(
    reply: StatusReply, make_lane: Callable[..., LaneStatus]
) -> None:
    lanes = (make_lane(granted=8, producers=2), make_lane(split=Split.EVAL, granted=224, producers=2))
    rows = status_text(replace(reply, pressure=replace(reply.pressure, lanes=lanes))).splitlines()
    assert any("sort3: 0 queued, 0 leased, 8 under way at 2 producers" in row for row in rows)
    assert any("sort3 (eval): 0 queued, 0 leased, 224 may start at 2 producers" in row for row in rows)


def test_missing_directory_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(tmp_path / "none", as_json=True) == 2
    assert ": no run directory" in capsys.readouterr().err


def test_run_that_has_ended_has_no_broker(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(run_dir, as_json=True) == 1
    assert "no broker runs in" in capsys.readouterr().err


def test_broker_that_does_not_answer_is_a_failure(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE_S", 0.1)
    address = f"ipc://{run_dir}/serve"
    endpoints = Endpoints(ingest="", serve=address, events="", publish="", pid=1, epoch=1)
    write_json(RunLayout(run_dir).endpoints, endpoints)

    assert status(run_dir, as_json=True) == 1
    assert "broker: no answer from " in capsys.readouterr().err


def test_a_broker_by_hand_that_was_killed_is_named_with_the_command_that_continues(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE_S", 0.1)
    monkeypatch.setattr(liveness, "_runs", lambda pid: pid != 4242)
    endpoints = Endpoints(ingest="", serve=f"ipc://{run_dir}/serve", events="", publish="", pid=4242, epoch=1)
    write_json(RunLayout(run_dir).endpoints, endpoints)

    assert status(run_dir, as_json=True) == 1
    assert capsys.readouterr().err.endswith(
        f"no broker runs in {run_dir}: its process 4242 has ended, or is of another machine or container; "
        f"continue with `rolloutmq broker --run-dir {run_dir}`\n"
    )


def test_tasks_and_late_members_are_said_where_there_are_any(reply: StatusReply) -> None:
    assert not {"tasks", "late"} & {row.split()[0] for row in status_text(reply).splitlines()}
    counted = replace(reply.pressure, tasks=TaskCounts(queued=3, done=12, late=1), late_members={"sort3": 4})
    rows = status_text(replace(reply, pressure=counted)).splitlines()
    assert "tasks    3 queued, 12 done, 1 late" in rows
    assert "late     4 members of sort3" in rows


def test_groups_that_no_teacher_spoke_of_are_said(
    reply: StatusReply, make_worker: Callable[..., WorkerStatus]
) -> None:
    workers = (make_worker("w-0", untaught=2), make_worker("w-1", untaught=1))
    rows = status_text(replace(reply, pressure=replace(reply.pressure, workers=workers))).splitlines()
    assert "untaught 3 groups given up at the teacher; see the workers' logs" in rows
    assert "untaught" not in status_text(reply)


def test_curricula_are_told_where_there_are_any(reply: StatusReply) -> None:
    one = CurriculumProgress(env="e", sampler="replay", at=0.0, levels=1, open=1, drawn=9, outcomes=8, flat=2)
    told = RunDetails(curricula=(one,))
    assert "\nsampler  e: replay, 8 groups, 25% without spread\n" in status_text(reply, told)
    assert status_json(reply, told)["curriculum"]["e"]["outcomes"] == 8
    assert "sampler" not in status_text(reply)
    assert status_json(reply)["curriculum"] == {}


def test_engines_say_where_they_are_and_how_busy(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    told: list[dict[str, Any]] = [
        {"number": 7, "at": now, "in_hand": 12, "busy": 0.93, "trouble": "stalled"},
        {"number": 9, "at": now, "draining": True},
        {"number": 3, "at": now - 75.0},
        {"number": 0},
    ]
    for number, fields in enumerate(told):
        name = engine_name(number)
        address = {"url": f"http://h:{number}", "pid": number, "name": name, **fields}
        write_json(answering.engine(name), address)
    assert status(answering.root, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("engine ")] == [
        "engine   inference: pid 0, http://h:0, 12 requests in hand, 93% busy, stalled",
        "engine   inference-1: pid 1, http://h:1, 0 requests in hand, 0% busy, draining",
        "engine   inference-2: pid 2, http://h:2, silent for 1:15",
        "engine   inference-3: pid 3, http://h:3",
    ]


def test_json_has_the_engines(answering: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(answering.inference, InferenceAddress(url="http://h:1", pid=4, number=2, busy=0.5))
    assert status(answering.root, as_json=True) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert (engine["name"], engine["pid"], engine["busy"]) == ("inference", 4, 0.5)


def given_up() -> WorkerRecord:
    return WorkerRecord(
        worker="bad-0",
        env="bad",
        phase="fatal",
        since=0.0,
        crashes=5,
        reason="crashed 5 times in a row; the last: exit code 1",
        last_lines=("Traceback (most recent call last):", "error: no such dataset"),
    )


def supervised(layout: RunLayout, *workers: WorkerRecord) -> None:
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    write_json(layout.supervision, Supervision(orchestrator=me, workers=workers))


def test_workers_that_the_broker_does_not_know_are_told_with_their_reason(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    supervised(answering, given_up())
    assert status(answering.root, as_json=False) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "workers  2 ready, 1 fatal" in lines
    assert "         bad-0: fatal; crashed 5 times in a row; the last: exit code 1" in lines
    assert "           | error: no such dataset" in lines


def test_silent_workers_are_counted_apart(
    reply: StatusReply, make_worker: Callable[..., WorkerStatus]
) -> None:
    """Killed ones stay in the broker's table with the last state that they reported."""
    heard = (make_worker("a"), make_worker("b", silent_s=14.0), make_worker("c", silent_s=14.0))
    silent = replace(reply, pressure=replace(reply.pressure, workers=heard))
    for crew in (None, joined(None, heard, 0.0)):
        assert "workers  1 ready, 2 silent" in status_text(silent, RunDetails(crew)).splitlines()


def test_the_reason_of_a_wait_counts_the_workers_as_the_table_does(
    reply: StatusReply, make_worker: Callable[..., WorkerStatus]
) -> None:
    """The broker has not heard of the given-up worker, and still has the killed one."""
    killed = make_worker("b", silent_s=14.0, host=socket.gethostname(), pid=2**22 + 1)
    heard = (make_worker("a"), killed)
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    crew = joined(Supervision(orchestrator=me, workers=(given_up(),)), heard, 0.0)
    waiting = replace(reply.pressure, workers=heard, trainer_wait="no_batch")
    lines = status_text(replace(reply, pressure=waiting), RunDetails(crew)).splitlines()
    assert "workers  1 ready, 1 fatal" in lines
    (why,) = [line for line in lines if line.startswith("why ")]
    assert "; 1 worker ready, 1 fatal; workers wait: " in why


def test_json_has_what_the_orchestrator_knows(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    supervised(answering, given_up())
    assert status(answering.root, as_json=True) == 0

    told = json.loads(capsys.readouterr().out)["supervision"]
    (row,) = [row for row in told["workers"] if row["worker"] == "bad-0"]
    assert (row["state"], row["crashes"], row["last_lines"][-1]) == ("fatal", 5, "error: no such dataset")
    assert told["orchestrator"] == {"pid": os.getpid(), "alive": True, "silent_s": None, "problem": ""}


def test_an_orchestrator_that_is_not_heard_is_told(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    write_json(answering.supervision, Supervision(orchestrator=me, at=time.monotonic() - 62.0))
    assert status(answering.root, as_json=False) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("orch ")]
    assert line.startswith("orch     orchestrator not heard for 1:02, since ")
    assert line.endswith(f"(process {os.getpid()} runs): {orchestrator_view.MEANWHILE}")


def test_a_record_that_is_not_written_is_told(reply: StatusReply) -> None:
    also = RunDetails(record="no event recorded for 0:32")
    assert "metrics  no event recorded for 0:32\n" in status_text(reply, also)
    assert status_json(reply, also)["metrics"] == {"problem": "no event recorded for 0:32"}
    assert "metrics" not in status_text(reply)


def test_a_dead_run_is_said_to_be_dead(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    killed = replace(identify("up", Role.LAUNCHER, os.getpid(), "t"), start_ticks=1)
    write_json(layout.owner, killed)
    assert status(layout.root, as_json=False) == 1
    assert f"is dead: its launcher, process {os.getpid()}, was killed" in capsys.readouterr().err


def test_what_still_runs_of_a_dead_run_says_so_too(
    answering: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = identify("broker", Role.BROKER, os.getpid(), "t")
    write_json(answering.owner, replace(broker, name="up", role=Role.LAUNCHER, start_ticks=1))
    write_json(answering.processes, [broker])
    assert status(answering.root, as_json=False) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("DEAD     the run in ")
    assert "1 of its processes still run" in last


def test_a_run_that_has_ended_says_how(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    layout.summary.write_text('{"ended": "the trainer is done"}')
    assert status(layout.root, as_json=False) == 0
    assert "ended    the trainer is done\n" in capsys.readouterr().out


def test_gpus_are_told_with_why_they_are_not_used(
    answering: RunLayout, reply: StatusReply, capsys: pytest.CaptureFixture[str]
) -> None:
    used = GpuStanding(uuid="GPU-1", host="h", name="H100", at=0.0, holders=("a", "b", "c"))
    cordoned = GpuStanding(
        uuid="GPU-2", host="h", name="H100", at=0.0, causes=(Cause.LOST,), reason="GPU is lost", draining=True
    )
    sample = GpuSample(
        uuid="GPU-1",
        number=1,
        at=0.0,
        name="H100",
        utilisation_percent=37.0,
        memory_used_bytes=20 << 30,
        memory_total_bytes=80 << 30,
        temperature_c=61.0,
    )
    records = (GpuRecord(standing=used, sample=sample), GpuRecord(standing=cordoned))
    book = GpuBook(gpus=records, limits={"math": "1 can be placed: no_gpu: 0 of 1 wanted; 1 cordoned"})
    write_json(answering.gpus, book)

    assert status(answering.root, as_json=True) == 0

    fields = json.loads(capsys.readouterr().out)
    told = {gpu["uuid"]: gpu for gpu in fields["gpus"]}
    assert fields["limits"] == book.limits
    assert told["GPU-1"]["sample"]["utilisation_percent"] == 37.0
    assert told["GPU-1"]["sample"]["margin_c"] is None
    assert (told["GPU-1"]["cordoned"], told["GPU-1"]["holders"]) == (False, ["a", "b", "c"])
    assert (told["GPU-2"]["cordoned"], told["GPU-2"]["causes"]) == (True, ["lost"])
    assert told["GPU-2"]["reason"] == "GPU is lost"
    lines = [
        line
        for line in status_text(reply, RunDetails(book=book)).splitlines()
        if line.startswith(("gpu ", "limit "))
    ]
    assert lines == [
        "gpu      GPU-1 H100 · 37 % · 20.0/80.0 GiB · 61 °C · a, b and 1 more",
        "gpu      GPU-2 H100 · cordoned and drained (lost); GPU is lost",
        "limit    math: 1 can be placed: no_gpu: 0 of 1 wanted; 1 cordoned",
    ]


def test_a_run_without_gpus_says_nothing_of_them(reply: StatusReply) -> None:
    assert status_json(reply)["gpus"] == []
    assert "gpu" not in status_text(reply)


def test_figures_and_findings_are_told(
    answering: RunLayout, make_step: Callable[..., StepDone], capsys: pytest.CaptureFixture[str]
) -> None:
    finding = HealthFinding(
        env="trainer", at=0.0, finding="filtering", problem="95% were filtered", remedy="act"
    )
    step = make_step(7, 0.25, loss=2.0, extra={"entropy": 3.0, "kl": 0.5, "grad_norm": 1.5})
    answering.metrics.write_bytes(line_of(b"step", step, 1.0) + line_of(b"health", finding, 2.0))
    assert status(answering.root, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "figures  reward 0.25 · staleness 2 · loss 2 · entropy 3 · kl 0.5 · grad_norm 1.5" in lines
    assert "health   trainer: 95% were filtered; act" in lines


def test_json_has_the_figures_and_findings(reply: StatusReply) -> None:
    finding = HealthFinding(
        env="trainer", at=0.0, finding="filtering", problem="95% were filtered", remedy="act"
    )
    told = status_json(reply, RunDetails(lately=Lately(None, {"kl": 0.5}, ("loss",), (finding,)), ran_s=9.0))
    assert (told["figures"], told["not_finite"], told["ran_s"]) == ({"kl": 0.5}, ["loss"], 9.0)
    assert [(one["env"], one["finding"]) for one in told["findings"]] == [("trainer", "filtering")]


def test_the_time_of_a_run_is_not_that_of_its_broker(reply: StatusReply) -> None:
    assert status_text(reply, RunDetails(ran_s=80.0)).startswith("run      quickstart, up 1:15, durability")
    later = status_text(reply, RunDetails(ran_s=3675.0))
    assert later.startswith("run      quickstart, up 1:01:15, broker 1:15, durability")


def test_of_an_ended_run_the_summary_is_told(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {"groups_accepted": 9, "groups_trained": 6, "groups_filtered": 3, "groups_lost": None}
    about = {"steps": 4, "wall_s": 61.0, "reward_first": 0.125, "reward_last": 0.5, "findings": ["e.drift"]}
    write_json(layout.summary, {"ended": "broker: exit code 1: no space", **about, **groups})
    assert status(layout.root, as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run      {layout.root} has ended, after 1:01",
        "ended    broker: exit code 1: no space",
        "step     4",
        "reward   0.125 -> 0.500",
        "groups   accepted 9 = trained 6 + filtered 3",
        "health   e.drift",
        f"more     rolloutmq report {layout.root}",
    ]
    assert status(layout.root, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["life"], told["ended"]) == ("ended", "broker: exit code 1: no space")
    assert told["summary"]["groups_trained"] == 6
