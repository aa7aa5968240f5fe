"""Plain lines come neither too often nor too rarely."""

import json
import os
from collections.abc import Callable

import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Supervision, WorkerRecord
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import (
    LaneStatus,
    LedgerCounts,
    Pressure,
    StepDone,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.monitor.live.progress import Progress, describe
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.process.identity import identify

MakePressure = Callable[..., Pressure]
MakeStep = Callable[..., StepDone]


@pytest.fixture
def board() -> RunState:
    return RunState.of(RunConfig(environment={"e": EnvironmentConfig(entry="a:B")}))


def times(board: RunState, until_s: float, each: Callable[[float], None]) -> list[float]:
    """Ask ten times a second and return when there was a line."""
    progress = Progress(board)
    said = []
    for tick in range(int(until_s * 10)):
        now = tick / 10
        each(now)
        if progress.line(now) is not None:
            said.append(now)
    return said


def test_slow_steps_are_told_every_two_seconds(
    board: RunState, make_pressure: MakePressure, make_step: MakeStep
) -> None:
    board.feed(make_pressure(), 0.0)

    def each(now: float) -> None:
        board.feed(make_pressure(), now)
        board.feed(make_step(1 + int(now * 2), now / 100), now)

    assert times(board, 10, each) == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_fast_steps_are_told_every_25(
    board: RunState, make_pressure: MakePressure, make_step: MakeStep
) -> None:
    def each(now: float) -> None:
        board.feed(make_pressure(), now)
        for part in range(4):
            board.feed(make_step(1 + round(now * 40) + part), now)

    assert times(board, 3, each) == [0.0, 0.7, 1.4, 2.1, 2.8]


def test_run_that_stands_still_is_told_every_half_minute(
    board: RunState, make_pressure: MakePressure
) -> None:
    def each(now: float) -> None:
        board.feed(make_pressure(), now)

    assert times(board, 65, each) == [0.0, 30.0, 60.0]


def test_line_has_what_a_person_asks_for(
    board: RunState,
    make_pressure: MakePressure,
    make_step: MakeStep,
    make_worker: Callable[..., WorkerStatus],
    make_lane: Callable[..., LaneStatus],
) -> None:
    workers = (make_worker("a"), make_worker("b"), make_worker("c", state=WorkerState.DRAINING))
    lanes = (make_lane(wait="stale_guard"),)
    board.feed(make_pressure(workers=workers, trainer_wait="no_batch", lanes=lanes), 1.0)
    board.feed(make_step(25, 0.312), 1.0)

    assert describe(board, 1.0) == (
        "step  25/400  reward 0.312   0.0 steps/s  pressure 1.50  staleness 2/4  workers 2 +1 draining"
        "  trainer waits: no_batch  workers wait: stale_guard"
    )


def test_line_says_that_groups_expire(board: RunState, make_pressure: MakePressure) -> None:
    ledger = LedgerCounts(accepted=900, expired=800)
    board.feed(make_pressure(trainer_wait="no_batch", ledger=ledger), 1.0)
    assert "  trainer waits: no_batch, 800 of 900 groups expired" in describe(board, 1.0)


def test_line_counts_silent_workers_apart(
    board: RunState, make_pressure: MakePressure, make_worker: Callable[..., WorkerStatus]
) -> None:
    workers = (make_worker("a"), make_worker("b", silent_s=14.0), make_worker("c", silent_s=14.0))
    board.feed(make_pressure(workers=workers), 1.0)
    assert "workers 1 +2 silent" in describe(board, 1.0)


def test_line_counts_no_worker_that_signed_off(
    board: RunState, make_pressure: MakePressure, make_worker: Callable[..., WorkerStatus]
) -> None:
    """The last report of its orchestrator has it running."""
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    record = WorkerRecord(worker="a", env="sort3", phase="running", since=0.0, pid=os.getpid())
    board.supervision = Supervision(orchestrator=me, workers=(record,))
    leaves = make_worker("a", pid=os.getpid(), state=WorkerState.GONE)
    board.feed(make_pressure(workers=(leaves,)), 1.0)
    assert describe(board, 1.0).endswith("  workers 0")


def test_line_says_that_workers_wait_for_weights(
    board: RunState, make_pressure: MakePressure, make_worker: Callable[..., WorkerStatus]
) -> None:
    board.unserved = "weights_missing, nobody has published any"
    board.feed(make_pressure(workers=(make_worker("a", state=WorkerState.STARTING),)), 1.0)
    assert describe(board, 1.0).endswith("  workers wait: weights_missing")
    board.feed(make_pressure(workers=(make_worker("a"),)), 1.0)
    assert "workers wait" not in describe(board, 1.0)


def test_line_says_who_is_dead_or_silent(board: RunState, make_pressure: MakePressure) -> None:
    board.feed(make_pressure(), 1.0)
    board.is_dead, board.orchestrator = True, "not heard for 0:07"
    assert describe(board, 1.0).endswith("  the launcher was killed  the orchestrator is silent")
    assert describe(board, 9.0).endswith("the orchestrator is silent  the broker is silent for 8 s")


def test_line_before_anything_happened(board: RunState) -> None:
    assert Progress(board).line(0.0) == "[ 0:00] waiting for the broker"


def test_findings_end_the_line(board: RunState, make_pressure: MakePressure) -> None:
    board.feed(make_pressure(), 1.0)
    board.feed(HealthFinding(env="e", at=0.0, finding="drift", problem="it fell"), 1.0)

    assert describe(board, 2.0).endswith("  e: drift")


def test_silent_broker_is_told_instead_of_old_reasons(board: RunState, make_pressure: MakePressure) -> None:
    board.feed(make_pressure(trainer_wait="no_batch"), 1.0)

    assert describe(board, 9.0).endswith("the broker is silent for 8 s")


def test_for_a_program_a_line_has_fields(
    board: RunState,
    make_pressure: MakePressure,
    make_step: MakeStep,
    make_lane: Callable[..., LaneStatus],
    make_worker: Callable[..., WorkerStatus],
) -> None:
    progress = Progress(board, as_json=True)
    first = json.loads(progress.line(0.0) or "")
    assert (first["event"], first["reward"], first["pressure"], first["ran_s"]) == (
        "progress",
        None,
        None,
        0.0,
    )
    workers = (make_worker("a"), make_worker("b", state=WorkerState.STARTING))
    lanes = (make_lane("e", wait="stale_guard"),)
    board.feed(make_pressure(workers=workers, trainer_wait="no_batch", lanes=lanes), 1.0)
    board.feed(make_step(25, 0.3125), 1.0)
    board.feed(HealthFinding(env="e", at=0.0, finding="solved", problem="found"), 1.0)
    told = json.loads(progress.line(4.0) or "")
    assert (told["step"], told["total_steps"], told["reward"], told["ran_s"]) == (25, 400, 0.3125, 3.0)
    assert told["workers"] == {"ready": 1, "starting": 1}
    assert told["trainer_waits"].startswith(
        "no_batch, 384 of 256 sequences queued; 1 worker ready, 1 starting"
    )
    assert told["workers_wait"].startswith("stale_guard, environment e: ")
    assert told["findings"] == [{"env": "e", "finding": "solved"}]
    assert progress.line(4.1) is None, "nothing has changed but the clock"
    assert json.loads(progress.notice("it ends")) == {"event": "notice", "text": "it ends"}
