"""The picture fits its terminal, and says what matters."""

import io
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Supervision, WorkerRecord
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.control import (
    LaneStatus,
    LedgerCounts,
    Pressure,
    ScaleDecision,
    StepDone,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.joining import JoinedEngine, JoinedRelay, KeyUse, NetworkStatus
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.schemas.wire.telemetry import (
    CurriculumProgress,
    EngineDecision,
    EngineSample,
    GpuAbsence,
    GpuSample,
    GpuState,
    HostSample,
    ProcessSample,
)
from rolloutmq.schemas.wire.training import StepFigures
from rolloutmq.services.monitor.live import view
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.live.snapshot import snapshot
from rolloutmq.services.process.identity import identify

MakePressure = Callable[..., Pressure]
MakeWorker = Callable[..., WorkerStatus]


@pytest.fixture
def board() -> RunState:
    return RunState.of(RunConfig(environment={"sort3": EnvironmentConfig(entry="a:B")}))


@pytest.fixture
def busy(
    board: RunState,
    make_pressure: MakePressure,
    make_step: Callable[..., StepDone],
    make_worker: MakeWorker,
    make_lane: Callable[..., LaneStatus],
) -> RunState:
    """A board with everything on it and more workers than fit."""
    workers = [make_worker(f"sort3-{index}", produced=index) for index in range(30)]
    workers[20] = make_worker("sort3-20", state=WorkerState.FAILED, error="ValueError: bad")
    board.feed(
        make_pressure(
            workers=tuple(workers),
            trainer_wait="no_batch",
            lanes=(make_lane(wait="stale_guard"),),
            trainer_waits_s={"no_batch": 3.0},
            producer_waits_s={"stale_guard": 12.0, "lane_full": 0.2},
        ),
        10.0,
    )
    for step in range(1, 120):
        board.feed(make_step(step, step / 120), step / 10)
    host: dict[str, Any] = {
        "cpus": 2,
        "cpu_percent": 93.0,
        "memory_used_bytes": 3 << 30,
        "memory_total_bytes": 8 << 30,
    }
    board.feed(
        HostSample(host="h", number=1, at=0.0, shm_free_bytes=1, disk_free_bytes=1, load_1m=1.0, **host),
        11.0,
    )
    for name in ("broker", "trainer", "sort3-1"):
        board.feed(ProcessSample(name=name, pid=1, number=1, at=0.0, cpu_percent=12.0, rss_bytes=1), 11.0)
    board.feed(GpuAbsence(host="h", number=1, at=0.0, why="no driver"), 11.0)
    return board


def drawn(board: RunState, width: int = 80, height: int = 23, now: float = 12.0) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False)
    console.print(view.frame(board, now, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "height"), [(80, 23), (120, 40), (200, 60), (52, 13), (30, 20), (20, 12), (80, 12)]
)
def test_picture_fits(busy: RunState, width: int, height: int) -> None:
    lines = drawn(busy, width, height)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_everything_is_there_at_80_by_24(busy: RunState) -> None:
    text = "\n".join(drawn(busy))

    for word in (
        "step 119/400",
        "steps/s",
        "staleness 2 of 4",
        "1.50 batches (0.75 to 3)",
        "4.0/256 MiB",
        "stale_guard 12 s",
        "waits: no_batch, 384 of 256 sequences",
        "wait: stale_guard, environment sort3: 0 groups ahead",
        "accepted 50 = queued 24 + leased 16 + trained 10",
        "cpu 93 % of 2 cores",
        "no GPU",
        "trainer 12 % · broker 12 %",
    ):
        assert word in text


def test_findings_about_rewards_are_shown_with_the_remedy(busy: RunState) -> None:
    for number in range(5):
        busy.feed(
            HealthFinding(env=f"e{number}", at=0.0, finding="collapse", problem="no signal", remedy="end it"),
            12.0,
        )
    text = "\n".join(drawn(busy))
    assert "health  e0: no signal; end it" in text
    assert "e2: no signal" in text
    assert "e3: no signal" not in text
    assert "and 2 more" in text
    assert len(drawn(busy, 80, 12)) <= 12


def test_other_hosts_are_shown_with_their_keys(busy: RunState) -> None:
    keys = (KeyUse(name="w", role="worker", hosts=("10.0.0.7",), refused={"drain workers": 2}),)
    relay = JoinedRelay(name="relay.b", host="b", key="e", waits_for="no ticket")
    before = "\n".join(drawn(busy, 120, 60))
    assert "listen" not in before
    busy.feed(NetworkStatus(listen="tcp://h:1", known_keys=3, keys=keys, relays=(relay,)), 12.0)
    text = "\n".join(drawn(busy, 120, 60))
    assert "listen  tcp://h:1, keys in use: 1 of 3" in text
    assert "key     w, role worker from 10.0.0.7, heard now; refused: drain workers 2" in text
    assert "relay   relay.b on b, key e: no version yet; waits: no ticket" in text
    assert snapshot(busy, 12.0, 0.0)["network"]["known_keys"] == 3
    engine = JoinedEngine(name="inference.b", host="b", silent_s=9.0)
    busy.feed(NetworkStatus(listen="tcp://h:1", engines=(engine,)), 12.0)
    assert "engines engine inference.b has not been heard for 9 s" in "\n".join(drawn(busy, 120, 60))


def test_worker_in_trouble_is_shown_where_not_all_fit(busy: RunState) -> None:
    lines = drawn(busy)

    names = [line.split()[0] for line in lines if line.startswith(" sort3-")]
    assert "sort3-20" in names
    assert names == sorted(names, key=lambda name: int(name.removeprefix("sort3-")))
    assert f" … {30 - len(names)} more" in [line.rstrip() for line in lines]


def test_last_error_is_shown_where_there_is_room(busy: RunState) -> None:
    row = next(line for line in drawn(busy, 120, 50) if line.startswith(" sort3-20"))
    assert row.endswith("ValueError: bad")


def test_empty_board_says_that_it_waits(board: RunState) -> None:
    text = "\n".join(drawn(board))

    assert "not connected yet" in text
    assert "no step yet" in text


def test_trainer_that_has_not_come_is_not_said_to_have_batches(
    board: RunState, make_pressure: MakePressure
) -> None:
    board.feed(make_pressure(step=0, ledger=LedgerCounts()), 1.0)
    assert "trainer no batch pulled yet" in "\n".join(drawn(board, now=1.0))

    board.feed(make_pressure(step=0, ledger=LedgerCounts(accepted=16, leased=16)), 1.0)
    assert "trainer training" in "\n".join(drawn(board, now=1.0))


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        ((), "workers none"),
        ((WorkerState.GONE,), "workers none"),
        ((WorkerState.STARTING, WorkerState.STARTING), "workers 2 starting"),
        ((WorkerState.STARTING, WorkerState.READY), "workers rolling out"),
    ],
)
def test_workers_roll_out_only_once_one_is_ready(
    board: RunState,
    make_pressure: MakePressure,
    make_worker: MakeWorker,
    states: tuple[WorkerState, ...],
    shown: str,
) -> None:
    workers = tuple(make_worker(f"w-{number}", state=state) for number, state in enumerate(states))
    board.feed(make_pressure(workers=workers), 1.0)
    assert any(line.strip().startswith(shown) for line in drawn(board, now=1.0))


def test_silent_workers_do_not_roll_out(
    board: RunState, make_pressure: MakePressure, make_worker: MakeWorker
) -> None:
    workers = tuple(make_worker(f"w-{number}", silent_s=14.0) for number in range(2))
    board.feed(make_pressure(workers=workers), 1.0)
    assert any(line.strip().startswith("workers 2 silent") for line in drawn(board, now=1.0))


def test_silent_broker_hides_old_reasons(busy: RunState) -> None:
    text = "\n".join(drawn(busy, now=30.0))

    assert "silent for 20 s: the values shown are stale" in text
    assert "too stale" not in text


def test_many_gpus_share_a_line(board: RunState) -> None:
    for index in range(8):
        board.feed(
            GpuSample(
                uuid=f"GPU-{index}",
                number=1,
                at=0.0,
                name="H200",
                utilisation_percent=10.0 * index,
                memory_used_bytes=1 << 30,
                memory_total_bytes=4 << 30,
                temperature_c=30.0 + index,
                clock_event_reasons=0,
            ),
            1.0,
        )

    lines = [line.strip() for line in drawn(board) if "H200" in line]
    assert lines == ["gpu     8 x H200 · 35 % · 8.0/32.0 GiB · 37 °C"]


def gpu(uuid: str, index: int, **facts: Any) -> GpuSample:
    told = {"utilisation_percent": 10.0, "memory_used_bytes": 1 << 30, "memory_total_bytes": 4 << 30}
    return GpuSample(uuid=uuid, index=index, number=1, at=0.0, name="H200", **(told | facts))


def test_a_few_gpus_have_a_line_each_with_who_has_them_and_why_they_are_not_used(board: RunState) -> None:
    board.feed(gpu("GPU-b", 1, state=GpuState.LOST, why="GPU is lost"), 1.0)
    board.feed(gpu("GPU-a", 0, temperature_c=61.0), 1.0)
    board.feed(GpuStanding(uuid="GPU-a", host="", name="", at=0.0, holders=("sort3-0",)), 1.0)
    causes = (Cause.MANUAL, Cause.LOST)
    board.feed(GpuStanding(uuid="GPU-b", host="", name="", at=0.0, causes=causes, reason="by hand: fan"), 1.0)

    lines = [line.strip() for line in drawn(board, 120) if "H200" in line]

    assert lines == [
        "gpu     GPU-a H200 · 10 % · 1.0/4.0 GiB · 61 °C · sort3-0",
        "gpu     GPU-b H200 · cordoned (manual, lost); by hand: fan",
    ]


def test_of_many_gpus_those_that_are_not_well_are_shown_first(board: RunState) -> None:
    for index in range(30):
        board.feed(gpu(f"GPU-{index}", index, temperature_c=50.0), 1.0)
    for index in (3, *range(10, 20)):
        causes = (Cause.HEAT,)
        board.feed(
            GpuStanding(uuid=f"GPU-{index}", host="", name="", at=0.0, causes=causes, reason="hot"), 1.0
        )

    lines = [line.strip() for line in drawn(board, 120) if "H200" in line]

    assert len(lines) == view.GPUS_SHOWN
    assert lines[0] == "gpu     GPU-3 H200 · 10 % · 1.0/4.0 GiB · 50 °C · cordoned (heat); hot"
    assert lines[-1] == "gpu     25 x H200 · 10 % · 25.0/100 GiB · 50 °C · 6 more with problems"


def test_why_there_are_fewer_workers_than_there_should_be_is_shown(board: RunState) -> None:
    reason = "pinned to 3; 2 can be placed: no_gpu: 0 of 1 wanted; 2 cordoned"
    board.feed(
        ScaleDecision(env="sort3", at=0.0, rollout_pressure=0.0, current=2, target=2, reason=reason), 1.0
    )
    assert [line.strip() for line in drawn(board, 120) if "no_gpu" in line] == [
        f"scale   sort3: target 2, current 2; {reason}"
    ]


def test_what_a_gpu_does_not_tell_is_said(board: RunState) -> None:
    board.feed(
        gpu("GPU-a", 0, utilisation_percent=None, memory_total_bytes=None, memory_used_bytes=None),
        1.0,
    )
    (line,) = [line.strip() for line in drawn(board, 120) if "H200" in line]
    assert line == "gpu     GPU-a H200 · use unknown · memory unknown · temperature unknown"


def test_gauge_is_filled_by_pressure_and_never_beyond(board: RunState) -> None:
    filled = [view.gauge(board, value, "green").plain.count("█") for value in (0.0, 1.0, 2.0, 4.0, 400.0)]

    assert filled == [0, 4, 8, 16, 16]


def test_a_record_that_is_not_written_is_said(busy: RunState) -> None:
    busy.record = "no event recorded for 0:32"
    assert drawn(busy, 80, 70)[1].strip() == "metrics no event recorded for 0:32"


def test_a_silent_orchestrator_is_said_above_everything(busy: RunState) -> None:
    busy.orchestrator = "not heard for 1:02"
    assert drawn(busy, 80, 70)[1].strip() == "orch    orchestrator not heard for 1:02"


def test_what_is_wanted_and_who_is_not_well_is_said_in_lines_of_their_own(busy: RunState) -> None:
    busy.supervision = Supervision(
        orchestrator=identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator"),
        workers=(
            WorkerRecord(worker="sort3-1", env="sort3", phase="running", since=0.0, pid=1, started=-50.0),
            WorkerRecord(worker="sort3-30", env="sort3", phase="fatal", since=0.0, reason="crashed 5 times"),
            *(
                WorkerRecord(
                    worker=f"sort3-{n}", env="sort3", phase="waiting", since=0.0, due=15.0, crashes=2
                )
                for n in range(31, 40)
            ),
        ),
    )
    busy.feed(
        ScaleDecision(env="sort3", at=0.0, rollout_pressure=1.0, current=4, target=5, reason="pressure"), 1.0
    )
    lines = [line.strip() for line in drawn(busy, 80, 70)]

    assert "scale   sort3: target 5, current 4; pressure" in lines
    assert "unwell  sort3-20: failed; ValueError: bad" in lines
    assert "sort3-30: fatal; crashed 5 times" in lines
    assert "sort3-31: waiting; restart in 3 s; after crash 2 in a row" in lines
    assert "… 8 more" in lines
    row = next(line.split() for line in lines if line.startswith("sort3-1 "))
    assert row[:4] == ["sort3-1", "ready", "1", "1:02"]
    row = next(line.split() for line in lines if line.startswith("sort3-30 "))
    assert row[:6] == ["sort3-30", "fatal", "-", "-", "-", "-"]


def sample(name: str, **fields: Any) -> EngineSample:
    usual = {"number": 1, "at": 0.0, "url": "http://h:1", "pid": 7, "in_hand": 12, "busy": 0.93}
    return EngineSample(name=name, **{**usual, "draining": False, **fields})


def test_engines_are_shown_with_what_they_have_in_hand(busy: RunState) -> None:
    assert not any(line.startswith(" engine") for line in drawn(busy))
    for one in (sample("inference-10"), sample("inference"), sample("inference-2", draining=True, busy=0.0)):
        busy.feed(one, 11.0)
    busy.feed(EngineDecision(at=0.0, busy=1.2, current=2, target=3, reason="hold: 3 of 3 busy"), 11.0)
    assert [line.rstrip() for line in drawn(busy, 100, 40) if line.startswith(" engine")] == [
        " engine  inference · 12 in hand · 93% busy · pid 7 · http://h:1",
        " engine  inference-2 · 12 in hand · 0% busy · draining · pid 7 · http://h:1",
        " engine  inference-10 · 12 in hand · 93% busy · pid 7 · http://h:1",
        " engines 2 of 3 · hold: 3 of 3 busy",
    ]


def test_many_engines_share_a_line_and_silent_ones_have_none(busy: RunState) -> None:
    for number in range(6):
        busy.feed(sample(f"inference-{number + 1}"), 11.0)
    assert " engines 6 · 72 in hand · 93% busy" in [line.rstrip() for line in drawn(busy, 100, 40)]
    assert not any(line.startswith(" engine") for line in drawn(busy, 100, 40, now=30.0))


def test_curricula_have_a_line_each_and_no_more_than_three(busy: RunState) -> None:
    assert not any("sampler" in line for line in drawn(busy))
    for number in range(5):
        one = CurriculumProgress(
            env=f"e{number}",
            sampler="uniform",
            at=0.0,
            levels=1,
            open=2,
            drawn=1210,
            outcomes=1200,
            flat=300,
        )
        busy.feed(one, 11.0)
    lines = [line.rstrip() for line in drawn(busy, 100, 40)]
    first = lines.index(" sampler e0: uniform, 1,200 groups, 25% without spread")
    assert lines[first + 2].startswith(" sampler e2: ")
    assert lines[first + 3].split() == ["…", "2", "more"]


def test_many_environments_share_three_lines(board: RunState) -> None:
    for number in range(5):
        board.feed(
            ScaleDecision(env=f"e{number}", at=0.0, rollout_pressure=1.0, current=1, target=1, reason="r"),
            1.0,
        )
    lines = [line.strip() for line in drawn(board) if "target" in line or "more" in line]
    assert [line.removeprefix("scale").split()[0] for line in lines[:3]] == ["e0:", "e1:", "e2:"]
    assert lines[-1] == "… 2 more"


def test_a_notice_comes_first(board: RunState) -> None:
    board.notice = "the run in runs/x is dead"
    assert "the run in runs/x is dead" in drawn(board)[1]


def test_points_of_the_evaluation_that_were_left_out_are_shown(board: RunState) -> None:
    assert view.evaluation_lines(board, 1.0) == []
    board.left_out = "9 points of evaluation.every = 10 left out"
    assert [line.plain.split(None, 1) for line in view.evaluation_lines(board, 1.0)] == [
        ["eval", board.left_out]
    ]


def test_figures_of_learning_have_a_line_and_those_not_finite_come_first(board: RunState) -> None:
    assert not any("figures" in line for line in drawn(board))
    board.feed(StepFigures(run="r", incarnation=0, step=1, at=0.0, figures={"loss": 0.5, "kl": 0.01}), 1.0)
    assert " figures loss 0.5 · kl 0.01" in [line.rstrip() for line in drawn(board)]
    board.feed(StepFigures(run="r", incarnation=0, step=2, at=0.0, not_finite=("loss",)), 2.0)
    assert any(line.startswith(" figures loss not finite") for line in drawn(board))


def test_latencies_have_a_compact_line_for_each_training_environment(busy: RunState) -> None:
    assert view.latency_lines(busy, 0.0) == []
    durations = HistogramBuilder().add([0.05] * 98 + [2.0, 2.0]).histogram()
    hops = (Hop.ROLLOUT, Hop.SEND, Hop.QUEUE, Hop.TRAIN)
    for number in range(5):
        rows = [LatencyRow(hop=hop, env=f"e{number}", durations=durations) for hop in hops]
        aside = LatencyRow(hop=Hop.ROLLOUT, env="aside", split=Split.EVAL, durations=durations)
        busy.feed(LatencySample(name="broker", number=1, at=0.0, since_s=1.0, rows=(*rows, aside)), 11.0)
    lines = [line.rstrip() for line in drawn(busy, 120, 60)]
    first = next(number for number, line in enumerate(lines) if line.startswith(" p50/p99"))
    times = r"0\.05/(?:1\.9|2\.0)\d s"
    assert re.fullmatch(f" p50/p99 e0: rollout {times} · queue {times} · train {times}", lines[first])
    assert lines[first + 1].startswith("         e1: rollout")
    assert lines[first + 3].split() == ["…", "2", "more"]
    assert not any("aside" in line for line in lines)
