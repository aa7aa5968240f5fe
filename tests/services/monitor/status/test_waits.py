"""Every reason has its sentence, in one line, with the numbers that matter."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import LaneStatus, LedgerCounts, Pressure, WorkerState, WorkerStatus
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.services.monitor.status import waits

MIB = 1 << 20
READY = WorkerState.READY
MakePressure = Callable[..., Pressure]
MakeLane = Callable[..., LaneStatus]
MakeWorker = Callable[..., WorkerStatus]


def test_each_reason_of_the_protocol_is_explained() -> None:
    assert waits.TRAINER_WAITS.keys() | waits.WORKER_WAITS.keys() == set(Wait) - {Wait.NONE}


@pytest.mark.parametrize("reason", ["", "none"])
def test_nobody_waits(reason: str, make_pressure: MakePressure, make_worker: MakeWorker) -> None:
    assert waits.explain(make_pressure(trainer_wait=reason, workers=(make_worker("w"),))) == "nobody waits"


def test_no_worker_is_said_where_nobody_waits(make_pressure: MakePressure) -> None:
    assert waits.explain(make_pressure()) == "no worker is ready"


def test_a_run_without_workers_by_design_misses_none(
    make_pressure: MakePressure, make_worker: MakeWorker, make_lane: MakeLane
) -> None:
    assert waits.explain(make_pressure(), has_workers=False) == "nobody waits"
    lanes = (make_lane("a", producers=2), make_lane("b", producers=1))
    waiting = make_pressure(trainer_wait="no_batch", queued_sequences=96, lanes=lanes, produced_per_s=0.0)
    told = waits.explain(waiting, has_workers=False)
    assert told == "trainer waits: no_batch, 96 of 256 sequences queued; 3 producers"
    by_hand = make_pressure(workers=(make_worker("w", state=WorkerState.STARTING),))
    assert waits.explain(by_hand, has_workers=False) == "no worker is ready"


def test_workers_that_start_wait_for_weights_that_nobody_has_published(
    make_pressure: MakePressure, make_worker: MakeWorker, run_dir: Path
) -> None:
    layout = RunLayout(run_dir)
    starting, ready = (make_worker(state.value, state=state) for state in (WorkerState.STARTING, READY))
    assert waits.unserved(layout) == "", "nothing is known of the run"
    write_json(layout.config, RunConfig.model_validate({"inference": {"kind": "none"}}))
    assert waits.unserved(layout) == ""
    write_json(layout.config, RunConfig.model_validate({}))
    unserved = waits.unserved(layout)
    assert unserved.startswith('weights_missing, inference.kind "tiny" samples from the weights of a trainer')
    told = waits.explain(make_pressure(workers=(starting,)), unserved=unserved)
    assert told == f"workers wait: {unserved}"
    assert waits.explain(make_pressure(workers=(starting, ready)), unserved=unserved) == "nobody waits"
    assert waits.explain(make_pressure(), unserved=unserved) == "no worker is ready"
    write_json(layout.weights, {})
    assert waits.unserved(layout) == ""


@pytest.mark.parametrize(
    ("waiting", "producers", "text"),
    [
        (0, 8, ""),
        (1, 8, "1 of 8 producers waits"),
        (3, 8, "3 of 8 producers wait"),
        (1, 1, "1 of 1 producer waits"),
        (1200, 2000, "1,200 of 2,000 producers wait"),
    ],
)
def test_waiting_producers_are_counted(waiting: int, producers: int, text: str, make_lane: MakeLane) -> None:
    lane = make_lane("e", wait="no_tasks", waiting=waiting, producers=producers)
    assert waits.waiting_text(lane) == text


def test_the_reason_of_workers_says_how_many_wait(make_pressure: MakePressure, make_lane: MakeLane) -> None:
    lane = make_lane("e", wait="no_tasks", waiting=3, producers=8)
    told = waits.workers(make_pressure(lanes=(lane,)))
    assert told == "no_tasks, environment e: its workers wait for submitted tasks; 3 of 8 producers wait"


def test_whoever_waits_for_a_teacher_comes_first(
    make_pressure: MakePressure, make_worker: MakeWorker, make_lane: MakeLane
) -> None:
    told = "2 groups for the teacher, the longest for 9 s: http://x: status 503"
    workers = (make_worker("w-0"), make_worker("w-1", waits_for=told))
    lanes = (make_lane("a", wait="stale_guard", waiting=1),)
    assert waits.workers(make_pressure(workers=workers)) == f"teacher_away, worker w-1: {told}"
    both = waits.workers(make_pressure(workers=workers, lanes=lanes))
    assert both.startswith(f"teacher_away, worker w-1: {told}; stale_guard, environment a: ")
    more = tuple(make_worker(f"w-{number}", waits_for=told) for number in range(3))
    assert waits.workers(make_pressure(workers=more)).endswith("; 2 other workers wait too")
    assert waits.workers(make_pressure(workers=more[:2])).endswith("; 1 other worker waits too")


def test_a_worker_without_an_engine_in_reach_waits_for_no_teacher(
    make_pressure: MakePressure, make_worker: MakeWorker
) -> None:
    worker = make_worker("w-0", state=WorkerState.STARTING, waits_for="only its own host reaches inference")
    told = waits.workers(make_pressure(workers=(worker,)))
    assert told == "engine_away, worker w-0: only its own host reaches inference"
    cut = make_worker(
        "w-1", waits_for="no engine is within reach: inference", engines_away={"inference": "x"}
    )
    told = waits.workers(make_pressure(workers=(cut,)))
    assert told == "engine_away, worker w-1: no engine is within reach: inference"


def test_engines_that_lag_are_named_whether_anybody_waits_or_not(
    make_pressure: MakePressure, make_worker: MakeWorker
) -> None:
    lag = "engine inference.gpu7 has version 0.1, 3 steps behind, for 60 s: its relay may be stuck"
    calm = make_pressure(workers=(make_worker("w"),))
    assert waits.explain(calm, engines=lag) == f"nobody waits; {lag}"
    waiting = make_pressure(trainer_wait="no_batch", workers=(make_worker("w"),))
    assert waits.explain(waiting, engines=lag) == f"{waits.explain(waiting)}; {lag}"


def test_no_batch_tells_what_is_missing_and_who_works(
    make_pressure: MakePressure, make_worker: MakeWorker
) -> None:
    states = (WorkerState.READY, WorkerState.READY, WorkerState.STARTING)
    workers = tuple(make_worker(f"w-{i}", state=state) for i, state in enumerate(states))
    pressure = make_pressure(
        trainer_wait="no_batch", queued_sequences=96, produced_per_s=40.0, workers=workers
    )
    assert waits.explain(pressure) == (
        "trainer waits: no_batch, 96 of 256 sequences queued, the rest takes 4 s; 2 workers ready, 1 starting"
    )
    stale = make_pressure(
        trainer_wait="no_batch",
        queued_sequences=0,
        produced_per_s=0.0,
        ledger=LedgerCounts(accepted=40, expired=38),
    )
    assert (
        "; 38 of 40 groups expired, too stale to train on (the broker's log has remedies); 0 workers"
        in waits.trainer(stale)
    )
    stuck = make_pressure(trainer_wait="no_batch", queued_sequences=96, produced_per_s=0.0)
    assert waits.trainer(stuck) == "no_batch, 96 of 256 sequences queued; 0 workers ready"


def test_silent_workers_count_as_silent_not_as_ready(
    make_pressure: MakePressure, make_worker: MakeWorker
) -> None:
    dead = [make_worker(f"w-{number}", silent_s=14.0, waits_for="a teacher") for number in range(4)]
    workers = (*dead, make_worker("w-4", state=WorkerState.STARTING), make_worker("w-5", silent_s=2.9))
    waiting = make_pressure(trainer_wait="no_batch", queued_sequences=96, workers=workers)
    assert waits.trainer(waiting).endswith("; 1 worker ready, 1 starting, 4 silent")
    assert waits.workers(waiting, "weights_missing") == "", "one is ready; what the dead waited for is past"
    assert waits.workers(make_pressure(workers=workers[:5]), "weights_missing") == "weights_missing"
    assert waits.explain(make_pressure(workers=tuple(dead))) == "no worker is ready"


def test_min_share_names_the_environment_that_is_missing(
    make_pressure: MakePressure, make_lane: MakeLane
) -> None:
    lanes = (make_lane("a", queued_sequences=300), make_lane("b", min_share=0.25, queued_sequences=10))
    pressure = make_pressure(trainer_wait="min_share", lanes=lanes, exact_wait_s=5.0)
    assert waits.trainer(pressure) == (
        "min_share, environment b: 10 of at least 64 sequences queued; "
        "waits at most 5 s, then later batches make up for it"
    )
    assert "has not filled" in waits.trainer(make_pressure(trainer_wait="min_share"))


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("no_exact_fit", "384 sequences queued, but no whole groups make exactly 256"),
        ("leased_elsewhere", "16 groups of another step are still leased"),
        ("journal_slow", "the broker's disk is full or too slow"),
        (
            "batch_exceeds_cap",
            "a batch of 256 sequences does not fit: 4.0/256 MiB hold 384; "
            "raise broker.high_bytes or broker.high_groups",
        ),
        ("too_few_groups", "24 groups queued, fewer than the trainer has ranks"),
        ("end_of_replay", "every recorded batch was served"),
    ],
)
def test_the_trainer_is_told_with_its_numbers(reason: str, text: str, make_pressure: MakePressure) -> None:
    pressure = make_pressure(trainer_wait=reason)
    assert waits.explain(pressure) == f"trainer waits: {reason}, {text}"


def test_a_batch_that_exceeds_the_mark_of_a_lane_names_that_mark(
    make_pressure: MakePressure, make_lane: MakeLane
) -> None:
    lane = make_lane("math", wait="lane_full", held_bytes=9 * MIB, high_bytes=10 * MIB)
    text = waits.trainer(make_pressure(trainer_wait="batch_exceeds_cap", lanes=(lane,)))
    assert text.endswith("does not fit: 9.0/10.0 MiB hold 384; raise env.math.high_bytes")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("stale_guard", "environment math: 24 groups ahead of the trainer, bound 2 versions"),
        ("lane_full", "environment math: 9.0/10.0 MiB held, its own high-water mark"),
        ("global_full", "environment math: 4.0/256 MiB held, 40 of 1,000 groups"),
        ("no_credit", "environment math: 4.0/256 MiB held, and 3.0 MiB granted to other workers"),
        ("journal_slow", "the broker's disk is full or too slow"),
    ],
)
def test_the_workers_are_told_with_their_numbers(
    reason: str, text: str, make_pressure: MakePressure, make_lane: MakeLane
) -> None:
    lane = make_lane(
        "math",
        wait=reason,
        queued_groups=10,
        leased_groups=8,
        granted=6,
        max_staleness=2,
        held_bytes=9 * MIB,
        high_bytes=10 * MIB,
    )
    ledger = LedgerCounts(queued=30, leased=10)
    pressure = make_pressure(lanes=(lane,), ledger=ledger, high_groups=1000, granted_bytes=3 * MIB)
    assert waits.explain(pressure) == f"workers wait: {reason}, {text}"


def test_of_several_environments_the_one_with_most_waiting_is_told(
    make_pressure: MakePressure, make_lane: MakeLane
) -> None:
    lanes = (
        make_lane("a", wait="stale_guard", waiting=1),
        make_lane("b", wait="lane_full", waiting=5, held_bytes=1 * MIB, high_bytes=MIB),
        make_lane("c"),
    )
    text = waits.explain(make_pressure(lanes=lanes))
    assert text.startswith("workers wait: lane_full, environment b: ")
    assert text.endswith("; other environments wait: 1 for stale_guard")
    assert "\n" not in text


def test_unknown_reason_is_shown_as_it_came(make_pressure: MakePressure, make_lane: MakeLane) -> None:
    text = waits.explain(make_pressure(trainer_wait="mystery", lanes=(make_lane(wait="arena_full"),)))
    assert text == "trainer waits: mystery; workers wait: arena_full, environment sort3"
