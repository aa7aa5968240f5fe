"""Ensembles: missing ratings by policy, agreement that acts, scales over the shared window, refused settings."""

import asyncio
import contextvars
import fcntl
import logging
import os
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq import ConfigError, Ensemble, RatersMissingError, SingleTurn, UnusablePathError, UsageError
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.rewards import ensemble as ensemble_module
from rolloutmq.services.rewards.calls import RaterFaultError
from rolloutmq.services.rewards.raters import EVALUATING
from rolloutmq.services.worker.scripted import ScriptedPolicy, play
from rolloutmq.services.worker.trajectory import Trajectory, group_of
from rolloutmq.trainer.step.advantages import study
from rolloutmq.trainer.step.collate import Bounds
from rolloutmq.trainer.step.overrides import find_fault, zeroed


def same(_task: Any, answer: Any) -> float:
    return float(answer)


def negated(_task: Any, answer: Any) -> float:
    return -3.0 * float(answer)


def asked_by(task: Any, answer: Any, *, by: float) -> float:
    del task
    return by * float(answer)


def one_argument(answer: Any) -> float:
    return float(answer)


def three_arguments(task: Any, answer: Any, more: Any) -> float:
    return asked_by(task, answer, by=more)


class Flaky:
    """Rates only the answers it is told to; records how often it was asked."""

    def __init__(self, fails: Callable[[Any], bool]) -> None:
        self.fails = fails
        self.asked = 0

    def __call__(self, _task: Any, answer: Any) -> float:
        self.asked += 1
        if self.fails(answer):
            raise ValueError("judge is down")
        return float(answer)


@pytest.fixture
def findings() -> list[HealthFinding]:
    return []


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble_module, "HOLD_PAUSE_S", 0.001)


def told(findings: list[HealthFinding]) -> list[tuple[str, bool]]:
    return [(one.finding, one.ended) for one in findings]


async def test_ratings_become_scores_and_keep_their_columns() -> None:
    found = await Ensemble({"a": same, "b": negated}, weights={"a": 3.0}).rate("task", [0.0, 1.0, 2.0])
    assert found.names == ("a", "b")
    assert found.ratings.tolist() == [[0.0, 0.0], [1.0, -3.0], [2.0, -6.0]]
    assert found.scores == (0.0, 0.0, 0.0)
    assert found.weights == (3.0, 1.0)
    assert found.reasons == ("", "", "")


async def test_a_rater_that_fails_in_the_middle_of_a_group_is_missing_there_and_no_zero() -> None:
    flaky = Flaky(lambda answer: answer == 2.0)
    found = await Ensemble({"a": same, "flaky": flaky}).rate(None, [1.0, 2.0, 3.0])
    assert found.scores == (1.0, 2.0, 3.0)
    assert isnan(found.ratings[1, 1])
    assert not np.isnan(found.ratings[[0, 2]]).any()


async def test_too_few_ratings_fail_the_rollout(findings: list[HealthFinding]) -> None:
    ensemble = Ensemble(
        {"a": same, "flaky": Flaky(lambda answer: answer == 2.0)}, min_raters=2, on_finding=findings.append
    )
    with pytest.raises(
        RatersMissingError, match=r"too few ratings of an answer \(got 1, min_raters 2\): flaky: V"
    ):
        await ensemble.rate(None, [1.0, 2.0])
    assert told(findings) == [("raters_missing", False)]
    assert findings[0].numbers == {"answers": 1.0}
    with pytest.raises(RatersMissingError, match=r"got 0, min_raters 1"):
        await Ensemble({"none": Flaky(lambda _: True)}, on_finding=findings.append).rate(None, [1.0])


async def test_what_the_raters_raised_is_the_cause_and_goes_with_the_next_rating() -> None:
    flaky = Flaky(lambda answer: answer == 2.0)
    ensemble = Ensemble({"none": lambda _task, _answer: None, "nan": lambda *_: float("nan"), "flaky": flaky})
    with pytest.raises(RatersMissingError) as caught:
        await ensemble.rate(None, [2.0])
    cause = caught.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    nan_, raised = cause.exceptions
    assert isinstance(nan_, RaterFaultError)
    assert str(nan_) == "returned no finite number (float nan)"
    assert isinstance(raised, ValueError)
    assert raised.__traceback__ is not None
    assert ensemble.faults() == {"nan": nan_, "flaky": raised}
    await ensemble.rate(None, [3.0])
    assert [*ensemble.faults()] == ["nan"]


async def test_a_group_is_held_until_its_raters_are_back(findings: list[HealthFinding]) -> None:
    flaky = Flaky(lambda _: flaky.asked < 7)
    steady = Flaky(lambda _: False)
    ensemble = Ensemble(
        {"steady": steady, "flaky": flaky}, missing="hold", min_raters=2, on_finding=findings.append
    )
    found = await ensemble.rate(None, [1.0, 2.0])
    assert found.scores == (1.0, 2.0)
    assert steady.asked == 2  # only what is missing is asked again
    assert told(findings) == [("raters_missing", False), ("raters_missing", True)]


async def test_holding_has_an_end(findings: list[HealthFinding]) -> None:
    ensemble = Ensemble({"a": Flaky(lambda _: True)}, missing="hold", hold_s=0.05, on_finding=findings.append)
    with pytest.raises(RatersMissingError):
        await ensemble.rate(None, [1.0])


async def test_an_answer_without_ratings_is_filtered_with_the_reason(findings: list[HealthFinding]) -> None:
    ensemble = Ensemble(
        {"flaky": Flaky(lambda answer: answer == 2.0)}, missing="filter", on_finding=findings.append
    )
    found = await ensemble.rate(None, [1.0, 2.0, 6.0])
    assert found.scores == (1.0, 3.5, 6.0)  # the mean of the others: it shifts no comparison
    assert found.reasons == ("", "fewer than 1 raters gave a rating", "")
    assert told(findings) == [("raters_missing", False)]
    with pytest.raises(RatersMissingError):
        await ensemble.rate(None, [2.0, 2.0])  # nothing is left to send


def test_the_filtered_row_is_not_trained_on() -> None:
    """The trainer zeroes its advantage; a group that is withheld as a whole is filtered."""

    class Guess(SingleTurn[str]):
        rewards = Ensemble(
            {"flaky": lambda _, answer: {"a": 1.0, "c": 0.5}[answer.text]},
            missing="filter",
            on_finding=lambda _: None,
        )

        def task(self, rng: Any) -> str:
            return str(rng.random())

        def prompt(self, task: str) -> str:
            return task

    group = play(Guess(), ScriptedPolicy(["a", "b", "c", "a"]))
    assert find_fault(group) == ""
    assert zeroed(group).tolist() == [False, True, False, False]
    assert group.scores.tolist() == pytest.approx([1.0, 2.5 / 3, 0.5, 1.0])
    assert np.isnan(group["ratings"][1]).all()
    assert group.columns["raters"].values == [{"flaky": 1.0}] * 4
    assert group.columns["overrides"].values[1]["reason"] == "fewer than 1 raters gave a rating"


async def test_low_agreement_down_weights_the_outlier_and_gives_the_weight_back(
    findings: list[HealthFinding],
) -> None:
    rng = np.random.default_rng(1)
    bad: list[Callable[[float], float]] = [lambda answer: -3.0 * answer]
    ensemble = Ensemble(
        {"a": same, "b": same, "bad": lambda _, answer: bad[0](answer)},
        window=64,
        agreement={"act": "down_weight", "low": 0.5, "min_items": 32},
        on_finding=findings.append,
    )
    for _ in range(4):
        found = await ensemble.rate(None, rng.random(16).tolist())
    assert found.weights == (1.0, 1.0, 0.0)
    assert found.scores == tuple(found.ratings[:, 0])
    assert told(findings) == [("low_agreement", False), ("down_weight", False)]
    assert findings[1].problem.startswith("without bad the others agree")
    assert findings[1].numbers["weight"] == 0.0
    assert findings[1].numbers["alpha_without.bad"] == pytest.approx(1.0)
    assert findings[1].numbers["alpha"] < 0.5
    bad[0] = lambda answer: answer
    for _ in range(5):
        found = await ensemble.rate(None, rng.random(16).tolist())
    assert found.weights == (1.0, 1.0, 1.0)
    assert told(findings)[2:] == [("low_agreement", True), ("down_weight", True)]


@pytest.mark.parametrize("scale", ["none", "rank", "zscore"])
async def test_down_weighting_learns_from_the_honest_raters_on_every_scale(scale: Any) -> None:
    rng = np.random.default_rng(2)
    ensemble = Ensemble(
        {"a": same, "b": same, "bad": negated},
        scale=scale,
        agreement={"act": "down_weight", "low": 0.5},
        on_finding=lambda _: None,
    )
    for _ in range(8):
        answers = rng.random(16)
        found = await ensemble.rate(None, answers.tolist())
    assert np.corrcoef(found.scores, answers)[0, 1] == pytest.approx(1.0, abs=0.01)


async def test_low_agreement_withholds_groups(findings: list[HealthFinding]) -> None:
    rng = np.random.default_rng(3)
    ensemble = Ensemble(
        {"a": same, "b": negated},
        agreement={"act": "hold", "low": 0.5, "min_items": 20},
        on_finding=findings.append,
    )
    first = await ensemble.rate(None, rng.random(10).tolist())
    assert set(first.reasons) == {""}
    for _ in range(3):
        held = await ensemble.rate(None, rng.random(10).tolist())
    (reason,) = set(held.reasons)
    assert reason.startswith("alpha ")
    assert told(findings) == [("low_agreement", False), *[("held", False)] * 3]


async def test_the_trainer_filters_a_withheld_group_and_trains_the_others() -> None:
    ensemble = Ensemble(
        {"a": same, "b": negated},
        agreement={"act": "hold", "low": 0.5, "min_items": 12},
        on_finding=lambda _: None,
    )
    blank = Trajectory(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -1.0])
    groups = []
    for number in range(3):
        found = await ensemble.rate(None, [0.0, 0.25, 0.5, 1.0])
        groups.append(group_of(f"g{number}", found.apply([blank] * 4)))
    batch = study(groups, TrainerConfig(), Bounds(16, 16), set(), 0)
    assert [group.group_id for group in batch.trained] == ["g0", "g1"]
    assert [group.group_id for group in batch.filtered] == ["g2"]
    assert batch.rejected == []


@pytest.mark.parametrize("act", ["hold", "down_weight"])
async def test_an_evaluation_leaves_no_trace_in_the_window(
    act: Any, tmp_path: Path, findings: list[HealthFinding]
) -> None:
    ensemble = Ensemble(
        {"a": same, "b": same, "bad": negated}, scale="zscore", agreement={"act": act, "min_items": 8}
    )
    ensemble.join_run("env", "w-1", tmp_path / "window", findings.append)

    async def evaluated(answers: list[float]) -> Any:
        EVALUATING.set(True)
        return await ensemble.rate(None, answers)

    context = contextvars.copy_context()
    first = await asyncio.create_task(evaluated([0.0, 0.5, 1.0]), context=context)
    assert first.scores == pytest.approx([-first.scores[2], 0.0, first.scores[2]]), (
        "its own ratings give the scale"
    )
    assert first.scores[2] > 0
    for _ in range(4):
        await asyncio.create_task(evaluated([0.0, 0.3, 0.7, 1.0]))
    assert findings == []
    trained = await ensemble.rate(None, [0.0, 0.25, 0.75, 1.0] * 2)
    assert ensemble.judgement.alpha.items == 8
    assert told(findings)[0] == ("low_agreement", False)
    acted = len(findings)
    again = await asyncio.create_task(evaluated([0.0, 1.0]))
    assert set(again.reasons) == {""}
    assert again.weights == trained.weights, "an outlier counts in an evaluation as in training"
    assert len(findings) == acted


async def test_a_rater_that_never_rates_is_told_once_though_others_make_the_score(
    findings: list[HealthFinding],
) -> None:
    rare = Flaky(lambda answer: answer != 1.0)
    ensemble = Ensemble(
        {"a": same, "judge": Flaky(lambda _: True), "shy": lambda _task, _answer: None, "rare": rare},
        on_finding=findings.append,
    )
    for _ in range(3):
        await ensemble.rate(None, [1.0] + [2.0] * 31)
    assert [one.finding for one in findings] == ["rater_silent"] * 2
    judge, shy = findings
    assert judge.problem == "rater judge rated none of its first 64 answers: ValueError: judge is down"
    assert judge.remedy.startswith("repair judge or remove it")
    assert (
        shy.problem == "rater shy rated none of its first 64 answers: it has no opinion of any answer (None)"
    )
    assert (ensemble.costs()["rare"].rated, ensemble.costs()["rare"].missing) == (3, 93)


@pytest.mark.parametrize(
    ("kind", "raters", "settings"),
    [
        ("raters_missing", {"b": lambda _, answer: None if answer == 2.0 else 1.0}, {"missing": "filter"}),
        ("held", {"a": same, "c": negated}, {"agreement": {"act": "hold", "low": 0.5, "min_items": 4}}),
    ],
)
async def test_many_groups_with_the_same_finding_are_logged_once(
    kind: str, raters: dict[str, Any], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ensemble = Ensemble(raters, **settings)
    for _ in range(20):
        await ensemble.rate(None, [1.0, 2.0, 3.0, 4.0])
    (line,) = [one for one in caplog.messages if f"finding={kind} " in one]
    assert "unlogged=0" in line


def test_the_log_counts_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, now = ensemble_module.FindingLog(), [1000.0]
    monkeypatch.setattr("rolloutmq.services.rewards.ensemble.time.monotonic", lambda: now[0])
    for env in ("x", "y"):
        for _ in range(5):
            log.tell(HealthFinding(env=env, at=1.0, finding="raters_missing", problem="too few"))
    now[0] += 31.0
    log.tell(HealthFinding(env="x", at=1.0, finding="raters_missing", problem="too few"))
    assert [" unlogged=4 " in one for one in caplog.messages] == [False, False, True]
    for _ in range(2):
        log.tell(HealthFinding(env="x", at=1.0, finding="collapse", problem="half of the groups"))
    assert len(caplog.messages) == 5


async def test_low_agreement_warns_and_changes_no_score(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(4)
    ensemble = Ensemble({"a": same, "bad": negated}, agreement={"min_items": 8})
    with caplog.at_level(logging.WARNING):
        found = await ensemble.rate(None, rng.random(16).tolist())
    assert (found.weights, set(found.reasons)) == ((1.0, 1.0), {""})
    assert "finding=low_agreement" in caplog.text


async def test_scales_make_raters_of_different_units_comparable() -> None:
    ensemble = Ensemble({"unit": same, "thousand": lambda _, answer: 1000 * (1 - answer)}, scale="zscore")
    found = await ensemble.rate(None, [0.0, 0.25, 1.0])
    assert found.scores == pytest.approx([0.0, 0.0, 0.0])
    ranked = await Ensemble({"a": same, "b": negated}, scale="rank").rate(None, [0.0, 0.25, 1.0])
    assert ranked.scores == pytest.approx([0.5, 0.5, 0.5])
    assert ranked.ratings[2].tolist() == [1.0, -3.0]  # what travels is what they gave


async def test_two_workers_share_scale_and_agreement(tmp_path: Path) -> None:
    window, rng = tmp_path / "env.rewards.window", np.random.default_rng(5)

    def worker(name: str) -> Ensemble:
        made = Ensemble(
            {"a": same, "b": same, "bad": negated},
            agreement={"act": "down_weight", "low": 0.5, "min_items": 40},
        )
        made.join_run("env", name, window, lambda one: heard.append((name, one.finding, one.ended)))
        return made

    heard: list[tuple[str, str, bool]] = []
    one, other = worker("env-0"), worker("env-1")
    for turn in range(6):
        found = await (one, other)[turn % 2].rate(None, rng.random(8).tolist())
    assert found.alpha.items == 48
    assert found.weights == (1.0, 1.0, 0.0)
    assert heard == [
        ("env-0", "low_agreement", False),
        ("env-0", "down_weight", False),
    ]  # told by one of them
    later = worker("env-2")  # a restarted worker knows at once
    assert (await later.rate(None, [0.1, 0.2])).weights == (1.0, 1.0, 0.0)


async def test_a_locked_window_is_waited_for(tmp_path: Path) -> None:
    ensemble = Ensemble({"a": same})
    window = tmp_path / "env.rewards.window"
    ensemble.join_run("env", "env-0", window, lambda _: None)
    await ensemble.rate(None, [1.0])
    with window.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rating = asyncio.ensure_future(ensemble.rate(None, [2.0]))
        done, _ = await asyncio.wait({rating}, timeout=0.05)
        assert not done
    assert (await asyncio.wait_for(rating, 30)).scores == (2.0,)


async def test_a_damaged_window_is_told(tmp_path: Path, findings: list[HealthFinding]) -> None:
    window = tmp_path / "env.rewards.window"
    window.write_bytes(os.urandom(5000))
    ensemble = Ensemble({"a": same})
    ensemble.join_run("env", "env-0", window, findings.append)
    assert (await ensemble.rate(None, [1.0])).scores == (1.0,)
    assert told(findings) == [("window_restarted", False)]
    assert "its checksums fail" in findings[0].problem


async def test_a_window_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    ensemble = Ensemble({"a": same})
    ensemble.join_run("env", "env-0", tmp_path / "no" / "window", lambda _: None)
    with pytest.raises(UnusablePathError, match="rating window"):
        await ensemble.rate(None, [1.0])


@pytest.mark.parametrize("scale", ["none", "rank", "zscore"])
async def test_extreme_ratings_and_nonsense_overflow_nothing(scale: Any) -> None:
    nonsense: Any = lambda *_: "nonsense"  # noqa: E731 - no rater by its type
    ensemble = Ensemble(
        {"a": same, "b": same, "c": nonsense}, scale=scale, missing="filter", on_finding=lambda _: None
    )
    found = await ensemble.rate(None, [1e308, -1e308, nan, 1e308, 1e308, 5e-324])
    assert np.isfinite(found.scores).all()
    assert [bool(reason) for reason in found.reasons] == [False, False, True, False, False, False]
    assert np.isnan(found.ratings[:, 2]).all()


async def test_one_score_for_programs_without_groups() -> None:
    assert await Ensemble({"a": same, "b": same}).score(None, 0.5) == 0.5
    with pytest.raises(UsageError, match="`score` cannot withhold"):
        await Ensemble({"a": same}, missing="filter").score(None, 0.5)


async def test_costs_are_counted_by_rater() -> None:
    ensemble = Ensemble({"a": same, "flaky": {"rater": Flaky(lambda _: True), "retries": 1}})
    await ensemble.rate(None, [1.0, 2.0])
    costs = ensemble.costs()
    assert (costs["a"].calls, costs["a"].missing) == (2, 0)
    assert (costs["flaky"].calls, costs["flaky"].failed, costs["flaky"].missing) == (4, 4, 2)


def test_a_single_turn_scores_its_group_by_its_ensemble() -> None:
    class Echo(SingleTurn[str]):
        rewards = Ensemble({"exact": "exact", "short": {"rater": "length", "options": {"most": 2}}})

        def task(self, rng: Any) -> str:
            return str(rng.randrange(10))

        def prompt(self, task: str) -> list[dict[str, str]]:
            return [{"role": "user", "content": task}]

    group = play(Echo(), ScriptedPolicy(lambda prompt: prompt), size=3)
    assert group.scores.tolist() == [1.0] * 3
    assert [row.tolist() for row in group["ratings"]] == [[1.0, 1.0]] * 3
    assert group.columns["messages"].values[0][1]["role"] == "assistant"


def test_an_environment_without_score_and_rewards_says_so() -> None:
    class Nothing(SingleTurn[str]):
        def task(self, rng: Any) -> str:
            return str(rng.randrange(10))

        def prompt(self, task: str) -> str:
            return task

    with pytest.raises(UsageError, match="does not implement `score`, and has no `rewards`"):
        play(Nothing(), ScriptedPolicy("1"))


@pytest.mark.parametrize(
    ("settings", "path", "problem"),
    [
        ({"raters": {}}, "rewards.raters", "at least one"),
        ({"weights": {"a": 0, "b": 0, "c": 0}}, "rewards.raters", "add up to more than 0"),
        ({"weights": {"a": -1}}, "rewards.raters.a.weight", "greater than or equal to 0"),
        ({"weights": {"a": float("inf")}}, "rewards.raters.a.weight", "finite"),
        ({"weights": {"d": 1}}, "rewards.weights.d", "no rater has this name"),
        ({"combine": "best"}, "rewards.combine", "must be"),
        ({"trim": 0.5}, "rewards.trim", "below 0.5"),
        ({"trim": -0.1}, "rewards.trim", "greater than or equal to 0"),
        ({"combine": "trimmed_mean", "trim": 0.3}, "rewards.trim", "drops none of 3 ratings"),
        ({"combine": "majority", "scale": "rank"}, "rewards.scale", "no effect on votes"),
        ({"min_raters": 4}, "rewards.min_raters", "must not exceed the 3 raters"),
        ({"window": 10}, "rewards.agreement.min_items", "must not exceed window 10"),
        ({"window": 1}, "rewards.window", "greater than or equal to 2"),
        ({"missing": "zero"}, "rewards.missing", "must be"),
        ({"agreement": {"low": 2}}, "rewards.agreement.low", "less than or equal to 1"),
        ({"agreement": {"lowest": 0}}, "rewards.agreement.lowest", "unknown key"),
        ({"hold_s": 0}, "rewards.hold_s", "greater than 0"),
        ({"raters": {"a": "exactly"}}, "rewards.raters.a.rater", "did you mean `exact`"),
        ({"raters": {"a": {"weight": 1}}}, "rewards.raters.a.rater", "required"),
        ({"raters": {"a": Flaky}}, "rewards.raters.a.rater", "got the class Flaky"),
        ({"raters": {"a": one_argument}}, "rewards.raters.a.rater", "too many positional"),
        ({"raters": {"a": three_arguments}}, "rewards.raters.a.rater", "'more'"),
        (
            {"raters": {"a": {"rater": same, "options": {"digit": 1}}}},
            "rewards.raters.a.options",
            "unexpected keyword argument 'digit'; it is called as same(task, answer, digit=...)",
        ),
        (
            {"raters": {"a": asked_by}},
            "rewards.raters.a.options",
            "'by'; it is called as asked_by(task, answer)",
        ),
        ({"raters": {"a b": same}}, "rewards.raters.a b", "must be 1 to 64 letters"),
        (
            {"raters": {"a": same, "b": same}, "agreement": {"act": "down_weight"}},
            "rewards.agreement.act",
            "neither",
        ),
        ({"raters": {f"r{n}": same for n in range(64)}}, "rewards.raters", "at most 63"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_their_path(
    settings: dict[str, Any], path: str, problem: str
) -> None:
    raters = settings.pop("raters", {"a": same, "b": same, "c": same})
    with pytest.raises(ConfigError) as refused:
        Ensemble(raters, **settings)
    assert refused.value.path.startswith(path)
    assert problem in str(refused.value)


async def test_a_function_takes_options_from_its_section() -> None:
    ensemble = Ensemble({"a": {"rater": asked_by, "options": {"by": 2.0}}})
    assert await ensemble.score(None, 3.0) == 6.0


async def test_other_trajectories_than_answers_are_refused() -> None:
    found = await Ensemble({"a": same}).rate(None, [1.0])
    with pytest.raises(ValueError, match=r"one for each answer \(got 0, 1\)"):
        found.apply([])


async def test_no_answer_is_no_error() -> None:
    found = await Ensemble({"a": same}).rate(None, [])
    assert (found.scores, found.ratings.shape) == ((), (0, 1))
    assert isinstance(found.apply([]), list)


async def test_a_lasting_low_agreement_is_told_again(
    tmp_path: Path, findings: list[HealthFinding], monkeypatch: pytest.MonkeyPatch
) -> None:
    def life() -> Ensemble:
        made = Ensemble(
            {"a": same, "b": same, "bad": negated}, agreement={"act": "down_weight", "min_items": 8}
        )
        made.join_run("env", "w-1", tmp_path / "window", findings.append)
        return made

    answers = np.linspace(0, 1, 16).tolist()
    first = life()
    await first.rate(None, answers)
    await first.rate(None, answers)
    assert told(findings) == [("low_agreement", False), ("down_weight", False)]
    findings.clear()
    resumed = life()  # the first one was killed; its finding may have been lost
    await resumed.rate(None, answers)
    assert findings == []
    monkeypatch.setattr(ensemble_module, "REPEAT_S", 0.0)
    await resumed.rate(None, answers)
    assert told(findings) == [("low_agreement", False), ("down_weight", False)]


async def test_a_damaged_window_is_told_by_an_evaluation_too(
    tmp_path: Path, findings: list[HealthFinding]
) -> None:
    ensemble = Ensemble({"a": same})
    ensemble.join_run("env", "w-1", tmp_path / "window", findings.append)
    await ensemble.rate(None, [0.0, 1.0])
    data = bytearray((tmp_path / "window").read_bytes())
    data[140] ^= 0xFF
    (tmp_path / "window").write_bytes(data)
    other = Ensemble({"a": same})
    other.join_run("env", "w-2", tmp_path / "window", findings.append)

    async def evaluated() -> None:
        EVALUATING.set(True)
        await other.rate(None, [0.5])

    await asyncio.create_task(evaluated())
    assert told(findings) == [("window_restarted", False)]


async def test_a_member_without_ratings_is_filtered_alone(findings: list[HealthFinding]) -> None:
    ensemble = Ensemble(
        {"judge": Flaky(lambda answer: answer < 0)}, missing="filter", on_finding=findings.append
    )
    found = await ensemble.rate(None, [-1.0])
    assert found.scores == (0.0,)
    assert found.reasons == ("fewer than 1 raters gave a rating",)
    assert told(findings) == [("raters_missing", False)]

    async def evaluated() -> None:
        EVALUATING.set(True)
        await ensemble.rate(None, [-1.0])

    with pytest.raises(RatersMissingError):  # a score of 0 would count
        await asyncio.create_task(evaluated())


async def test_holding_asks_only_for_answers_that_lack_ratings() -> None:
    down = {"judge": True}
    opinion = Flaky(lambda _: True)

    def judge(_task: Any, answer: Any) -> float:
        if down["judge"] and answer == 0.5:
            down["judge"] = False
            raise OSError("down")
        return float(answer)

    ensemble = Ensemble({"judge": judge, "opinion": opinion}, missing="hold", on_finding=lambda _: None)
    found = await ensemble.rate(None, [0.0, 0.5, 1.0])
    assert found.scores == (0.0, 0.5, 1.0)
    assert opinion.asked == 3 + 1
