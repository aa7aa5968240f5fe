"""What a law sees of one environment."""

import math

from msgspec.structs import replace

from rolloutmq.schemas.wire.control import LaneStatus, LedgerCounts, Pressure, WorkerState, WorkerStatus
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, PressureSample, sample_of


def lane(env: str, queued: int, weight: float = 1.0, min_share: float = 0.0) -> LaneStatus:
    return LaneStatus(
        env=env,
        split=Split.TRAIN,
        weight=weight,
        min_share=min_share,
        queued_groups=queued // 16,
        queued_sequences=queued,
        accepted_per_s=2.0,
        oldest_age_s=1.5,
        wait="no_credit",
        accepted_sequences=900,
        settled_sequences=500,
        rollout_s=12.0,
    )


def worker(name: str, state: WorkerState, waits_for: str) -> WorkerStatus:
    return WorkerStatus(
        worker=name,
        env=name[0],
        state=state,
        pid=1,
        host="",
        in_hand=2,
        produced=0,
        abandoned=0,
        blocked_s=0.0,
        silent_s=0.0,
        draining=False,
        error="",
        waits_for=waits_for,
    )


def pressure(*lanes: LaneStatus, batch: int = 256) -> Pressure:
    queued = sum(lane.queued_sequences for lane in lanes)
    return Pressure(
        epoch=1,
        number=7,
        at=0.0,
        rollout_pressure=queued / batch if batch else 0.0,
        queued_sequences=queued,
        batch_sequences=batch,
        queued_groups=0,
        queued_bytes=5,
        leased_bytes=0,
        high_bytes=9,
        step=0,
        consumed_per_s=100.0,
        produced_per_s=90.0,
        staleness_max=0,
        trainer_wait="no_batch",
        ledger=LedgerCounts(),
        lanes=lanes,
        workers=(),
        wanted={"a": 3},
        trainers=2,
        starved_s=4.5,
        blocked_s={"a": 7.5},
        completions={"a": 70},
        completion_tokens={"a": 700},
    )


def test_a_sample_has_what_concerns_its_environment() -> None:
    """Trainers consumed 500 of each environment, and its share is three quarters."""
    both = pressure(lane("a", 256, 3.0), lane("b", 512, 1.0))
    assert sample_of("a", Split.TRAIN, 8, 4, both, 42.0) == PressureSample(
        heard_at=42.0,
        epoch=1,
        number=7,
        pressure=256 / (256 * 0.75),
        batch_sequences=256 * 0.75,
        trainers=2,
        eaten=1000,
        share=0.75,
        made=900,
        starved_s=4.5,
        blocked_s=7.5,
        wait="no_credit",
        slots=8,
        group_sequences=4,
        rollout_s=12.0,
        completions=70,
        completion_tokens=700,
        wanted=3,
    )
    assert sample_of("b", Split.TRAIN, 8, 4, both, 42.0).blocked_s == 0.0


def test_workers_that_wait_for_the_teacher_are_those_that_are_ready() -> None:
    told = "2 groups for the teacher, the longest for 9 s: no answer yet"
    crew = (
        worker("a-0", WorkerState.READY, told),
        worker("a-1", WorkerState.READY, ""),
        worker("a-2", WorkerState.DRAINING, told),
        worker("b-0", WorkerState.READY, told),
    )
    heard = replace(pressure(lane("a", 256)), workers=crew)
    assert sample_of("a", Split.TRAIN, 8, 4, heard, 0.0).untaught == 1
    assert sample_of("c", Split.TRAIN, 8, 4, heard, 0.0).untaught == 0


def test_a_minimum_share_is_a_share_and_who_has_none_is_alone() -> None:
    both = pressure(lane("a", 128, 0.0, min_share=0.5), lane("b", 0))
    assert sample_of("a", Split.TRAIN, 1, 4, both, 0.0).pressure == 1.0
    assert sample_of("a", Split.TRAIN, 1, 4, pressure(lane("a", 128, 0.0)), 0.0).pressure == 0.5


def test_an_environment_without_weight_beside_others_has_no_share() -> None:
    both = pressure(lane("a", 128, 0.0), lane("b", 0, 1.0))
    assert sample_of("a", Split.TRAIN, 1, 4, both, 0.0).share == 0.0
    assert sample_of("b", Split.TRAIN, 1, 4, both, 0.0).share == 1.0
    assert sample_of("a", Split.EVAL, 1, 4, both, 0.0).share == 1.0


def test_without_a_lane_or_a_batch_the_pressure_of_all_counts() -> None:
    assert sample_of("c", Split.TRAIN, 1, 4, pressure(lane("a", 512)), 0.0).pressure == 2.0
    assert sample_of("a", Split.EVAL, 1, 4, pressure(lane("a", 512)), 0.0).eaten == 0
    assert sample_of("a", Split.EVAL, 1, 4, pressure(lane("a", 512)), 0.0).starved_s == 0.0, (
        "it starves nobody"
    )
    assert sample_of("a", Split.TRAIN, 1, 4, pressure(lane("a", 0), batch=0), 0.0).pressure == 0.0
    assert math.isinf(sample_of("a", Split.TRAIN, 1, 4, None, -math.inf).heard_at)


def test_what_is_short_is_what_a_bound_keeps_back() -> None:
    assert Decision(8, "", want=11.5, bound="inference_bound").short == 3.5
    assert Decision(8, "", want=11.5).short == 0.0
    assert Decision(8, "", want=7.0, bound="budget").short == 0.0
