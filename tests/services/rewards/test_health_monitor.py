"""The running monitor: findings begin, last and end; per environment, over resumes and restarts."""

import random
from typing import Any

import msgspec
import pytest
from tests.services.rewards.test_health import scored

from rolloutmq.bus.encoding import codec
from rolloutmq.schemas.config.rewards import HealthConfig
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.wire.control import StepDone, StepSkipped
from rolloutmq.schemas.wire.health import HealthFinding, LaneScores
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.rewards.health_monitor import FORGOTTEN_WINDOWS, HealthMonitor
from rolloutmq.services.telemetry.recorder import line_of

WINDOW = 4
CONFIG = HealthConfig(window_steps=WINDOW)
ALIVE, FLAT = [0.0, 0.5, 1.0], [0.5, 0.5, 0.5]


def of(env: str, *groups: list[float]) -> LaneScores:
    return msgspec.structs.replace(scored(*groups), env=env)


def step(number: int, *lanes: LaneScores, **extra: float) -> StepDone:
    return StepDone(
        run="r",
        incarnation=0,
        step=number,
        at=0.0,
        reward=0.5,
        loss=0.0,
        tokens=10,
        groups=10,
        filtered=0,
        staleness_max=0,
        staleness_mean=0.0,
        pull_s=0.0,
        step_s=0.0,
        extra=extra,
        scores=lanes,
    )


def skipped(after: int, *lanes: LaneScores, rejected: int = 0, incarnation: int = 0) -> StepSkipped:
    """Return a batch without a signal after a step."""
    return StepSkipped(
        run="r",
        incarnation=incarnation,
        step=after,
        at=0.0,
        reason="why",
        groups=10,
        filtered=10 - rejected,
        rejected=rejected,
        scores=lanes,
    )


def told(found: list[HealthFinding]) -> list[tuple[str, str, bool]]:
    return [(one.env, one.finding, one.ended) for one in found]


def fed(
    monitor: HealthMonitor, numbers: range, *lanes: LaneScores, **extra: float
) -> list[tuple[str, str, bool]]:
    return [one for number in numbers for one in told(monitor.feed(step(number, *lanes, **extra), 7.0))]


def test_a_finding_begins_with_a_full_window_is_repeated_and_ends() -> None:
    monitor = HealthMonitor(CONFIG)
    assert fed(monitor, range(1, WINDOW), of("math", FLAT)) == []
    (found,) = monitor.feed(step(WINDOW, of("math", FLAT)), 7.0)
    assert (found.env, found.finding, found.at, found.ended) == ("math", "collapse", 7.0, False)
    assert found.problem
    assert found.remedy
    assert found.numbers["flat"] == 1.0
    assert fed(monitor, range(5, 5 + WINDOW - 1), of("math", FLAT)) == []
    assert fed(monitor, range(8, 9), of("math", FLAT)) == [
        ("math", "collapse", False)
    ]  # again, if it was lost
    assert fed(monitor, range(9, 9 + WINDOW), of("math", ALIVE)) == [("math", "collapse", True)]


def test_a_finding_near_its_limit_begins_once_and_ends_once() -> None:
    monitor, high, below = HealthMonitor(CONFIG), of("math", [1.0] * 96 + [0.0] * 4), [0.0] * 6 + [1.0] * 94
    found = fed(monitor, range(1, 1 + WINDOW), high)
    for number in range(5, 45):  # the window is now above 95 %, now below it, now without any other score
        lane = (high, of("math", below), of("math", [1.0] * 100))[number // WINDOW % 3]
        found += [one for one in told(monitor.feed(step(number, lane), 0.0)) if one[1] == "saturation"]
    assert set(found) == {("math", "saturation", False)}
    end = fed(monitor, range(45, 45 + WINDOW), of("math", [1.0] * 70 + [0.0] * 30))
    assert ("math", "saturation", True) in end
    assert fed(monitor, range(50, 50 + WINDOW), of("math", below)) == [], (
        "the limit to begin is as configured"
    )


def test_environments_are_checked_apart() -> None:
    monitor = HealthMonitor(CONFIG)
    found = fed(monitor, range(1, 1 + WINDOW), of("math", FLAT), of("code", ALIVE))
    assert found == [("math", "collapse", False)]
    # One that is in every other batch only has its own window of steps.
    for number in range(10, 30):
        lanes = [of("code", ALIVE), *([of("rare", FLAT)] if number % 2 else [])]
        found = told(monitor.feed(step(number, *lanes), 7.0))
        if ("rare", "collapse", False) in found:
            break
    assert number == 17


@pytest.mark.parametrize("gap", [3, 10])
def test_an_environment_in_few_batches_has_windows_of_its_own_batches(gap: int) -> None:
    monitor = HealthMonitor(CONFIG)
    high, low = of("rare", *[[0.9, 1.0]] * 8), of("rare", *[[0.1, 0.2]] * 8)
    found = []
    for number in range(1, 2 * WINDOW * gap + 1):
        rare = [high if number <= WINDOW * gap else low] if number % gap == 0 else []
        found += [(number, *one) for one in told(monitor.feed(step(number, of("math", ALIVE), *rare), 7.0))]
    assert found == [(2 * WINDOW * gap, "rare", "drift", False)]


def test_a_finding_rests_between_the_batches_of_its_environment_and_ends_when_that_is_gone() -> None:
    monitor = HealthMonitor(CONFIG)
    assert fed(monitor, range(1, 1 + WINDOW), of("gone", FLAT)) == [("gone", "collapse", False)]
    quiet = FORGOTTEN_WINDOWS * WINDOW
    assert fed(monitor, range(5, 5 + quiet), of("math", ALIVE)) == []
    assert fed(monitor, range(5 + quiet, 6 + quiet), of("math", ALIVE)) == [("gone", "collapse", True)]


def test_a_resumed_trainer_replaces_the_lost_steps_of_rare_environments_too() -> None:
    monitor = HealthMonitor(CONFIG)
    for number in range(1, 10):  # the batches 3, 6 and 9; the trainer lost those after step 4
        monitor.feed(step(number, *([of("rare", FLAT)] if number % 3 == 0 else [])), 0.0)
    found = [
        (number, *one)
        for number in range(5, 16)
        for one in told(monitor.feed(step(number, *([of("rare", FLAT)] if number % 3 == 0 else [])), 0.0))
    ]
    assert found == [(12, "rare", "collapse", False)]


def test_drift_compares_two_windows() -> None:
    monitor = HealthMonitor(CONFIG)
    high, low = of("math", *[[0.9, 1.0]] * 8), of("math", *[[0.1, 0.2]] * 8)
    assert fed(monitor, range(1, 1 + WINDOW), high) == []
    assert fed(monitor, range(5, 5 + WINDOW), low) == [("math", "drift", False)]
    assert fed(monitor, range(9, 9 + WINDOW), low) == [("math", "drift", True)]


@pytest.mark.parametrize(("flat", "found"), [(0.9, False), (0.99, True), (0.999, True)])
def test_collapse_counts_batches_without_a_signal_at_the_default_limits(flat: float, found: bool) -> None:
    """Each step has a group with a signal, of 16: the flat ones of the steps alone never reach 95 %."""
    monitor, rng, steps, names = HealthMonitor(HealthConfig()), random.Random(1), 0, set()
    for _ in range(400):
        groups = [[0.0] * 4 if rng.random() < flat else [0.0, 0.0, 0.0, 1.0] for _ in range(16)]
        signal = any(len(set(group)) > 1 for group in groups)
        steps += signal
        lane = of("math", *groups)
        batch = step(steps, lane) if signal else skipped(steps, lane)
        names |= {one.finding for one in monitor.feed(batch, 0.0)}
    assert ("collapse" in names) is found


def test_a_run_without_any_step_is_checked() -> None:
    monitor = HealthMonitor(CONFIG)
    found = [told(monitor.feed(skipped(0, of("math", FLAT)), 0.0)) for _ in range(WINDOW)]
    assert found == [[], [], [], [("math", "collapse", False), ("trainer", "filtering", False)]]


def test_filtering_tells_the_share_of_each_rule() -> None:
    monitor = HealthMonitor(CONFIG)
    found = []
    for number in range(1, 1 + WINDOW):  # of 10 groups 8 are filtered, 5 of them with equal scores
        half = msgspec.structs.replace(of("math", ALIVE), groups=10, flat=5)
        found += monitor.feed(msgspec.structs.replace(step(number, half, too_old=2.0), filtered=8), 0.0)
    (one,) = found
    assert (one.env, one.finding) == ("trainer", "filtering")
    assert one.problem == (
        "80% of the groups were filtered: 50% equal scores, 20% older than trainer.loss.correction.max_staleness, "
        "10% a rule of the trainer's own"
    )
    assert one.remedy.startswith("choose tasks at the edge")
    assert one.numbers == {"groups": 40.0, "flat": 20.0, "too_old": 8.0, "other": 4.0}
    ends = fed(monitor, range(5, 5 + WINDOW))
    assert ends == [("trainer", "filtering", True)]


def test_filtering_counts_a_group_under_one_rule_alone() -> None:
    """All groups have equal scores, and some are too old as well: those, the trainer has filtered as too old."""
    monitor = HealthMonitor(CONFIG)
    flat = msgspec.structs.replace(of("math", ALIVE), groups=16, flat=16)
    found = []
    for number in range(1, 1 + WINDOW):
        half = msgspec.structs.replace(step(number, flat, too_old=8.0), groups=16, filtered=14)
        found += [one for one in monitor.feed(half, 0.0) if one.finding == "filtering"]
    (one,) = found
    assert one.numbers == {"groups": 64.0, "too_old": 32.0, "flat": 24.0}
    assert one.problem.startswith("88% of the groups were filtered: 50% older than")


def test_flat_groups_that_are_too_old_for_the_loss_count_as_too_old() -> None:
    monitor = HealthMonitor(CONFIG)
    why = "its groups are older than trainer.loss.correction.max_staleness"
    skip = msgspec.structs.replace(skipped(0, of("math", FLAT)), reason=why)
    found = [one for _ in range(WINDOW) for one in monitor.feed(skip, 0.0) if one.finding == "filtering"]
    assert "filtered: 100% older than trainer.loss" in found[0].problem


def test_filtering_of_batches_without_a_step_takes_the_rule_from_their_reason() -> None:
    monitor = HealthMonitor(CONFIG)
    why = "its groups are older than trainer.loss.correction.max_staleness"
    for number in range(WINDOW):
        found = monitor.feed(msgspec.structs.replace(skipped(0), reason=why), float(number))
    (one,) = found
    assert "100% older than trainer.loss" in one.problem


def learning(number: int, *groups: list[float], filtered: int) -> StepDone:
    """Return a step on one environment whose score 1 passes."""
    return msgspec.structs.replace(step(number, of("math", *groups)), groups=len(groups), filtered=filtered)


def passes(env: str, score: float) -> bool:
    return env == "math" and score == 1.0


def test_a_policy_that_has_learned_its_tasks_is_no_problem() -> None:
    """Most groups are filtered then, since all answers are right: it had the findings `filtering` and `saturation`."""
    monitor, right, mixed = HealthMonitor(CONFIG, passes), [1.0] * 8, [1.0] * 6 + [0.0] * 2
    found = []
    for number in range(1, 1 + WINDOW):  # 80 % filtered, 95 % right
        found += told(monitor.feed(learning(number, *[right] * 8, mixed, mixed, filtered=8), 0.0))
    assert found == [("math", "solved", False)]
    for number in range(1 + WINDOW, 1 + 2 * WINDOW):  # nothing is left to learn
        found += told(monitor.feed(learning(number, *[right] * 10, filtered=10), 0.0))
    assert set(found) == {("math", "solved", False)}


def test_groups_of_wrong_answers_are_filtering_until_they_are_a_collapse() -> None:
    """One cause is one finding."""
    monitor, wrong, alive = HealthMonitor(CONFIG, passes), [0.0] * 8, [0.0, 1.0] * 4
    found = []
    for number in range(1, 1 + WINDOW):
        found += told(monitor.feed(learning(number, *[wrong] * 8, alive, alive, filtered=8), 0.0))
    assert found == [("trainer", "filtering", False)]
    for number in range(1 + WINDOW, 1 + 2 * WINDOW):
        found += told(monitor.feed(learning(number, *[wrong] * 10, filtered=10), 0.0))
    assert ("trainer", "filtering", True) in found
    assert ("math", "collapse", False) in found
    assert ("math", "collapse", True) not in found


def findings(*groups: list[float], filtered: int) -> set[tuple[str, str]]:
    monitor, found = HealthMonitor(CONFIG, passes), []
    for number in range(1, 1 + WINDOW):
        found += told(monitor.feed(learning(number, *groups, filtered=filtered), 0.0))
    return {(env, name) for env, name, _ in found}


RIGHT, WRONG, MIXED = [1.0] * 8, [0.0] * 8, [0.0, 1.0] * 4


@pytest.mark.parametrize("solved", [1, 5, 9])
def test_a_run_that_learns_nothing_is_found_however_many_tasks_are_solved(solved: int) -> None:
    """The others are never solved, so all groups have equal scores."""
    groups = [RIGHT] * solved + [WRONG] * (10 - solved)
    assert findings(*groups, filtered=10) == {("math", "collapse")}


def test_solved_groups_hide_no_filtering_of_the_others() -> None:
    groups = [*[RIGHT] * 10, *[WRONG] * 8, MIXED, MIXED]  # of the 10 unsolved groups 8 are filtered
    assert findings(*groups, filtered=18) == {("trainer", "filtering")}
    groups = [*[RIGHT] * 10, *[WRONG] * 4, *[MIXED] * 6]
    assert findings(*groups, filtered=14) == set()


def test_filtering_is_of_the_groups_that_are_not_solved() -> None:
    """The sums tell at least how many are solved, so some of the solved ones count among the others."""
    monitor = HealthMonitor(CONFIG, passes)
    for number in range(1, 1 + WINDOW):  # of 10 groups 5 are solved, and the others too old
        half = step(number, of("math", *[RIGHT] * 5, *[[0.5, *RIGHT[1:]]] * 5), too_old=5.0)
        found = monitor.feed(msgspec.structs.replace(half, filtered=10), 0.0)
    (one,) = found
    assert one.problem.startswith("100% of the groups that are not solved were filtered: 89% older than")
    assert one.numbers == {"groups": 22.5, "too_old": 20.0, "flat": 2.5}


def test_a_few_tasks_never_solved_are_no_trouble_of_a_policy_that_has_learned_the_others() -> None:
    assert findings(*[RIGHT] * 39, WRONG, filtered=40) == {("math", "solved")}


def test_filtering_for_another_reason_is_told_beside_a_collapse() -> None:
    monitor, found = HealthMonitor(CONFIG, passes), []
    for number in range(1, 1 + WINDOW):
        old = of("code", *[[0.0, 1.0]] * 10)
        lanes = step(number, of("math", *[[0.0] * 8] * 2), old, too_old=10.0)
        found += monitor.feed(msgspec.structs.replace(lanes, groups=12, filtered=12), 0.0)
    assert {(one.env, one.finding) for one in found} == {("math", "collapse"), ("trainer", "filtering")}
    (filtering,) = [one for one in found if one.finding == "filtering"]
    assert filtering.numbers == {"groups": 48.0, "too_old": 40.0, "flat": 8.0}


def test_rejection_counts_batches_rejected_whole() -> None:
    monitor = HealthMonitor(CONFIG)
    assert fed(monitor, range(1, 4), rejected=0.0) == []
    (found,) = monitor.feed(skipped(3, rejected=10), 0.0)
    assert (found.env, found.finding) == ("trainer", "rejection")
    assert found.numbers == {"rejected": 10.0, "groups": 40.0}
    assert fed(monitor, range(4, 7), rejected=0.0) == []
    assert fed(monitor, range(7, 8), rejected=0.0) == [("trainer", "rejection", True)]


def test_figures_of_the_trainer_are_of_its_steps() -> None:
    monitor = HealthMonitor(CONFIG)
    found = []
    for number in range(1, 1 + WINDOW):
        found += told(monitor.feed(step(number, of("math", ALIVE), clipped=0.9), 0.0))
        found += told(monitor.feed(skipped(number, of("math", ALIVE)), 0.0))
    assert found == [("trainer", "clipping", False)]
    later = [one for _ in range(WINDOW - 2) for one in told(monitor.feed(skipped(WINDOW), 0.0))]
    assert [one for one in later if one[1] != "filtering"] == []


@pytest.mark.parametrize("first", ["skip", "step"])
def test_a_resumed_trainer_replaces_the_batches_without_a_signal_that_no_step_covers(first: str) -> None:
    """From step 1 the broker delivers the batch before it no more, and both batches after it again."""
    flat, monitor = of("math", FLAT), HealthMonitor(CONFIG)
    lost: list[StepDone | StepSkipped] = [
        skipped(0, flat),
        step(1),
        skipped(1, flat),
        step(2),
        skipped(2, flat),
    ]
    for batch in lost:
        monitor.feed(batch, 0.0)
    again = msgspec.structs.replace(step(2, flat), incarnation=1)
    resumed: list[StepDone | StepSkipped] = [skipped(1, flat, incarnation=1), again]
    if first == "step":  # the groups of that batch were discarded
        del resumed[0]
    while len(resumed) < WINDOW - 1:
        resumed.append(skipped(2, flat, incarnation=1))
    found = [told(monitor.feed(batch, 0.0)) for batch in resumed]
    assert found == [[], [], [("math", "collapse", False)]]


def test_figures_of_the_trainer_have_its_name() -> None:
    monitor = HealthMonitor(CONFIG)
    found = fed(monitor, range(1, 1 + WINDOW), of("math", ALIVE), clipped=0.9, kl=1.0, rejected=5.0)
    assert found == [("trainer", name, False) for name in ("clipping", "precision", "rejection")]


def test_a_resumed_trainer_replaces_its_lost_steps() -> None:
    monitor, unkilled = HealthMonitor(CONFIG), HealthMonitor(CONFIG)
    lanes = {number: of("math", FLAT if number > 3 else ALIVE) for number in range(1, 12)}
    for number in (1, 2, 3, 4, 5, 6):
        monitor.feed(step(number, of("math", ALIVE)), 0.0)
    for number in range(1, 12):
        expected = told(unkilled.feed(step(number, lanes[number]), 0.0))
        if number > 3:  # the trainer continues from the checkpoint after step 3
            assert told(monitor.feed(step(number, lanes[number]), 0.0)) == expected


def test_a_restarted_monitor_continues_from_the_record() -> None:
    unkilled, lines = HealthMonitor(CONFIG), []
    for number in range(1, 7):
        for one in (step(number, of("math", FLAT), rejected=1.0), skipped(number, of("math", ALIVE))):
            unkilled.feed(one, 0.0)
            lines.append(line_of(b"any", one, 1.0))
    lines += [b'{"kind":"step_done", torn', b"\xff\xfe\n", b'{"kind":"pressure"}\n', lines[0][:40] + b"\n"]
    restarted = HealthMonitor(CONFIG)
    restarted.replay(lines)
    for number in range(7, 20):
        one = step(number, of("math", FLAT if number < 10 else ALIVE))
        assert told(restarted.feed(one, 0.0)) == told(unkilled.feed(one, 0.0)), number


@pytest.mark.parametrize("broken", [{"sequences": 0}, {"groups": 0}, {"m2": -1.0}])
def test_impossible_sums_do_not_reach_it(broken: dict[str, Any]) -> None:
    lane = msgspec.structs.replace(of("math", ALIVE), **broken)
    with pytest.raises(WireError):
        codec.decode_event(codec.encode(step(1, lane)))


def test_extreme_sums_are_judged_without_an_error() -> None:
    most = 1.7976931348623157e308
    monitor = HealthMonitor(CONFIG)
    wild = msgspec.structs.replace(
        of("math", ALIVE), mean=most, m2=most, low=-most, high=most, sxx=most, syy=most, sxy=-most
    )
    calm = of("math", ALIVE)
    for number in range(1, 30):
        for found in monitor.feed(step(number, (calm, wild)[number // 5 % 2]), 0.0):
            assert codec.decode_event(codec.encode(found)) == found


def settled(number: int, *lanes: LaneScores, rejected: int = 0, stepped: bool = True) -> BatchSettled:
    """Return the broker's report of a batch."""
    return BatchSettled(
        run="r",
        incarnation=0,
        step=number,
        at=0.0,
        stepped=stepped,
        reward=0.0,
        sequences=40,
        tokens=100,
        trained=10 - rejected,
        filtered=0,
        rejected=rejected,
        staleness_max=0,
        staleness_mean=0.0,
        scores=lanes,
    )


def logged(number: int, **figures: float) -> StepFigures:
    return StepFigures(run="r", incarnation=0, step=number, at=0.0, figures=figures)


def test_a_trainer_that_reports_nothing_is_checked_by_what_the_broker_knows() -> None:
    monitor = HealthMonitor(CONFIG)
    found = [
        one
        for number in range(1, 1 + WINDOW)
        for one in told(monitor.feed(settled(number, of("math", FLAT), rejected=9), 7.0))
    ]
    assert found == [("math", "collapse", False), ("trainer", "rejection", False)]


def test_the_reports_of_a_trainer_replace_those_of_the_broker() -> None:
    monitor = HealthMonitor(CONFIG)
    found = []
    for number in range(1, 2 * WINDOW):
        found += told(monitor.feed(settled(number, of("math", FLAT)), 7.0))
        found += told(monitor.feed(step(number, of("math", FLAT)), 7.0))
    assert found == [("math", "collapse", False)], (
        "a window is full after as many batches as without the broker"
    )


@pytest.mark.parametrize("first", ["figures", "batch"])
def test_logged_figures_are_checked_in_either_order(first: str) -> None:
    monitor = HealthMonitor(CONFIG)
    found = []
    for number in range(1, 2 + WINDOW):
        if first == "figures":
            monitor.take_figures(logged(number, clipped=1.0, ratio=2.0))
        found += told(monitor.feed(settled(number, of("math", ALIVE)), 7.0))
        if first == "batch":
            monitor.take_figures(logged(number, clipped=1.0, ratio=2.0))
    assert found == [("trainer", "clipping", False)]


def test_a_record_of_the_broker_is_replayed() -> None:
    before, again = HealthMonitor(CONFIG), HealthMonitor(CONFIG)
    lines = []
    for number in range(1, WINDOW):
        lines.append(line_of(b"telemetry", logged(number, clipped=1.0), 0.0))
        lines.append(line_of(b"telemetry", settled(number, of("math", FLAT)), 0.0))
        before.take_figures(logged(number, clipped=1.0))
        before.feed(settled(number, of("math", FLAT)), 0.0)
    again.replay(lines)
    next_one = settled(WINDOW, of("math", FLAT))
    assert told(again.feed(next_one, 0.0)) == told(before.feed(next_one, 0.0)) != []
