from dataclasses import replace
from typing import Any

import pytest

from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.autoscaling.control_law import PressureController
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, PressureSample
from rolloutmq.services.orchestrator.simulation.baselines import PidRule, RatioRule
from rolloutmq.services.orchestrator.simulation.scenarios import (
    STARTS_S,
    all_scenarios,
    ramp,
    square,
    steps,
    trace,
)
from rolloutmq.services.orchestrator.simulation.trial import Scenario, try_out
from rolloutmq.services.orchestrator.simulation.verdict import judged


def ours(one: Scenario) -> PressureController:
    return PressureController(one.min_workers, one.max_workers, ScalingConfig())


def scenario(name: str, start_s: float = 20.0) -> Scenario:
    return next(one for one in all_scenarios(start_s) if one.name == name)


class Script:
    """A law that does as it is told, by tick, and keeps what it saw."""

    def __init__(self, targets: dict[int, int]) -> None:
        self.targets = targets
        self.seen: list[tuple[float, PressureSample]] = []
        self.begun = 0

    def initial(self, workers: int) -> int:
        self.begun += 1
        return workers

    def decide(self, state: int, sample: PressureSample, now: float) -> tuple[int, Decision]:
        self.seen.append((now, sample))
        target = self.targets.get(len(self.seen), state)
        return target, Decision(target, "as told")


def test_what_happens_is_counted() -> None:
    script = Script({10: 5, 20: 3, 30: 8, 40: 300, 50: 1})
    out = try_out(replace(scenario("step"), lasts_s=100.0, changes=(0.0,)), lambda _: script, 0)
    assert (out.peak, out.actions, out.flips) == (300, 5, 3)
    assert out.moves == 4 + 2 + 5 + 292 + 299
    assert out.outside == 10


@pytest.mark.parametrize(("name", "least"), [("loss 50 %", 200), ("dark 60 s", 55)])
def test_lost_news_are_old_news(name: str, least: int) -> None:
    script = Script({})
    try_out(replace(scenario(name), lasts_s=700.0, changes=(0.0,)), lambda _: script, 0)
    stale = [now - sample.heard_at for now, sample in script.seen if now > sample.heard_at]
    assert len(stale) >= least
    assert max(stale) == pytest.approx(60.0, abs=1.0) if name == "dark 60 s" else max(stale) < 20.0


def test_a_restart_begins_anew_and_a_jump_moves_the_clock() -> None:
    script = Script({})
    try_out(replace(scenario("restart"), lasts_s=702.0, changes=(0.0,)), lambda _: script, 0)
    assert script.begun == 2
    jumped = Script({})
    try_out(replace(scenario("clock jump"), lasts_s=702.0, changes=(0.0,)), lambda _: jumped, 0)
    assert jumped.seen[-1][0] > 4000.0


def test_demands() -> None:
    assert [steps((0.0, 1.0), (10.0, 2.0))(at) for at in (-1.0, 0.0, 9.9, 10.0, 99.0)] == [1, 1, 1, 2, 2]
    assert [ramp(10.0, 20.0, 1.0, 3.0)(at) for at in (0.0, 15.0, 30.0)] == [1.0, 2.0, 3.0]
    assert [square(10.0, 1.0, 2.0)(at) for at in (5.0, 15.0, 25.0)] == [1.0, 2.0, 1.0]
    assert trace([(0.0, 4.0), (5.0, 8.0)])(6.0) == 8.0


@pytest.mark.parametrize(
    "start_s",
    [pytest.param(one, marks=[pytest.mark.extended] if one != 20.0 else []) for one in STARTS_S],
)
@pytest.mark.parametrize("name", [one.name for one in all_scenarios(20.0)])
def test_the_law_keeps_its_bounds(name: str, start_s: float) -> None:
    """The time to settle is promised for starts of 20 s."""
    one = scenario(name, start_s)
    verdict = judged(one, "rolloutmq", [try_out(one, ours, seed) for seed in range(3)])
    assert set(verdict.broken) <= (set() if start_s == 20.0 else {"settle"})


def test_a_shared_server_is_not_run_against() -> None:
    one = scenario("shared")
    out = try_out(one, ours, 1)
    assert out.peak <= 24, "twenty are of use, two hundred allowed"


@pytest.mark.parametrize("law", [RatioRule, PidRule])
def test_the_usual_laws_break_them(law: Any) -> None:
    one = scenario("step")
    outcomes = [try_out(one, lambda s: law(s.min_workers, s.max_workers, 5.0), seed) for seed in range(2)]
    broken = judged(one, "rival", outcomes).broken
    assert {"peak", "moves"} & set(broken)
    assert "bounds" not in broken
