"""The law of the engine pool: one more where workers are held back for long, one fewer where the others would do."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, WorkerCounts
from rolloutmq.services.orchestrator.autoscaling.servers.capacity import FIRST_HOLD_S
from rolloutmq.services.orchestrator.autoscaling.servers.server_use import SURE_S
from rolloutmq.services.orchestrator.engines.scaling import (
    EngineBound,
    EngineScalingRule,
    PoolSample,
    PoolState,
)

HELD = {"env": EngineBound(inference_bound=True, short=2.5)}
FREE = {"env": EngineBound()}
RULE = EngineScalingRule(min_engines=1, max_engines=3, confirm_s=10.0, idle_s=20.0)


class Driver:
    """Asks the rule once a second, with engines that do at once as it says."""

    def __init__(self, engines: int = 1, rule: EngineScalingRule = RULE) -> None:
        self.rule = rule
        self.state = rule.initial(engines)
        self.now = 1000.0
        self.decision = Decision(0, "")

    def tick(
        self,
        bounds: Mapping[str, EngineBound],
        seconds: int = 1,
        *,
        busy: float = 1.0,
        wanted: int | None = None,
        crew: WorkerCounts | None = None,
        failure: str = "",
        no_room: str = "",
    ) -> int:
        for _ in range(seconds):
            ready = crew or WorkerCounts(ready=self.state.target)
            sample = PoolSample(ready, bounds, busy, wanted, failure, no_room)
            self.state, self.decision = self.rule.decide(self.state, sample, self.now)
            self.now += 1.0
        return self.decision.target


def test_workers_that_are_held_back_for_long_get_another_engine() -> None:
    driver = Driver()
    assert driver.tick(HELD, 10) == 1
    assert driver.decision.reason == (
        "hold: inference_bound: env short of 2.5 workers; not confirmed yet, 9 of 10 s"
    )
    assert driver.tick(HELD) == 2
    assert driver.decision.reason == "inference_bound: env short of 2.5 workers for 10 s"


def test_what_the_last_engine_changed_is_seen_before_the_next() -> None:
    driver = Driver()
    driver.tick(HELD, 11)
    assert driver.state.target == 2
    assert driver.tick(HELD, 30, crew=WorkerCounts(ready=1, starting=1)) == 2  # it starts: no time counts
    assert driver.tick(HELD, 9) == 2
    assert driver.tick(HELD, 3) == 3
    assert driver.tick(HELD, 100) == 3
    assert "3 is max_engines" in driver.decision.reason


def test_the_defaults_leave_the_search_for_the_capacity_its_time() -> None:
    config = InferenceConfig()
    assert 2 * SURE_S <= config.engine_confirm_s < FIRST_HOLD_S, (
        "it is looked at, and again after the way back"
    )


def test_a_bound_that_comes_and_goes_counts_for_what_it_is_more_than_it_is_not() -> None:
    driver = Driver()
    for _ in range(30):
        driver.tick(HELD)
        driver.tick(FREE)
    assert driver.state.target == 1
    for _ in range(12):
        driver.tick(HELD, 3)
        driver.tick(FREE)
    assert driver.state.target >= 2


@pytest.mark.parametrize(
    "bounds",
    [
        FREE,
        {"env": EngineBound(inference_bound=True, short=0.0)},
        {"env": EngineBound(inference_bound=False, short=9.0)},
        {"env": EngineBound(inference_bound=True, short=math.nan)},
    ],
)
def test_a_bound_that_keeps_nobody_back_is_none(bounds: Mapping[str, EngineBound]) -> None:
    driver = Driver()
    assert driver.tick(bounds, 100) == 1


def test_one_engine_ends_when_the_others_would_do_for_long() -> None:
    driver = Driver(3)
    assert driver.tick(FREE, 20, busy=1.3) == 3
    assert driver.tick(FREE, busy=1.3) == 2
    assert driver.decision.reason == "1.30 of 3 engines busy, 2 would have sufficed for 20 s"
    assert driver.tick(FREE, 100, busy=1.3) == 2  # one alone could not
    assert driver.tick(FREE, 30, busy=0.1) == 1
    assert driver.tick(FREE, 100, busy=0.0) == 1


def test_engines_that_report_no_number_are_kept() -> None:
    assert Driver(3).tick(FREE, 100, busy=math.nan) == 3


def test_one_busy_moment_begins_the_idle_time_anew() -> None:
    driver = Driver(2)
    driver.tick(FREE, 19, busy=0.1)
    driver.tick(FREE, busy=1.5)
    assert driver.tick(FREE, 19, busy=0.1) == 2
    driver.tick(HELD, busy=0.1)
    assert driver.tick(FREE, 19, busy=0.1) == 2
    assert driver.tick(FREE, busy=0.1) == 1


def test_silence_holds_and_a_pause_of_the_orchestrator_confirms_nothing() -> None:
    driver = Driver()
    driver.tick(HELD, 9)
    driver.tick({}, 1)
    assert driver.decision.reason == "hold: no update on the workers"
    assert driver.tick(HELD, 9) == 1
    driver.now += 500.0
    assert driver.tick(HELD, 1) == 2  # of the pause, three seconds at most
    idle = Driver(2)
    idle.tick(FREE, 1, busy=0.0)
    idle.now += 500.0
    assert idle.tick(FREE, 2, busy=0.0) == 2


def test_an_engine_that_was_given_up_is_not_tried_under_another_name() -> None:
    driver = Driver()
    assert driver.tick(HELD, 100, crew=WorkerCounts(ready=1, failed=1), failure="crashed 5 times") == 1
    assert driver.decision.reason == "hold: an engine was given up: crashed 5 times"


def test_an_operators_number_holds_within_the_bounds() -> None:
    driver = Driver()
    assert driver.tick({}, wanted=2) == 2
    assert driver.decision.reason == "pinned to 2"
    assert driver.tick(HELD, 100, wanted=2) == 2
    assert driver.tick(HELD, wanted=9) == 3
    assert driver.decision.reason == "pinned to 9; 1 to 3 allowed"
    assert driver.tick(HELD, wanted=0) == 1


BOUNDS = st.dictionaries(
    st.sampled_from(["a", "b"]), st.builds(EngineBound, st.booleans(), st.floats(allow_nan=True))
)
SAMPLES = st.builds(
    PoolSample,
    st.builds(WorkerCounts, *[st.integers(0, 3)] * 4),
    BOUNDS,
    st.floats(allow_nan=True),
    st.none() | st.integers(0, 1 << 62),
)


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 9),
    st.lists(st.tuples(SAMPLES, st.floats(0.0, 1e6)), max_size=40),
)
def test_the_bounds_hold_whatever_is_seen(
    least: int, more: int, alive: int, seen: list[tuple[PoolSample, float]]
) -> None:
    rule = EngineScalingRule(least, least + more, 3.0, 5.0)
    state, now = rule.initial(alive), 0.0
    for sample, pause_s in seen:
        now += pause_s
        before: PoolState = state
        state, decision = rule.decide(state, sample, now)
        assert least <= decision.target <= least + more
        assert decision.target == state.target
        assert decision.reason
        if sample.wanted is None:
            assert abs(state.target - before.target) <= 1
        if not sample.bounds and sample.wanted is None:
            assert state.target == before.target


def test_an_engine_that_a_cluster_has_no_room_for_leads_to_no_further_one() -> None:
    driver = Driver()
    assert driver.tick(HELD, 11) == 2
    alone = WorkerCounts(ready=1)
    assert driver.tick(HELD, 30, crew=alone, no_room="no_room: it needs 1 CPU") == 2
    assert driver.decision.reason == "hold: inference_bound: env short of 2.5 workers; an engine is missing"
    assert driver.tick(FREE, 20, busy=0.1, crew=alone, no_room="no_room: it needs 1 CPU") == 1
