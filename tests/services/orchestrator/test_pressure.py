"""The control law, tick by tick."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.schemas.config import EnvironmentConfig, OrchestratorConfig
from rolloutmq.schemas.control import LaneStatus, LedgerCounts, Pressure
from rolloutmq.schemas.envelope import Split
from rolloutmq.services.orchestrator.pressure import (
    STALE_S,
    Crew,
    PressureRule,
    PressureSample,
    RuleState,
    sample_of,
)

RULE = PressureRule(min_workers=1, max_workers=4, low=0.75, high=3.0, confirm_ticks=3)


def sample(pressure: float, *, ready: int = 2, heard_at: float = 0.0) -> PressureSample:
    return PressureSample(Crew(ready=ready), heard_at, pressure=pressure)


def targets(rule: PressureRule, state: RuleState, samples: list[PressureSample]) -> list[int]:
    found = []
    for one in samples:
        state, decision = rule.decide(state, one, one.heard_at)
        found.append(decision.target)
    return found


def test_low_pressure_adds_one_once_it_is_confirmed() -> None:
    assert targets(RULE, RuleState(2), [sample(0.1)] * 4) == [2, 2, 3, 3]


def test_high_pressure_means_fewer_workers() -> None:
    assert targets(RULE, RuleState(3), [sample(3.5)] * 4) == [3, 3, 2, 2]


def test_between_the_marks_nothing_happens() -> None:
    assert targets(RULE, RuleState(2), [sample(0.75), sample(1.5), sample(3.0)] * 4) == [2] * 12


def test_ticks_must_agree_in_a_row() -> None:
    wavering = [sample(0.1), sample(0.1), sample(1.0)] * 4
    assert targets(RULE, RuleState(2), wavering) == [2] * 12
    turning = [sample(0.1), sample(0.1), sample(4.0), sample(4.0)] * 3
    assert targets(RULE, RuleState(2), turning) == [2] * 12


def test_the_bounds_hold_and_are_the_reason() -> None:
    state, decision = RULE.decide(RuleState(4, low_ticks=9), sample(0.0), 0.0)
    assert (decision.target, state.low_ticks) == (4, 0)
    assert "4 is the most allowed" in decision.reason
    _, decision = RULE.decide(RuleState(1, high_ticks=9), sample(9.0), 0.0)
    assert decision.target == 1
    assert "1 is the fewest allowed" in decision.reason


def test_silence_is_not_zero_pressure() -> None:
    old = sample(0.0, heard_at=10.0)
    state = RuleState(2, low_ticks=2)
    state, decision = RULE.decide(state, old, 10.0 + STALE_S + 0.1)
    assert decision.target == 2
    assert decision.reason == "hold: no pressure for 3.1 s"
    assert state.low_ticks == 0
    _, decision = RULE.decide(state, PressureSample(), 1e9)
    assert decision.reason == "hold: no pressure heard yet"


def test_one_change_at_a_time() -> None:
    state = RuleState(2, low_ticks=2)
    for crew in (Crew(ready=1, starting=1), Crew(ready=2, draining=1)):
        after, decision = RULE.decide(state, replace(sample(0.0), crew=crew), 0.0)
        assert decision.target == 2
        assert after.low_ticks == 0
        assert "starting" in decision.reason


def test_an_operator_is_obeyed_at_once_within_the_bounds() -> None:
    asked = replace(sample(9.0), crew=Crew(starting=2), wanted=4)
    state, decision = RULE.decide(RuleState(1), asked, 100.0)
    assert (state.target, decision.target, decision.reason) == (4, 4, "4 asked for")
    _, decision = RULE.decide(state, replace(asked, wanted=9), 100.0)
    assert (decision.target, decision.reason) == (4, "9 asked for; 1 to 4 allowed")


def test_the_beginning_is_the_fewest_or_those_that_live() -> None:
    assert [RULE.initial(workers).target for workers in (0, 1, 3, 9)] == [1, 1, 3, 4]


def test_the_numbers_come_from_the_configuration() -> None:
    env = EnvironmentConfig(entry="m:C", min_workers=2, max_workers=5)
    rule = PressureRule.of(env, OrchestratorConfig(low_pressure=0.5, high_pressure=2.0, confirm_ticks=7))
    assert rule == PressureRule(2, 5, 0.5, 2.0, 7)


@given(
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.floats(-10, 10),
            st.integers(0, 2),
            st.none() | st.integers(0, 99),
        )
    ),
)
def test_the_target_never_leaves_its_bounds_nor_jumps(
    fewest: int, more: int, ticks: list[tuple[float, float, int, int | None]]
) -> None:
    rule = PressureRule(fewest, fewest + more, 0.75, 3.0, 1)
    state = rule.initial(0)
    for now, (pressure, age, starting, wanted) in enumerate(ticks):
        before = state.target
        crew = Crew(ready=before, starting=starting)
        seen = PressureSample(crew, now - age, pressure=pressure, wanted=wanted)
        state, decision = rule.decide(state, seen, float(now))
        assert fewest <= decision.target == state.target <= fewest + more
        assert wanted is not None or abs(state.target - before) <= 1


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
    )


def test_a_sample_has_what_concerns_its_environment() -> None:
    crew = Crew(ready=1)
    found = sample_of("a", 16, crew, pressure(lane("a", 256, 3.0), lane("b", 512, 1.0)), 42.0)
    assert found == PressureSample(
        crew=crew,
        heard_at=42.0,
        number=7,
        pressure=256 / (256 * 0.75),
        consumed_per_s=100.0,
        produced_per_s=32.0,
        queued_bytes=5,
        high_bytes=9,
        oldest_age_s=1.5,
        lane_wait="no_credit",
        trainer_wait="no_batch",
        wanted=3,
    )


def test_a_minimum_share_is_a_share() -> None:
    both = pressure(lane("a", 128, 0.0, min_share=0.5), lane("b", 0))
    assert sample_of("a", 16, Crew(), both, 0.0).pressure == 1.0


def test_without_a_lane_or_a_batch_the_pressure_of_all_counts() -> None:
    assert sample_of("c", 16, Crew(), pressure(lane("a", 512)), 0.0).pressure == 2.0
    assert sample_of("a", 16, Crew(), pressure(lane("a", 512), batch=0), 0.0).pressure == 0.0
    assert math.isinf(sample_of("a", 16, Crew(), None, -math.inf).heard_at)
