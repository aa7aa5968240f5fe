"""Normalization by the environment's moments: where it changes nothing, where it does, and what it never touches."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from tests.trainer.support.toy import MemoryBatch, some_group

from rolloutmq.schemas.config.losses import DapoConfig, Method
from rolloutmq.schemas.config.trainer import NormalizationConfig, TrainerConfig
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.step.advantages import BatchAdvantages, mean_score, study
from rolloutmq.trainer.step.collate import Bounds
from rolloutmq.trainer.step.normalization import RAW, ScoreScale, scale_of
from rolloutmq.trainer.step.report import StepPart, StepReport

BOUNDS = Bounds(20, 64, ("inference_logprobs",))
ZSCORE = NormalizationConfig(normalize="zscore", warmup_groups=0)
METHODS: tuple[Method, ...] = ("dr_grpo", "grpo", "rloo")


def group_of(group_id: str, scores: "Sequence[float] | NDArray[np.float64]", env: str = "e") -> Group:
    return dataclasses.replace(some_group(group_id, list(scores)), env=env)


def moments_of(groups: Sequence[Group]) -> dict[str, Moments]:
    """Return the moments that a broker holds after these groups."""
    found: dict[str, Moments] = {}
    for group in groups:
        found[group.env] = found.get(group.env, Moments()).after(group.rewards(), group.sequences)
    return found


def trained(
    groups: Sequence[Group],
    method: Method,
    rewards: NormalizationConfig = ZSCORE,
    moments: Mapping[str, Moments] | None = None,
    **loss: Any,
) -> BatchAdvantages:
    config = TrainerConfig(loss=DapoConfig(advantage=method, **loss), rewards=rewards)
    known = moments_of(groups) if moments is None else moments
    return study(groups, config, BOUNDS, (), seed=0, moments=known)


def by_group(batch: BatchAdvantages) -> dict[str, NDArray[np.float32]]:
    """Return the advantage of each sequence of each group."""
    found = {}
    for example in batch.examples:
        ends = np.cumsum(example.group.columns["tokens"].lengths[0])
        found[example.group.group_id] = example.advantages[ends - 1]
    return found


def mixture(seed: int = 0, apart: float = 100.0) -> list[Group]:
    """Return groups of two environments with the same task, of which one pays `apart` times as much."""
    rng = np.random.default_rng(seed)
    small = [(rng.random(8) < 0.5).astype(float) for _ in range(40)]
    low = [group_of(f"low-{i}", scores, "low") for i, scores in enumerate(small)]
    high = [group_of(f"high-{i}", scores * apart, "high") for i, scores in enumerate(small)]
    return [*low, *high]


@pytest.mark.parametrize("method", ["dr_grpo", "rloo"])
@pytest.mark.parametrize("normalize", ["zscore", "minmax"])
def test_a_mixture_whose_rewards_differ_by_100_counts_each_environment_alike(
    method: Method, normalize: Any
) -> None:
    groups = mixture()
    raw = by_group(trained(groups, method, NormalizationConfig()))
    scaled = by_group(trained(groups, method, NormalizationConfig(normalize=normalize, warmup_groups=0)))
    assert raw.keys() == scaled.keys()
    for name in (name for name in raw if name.startswith("low")):
        twin = name.replace("low", "high")
        assert_allclose(raw[twin], 100 * raw[name], rtol=1e-6)
        assert_allclose(scaled[twin], scaled[name], rtol=1e-6)


def test_under_grpo_a_mixture_is_the_same_with_it_and_without() -> None:
    groups = mixture()
    raw, scaled = by_group(trained(groups, "grpo", NormalizationConfig())), by_group(trained(groups, "grpo"))
    assert raw.keys() == scaled.keys()
    for name, advantages in raw.items():
        assert_allclose(scaled[name], advantages, rtol=2e-7)
        assert_allclose(scaled[name], scaled[name.replace("low", "high")], rtol=2e-7)


@pytest.mark.parametrize(("method", "factor"), [("dr_grpo", 1.0), ("rloo", 8 / 7)])
def test_the_divisor_is_the_deviation_of_the_environment(method: Method, factor: float) -> None:
    groups = mixture()
    every = np.concatenate([group.scores for group in groups if group.env == "high"])
    found = by_group(trained(groups, method))
    for group in groups[-3:]:
        expected = factor * (group.scores - group.scores.mean()) / every.std()
        assert_allclose(found[group.group_id], expected, rtol=1e-6)


def test_the_divisor_of_minmax_is_the_range_of_the_environment() -> None:
    groups = [group_of("a", [0.0, 3.0]), group_of("b", [1.0, 8.0])]
    found = by_group(trained(groups, "dr_grpo", NormalizationConfig(normalize="minmax", warmup_groups=0)))
    assert_array_equal(found["a"], np.array([-1.5 / 8, 1.5 / 8], np.float32))
    assert_array_equal(found["b"], np.array([-3.5 / 8, 3.5 / 8], np.float32))


SCORES = st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=8)
KNOWN = st.builds(
    lambda mean, deviation, half: Moments(
        99, 800.0, mean, 800 * deviation**2, mean - half * deviation, mean + half * deviation
    ),
    st.floats(-1e4, 1e4),
    st.floats(1e-2, 1e6),
    st.floats(1.0, 9.0),
)


@given(SCORES, KNOWN, st.sampled_from(["zscore", "minmax"]))
def test_an_affine_map_changes_nothing_under_grpo(scores: list[float], known: Moments, way: Any) -> None:
    """Also where `std_floor` acts: it is a deviation of raw scores."""
    group = group_of("g", scores)
    rewards = NormalizationConfig(normalize=way, warmup_groups=0)
    raw = trained([group], "grpo", NormalizationConfig())
    scaled = trained([group], "grpo", rewards, {"e": known})
    assert len(raw.examples) == len(scaled.examples)
    for one, other in zip(raw.examples, scaled.examples, strict=True):
        assert_allclose(other.advantages, one.advantages, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@given(SCORES, KNOWN)
def test_no_verdict_changes_without_a_clip(method: Method, scores: list[float], known: Moments) -> None:
    assume(known.spread)
    assume(method == "grpo" or not 0 < max(scores) - min(scores) < 1e-6 * known.deviation)
    group = group_of("g", scores)
    raw = trained([group], method, NormalizationConfig())
    scaled = trained([group], method, ZSCORE, {"e": known})
    assert [len(raw.trained), len(raw.filtered)] == [len(scaled.trained), len(scaled.filtered)]


def test_equal_scores_are_judged_raw() -> None:
    """Scores that differ by rounding: a small deviation of the environment must not blow them up, nor hide others."""
    flat, good = group_of("flat", [0.3, 0.3, 0.3000001]), group_of("good", [0.0, 1e-3])
    tiny, huge = (Moments(99, 800.0, 0.3, 800 * d * d, 0.3 - 2 * d, 0.3 + 2 * d) for d in (1e-5, 1e2))
    for known in (tiny, huge):
        found = trained([flat, good], "dr_grpo", ZSCORE, {"e": known})
        assert (found.filtered, found.trained) == ([flat], [good])


def test_an_environment_without_spread_does_not_blow_up() -> None:
    """All groups but one, of a rewound batch, had equal scores: the group is normalized by its own moments."""
    constant = Moments(500, 4000.0, 1.0, 4000 * 1e-18, 1.0, 1.0)
    assert not constant.spread
    group = group_of("g", [1.0, 1.0, 1.0, 1.5])
    found = by_group(trained([group], "dr_grpo", ZSCORE, {"e": constant}))["g"]
    assert_allclose(found, (group.scores - group.scores.mean()) / group.scores.std(), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("normalize", ["zscore", "minmax"])
def test_groups_that_one_extreme_score_hides_are_counted_with_the_reason(
    method: Method, normalize: Any
) -> None:
    """`grpo` divides by the group itself, and learns from it."""
    usual = [group_of(f"g{i}", np.random.default_rng(i).random(8)) for i in range(50)]
    known = moments_of([*usual, group_of("extreme", [1e60] + [0.0] * 7), *usual])
    rewards = NormalizationConfig(normalize=normalize, warmup_groups=0)
    found = trained(usual, method, rewards, known)
    if method == "grpo":
        assert (found.trained, found.negligible) == (usual, {})
        # The clip counts from the mean, which is so far away that all scores are equal to it.
        found = trained(usual, method, rewards.model_copy(update={"clip": 9.0}), known)
    assert (found.trained, found.filtered, found.negligible) == ([], usual, {"e": 50})
    report = StepReport(
        [StepPart.of(MemoryBatch(1, usual, moments=known), found, rewards)] * 2, PolicyVersion(0, 1), {}
    )
    assert report.negligible == {"e": 100}
    assert report.barren_because.startswith("its scores differ by less than 1e-06 of the deviation or range")
    assert report.barren_because.endswith("(environment e)")


def test_a_half_life_ends_the_reign_of_an_extreme_score() -> None:
    """The deviation halves in two half-lives."""
    rng = np.random.default_rng(3)
    moments = Moments().after(group_of("extreme", [1e12] + [0.0] * 7).rewards(), 8, 2)
    usual = [group_of(f"g{i}", rng.random(8)) for i in range(200)]
    counts = []
    for group in usual:
        moments = moments.after(group.rewards(), 8, 2)
        counts.append(sum(trained([group], "dr_grpo", ZSCORE, {"e": moments}).negligible.values()))
    assert counts[0] == 1
    assert counts == sorted(counts, reverse=True)
    assert counts.index(0) < 2 * 2 * math.log2(1e12 / 1e6)
    assert moments.deviation == pytest.approx(0.29, abs=0.1)


def test_a_rare_success_is_at_most_the_root_of_its_sequences_away() -> None:
    groups = [group_of(f"g{i}", [0.0] * 16) for i in range(999)]
    rare = group_of("rare", [1.0] + [0.0] * 15)
    known = moments_of([*groups, rare])
    far = by_group(trained([rare], "dr_grpo", ZSCORE, known))["rare"].max()
    assert far == pytest.approx(15 / 16 / known["e"].deviation)
    assert far < math.sqrt(known["e"].weight)
    clipped = by_group(trained([rare], "dr_grpo", NormalizationConfig(normalize="zscore", clip=5.0), known))[
        "rare"
    ]
    low = -known["e"].mean / known["e"].deviation
    assert clipped.max() == pytest.approx((5.0 - low) * 15 / 16)


def test_warm_up_is_counted_in_groups_and_uses_the_group_alone() -> None:
    """Three groups of four are not twelve; until then a group is on the right scale by its own moments."""
    rewards = NormalizationConfig(normalize="zscore", warmup_groups=4)
    group = group_of("g", [0.0, 0.0, 400.0, 400.0])
    known = Moments(3, 12.0, 100.0, 12 * 50.0**2, 0.0, 400.0)
    warming = by_group(trained([group], "dr_grpo", rewards, {"e": known}))["g"]
    assert_array_equal(warming, np.array([-1, -1, 1, 1], np.float32))
    unknown = by_group(trained([group], "dr_grpo", rewards, {}))["g"]
    assert_array_equal(unknown, warming)
    warm = by_group(trained([group], "dr_grpo", rewards, {"e": replace(known, groups=4)}))["g"]
    assert_array_equal(warm, np.array([-4, -4, 4, 4], np.float32))


def test_a_clip_cuts_around_the_mean_of_the_environment_and_grpo_feels_it() -> None:
    known = {"e": Moments(99, 800.0, 10.0, 800 * 4.0, 0.0, 40.0)}
    group = group_of("g", [10.0, 12.0, 40.0])
    rewards = NormalizationConfig(normalize="zscore", warmup_groups=0, clip=3.0)
    assert_allclose(
        by_group(trained([group], "dr_grpo", rewards, known))["g"], np.array([0, 1, 3]) - 4 / 3, rtol=1e-6
    )
    raw = by_group(trained([group], "grpo", NormalizationConfig(), known))["g"]
    cut = by_group(trained([group], "grpo", rewards, known))["g"]
    assert np.abs(raw - cut).max() > 0.1


def test_a_group_that_a_clip_makes_flat_is_filtered() -> None:
    known = {"e": Moments(99, 800.0, 0.0, 800.0, -40.0, 40.0)}
    group = group_of("g", [20.0, 30.0, 40.0])
    found = trained(
        [group], "grpo", NormalizationConfig(normalize="zscore", warmup_groups=0, clip=3.0), known
    )
    assert (found.trained, found.filtered) == ([], [group])


def test_scores_too_large_for_float32_are_trained_on_in_units_of_their_deviation() -> None:
    group = group_of("g", [0.0, 1e40])
    assert len(trained([group], "dr_grpo", NormalizationConfig()).rejected) == 1
    assert_array_equal(by_group(trained([group], "dr_grpo"))["g"], np.array([-1, 1], np.float32))


def test_scores_whose_moments_overflow_stay_raw() -> None:
    group = group_of("g", [0.0, 1e200])
    assert scale_of(group, ZSCORE, None) == RAW
    assert len(trained([group], "dr_grpo").rejected) == 1


@pytest.mark.parametrize("method", METHODS)
def test_turned_off_it_is_bit_for_bit_what_it_was(method: Method) -> None:
    groups = mixture(seed=5)
    config = TrainerConfig(loss=DapoConfig(advantage=method))
    before = study(groups, config, BOUNDS, (), seed=0)
    now = study(groups, config, BOUNDS, (), seed=0, moments=moments_of(groups))
    for one, other in zip(before.examples, now.examples, strict=True):
        assert_array_equal(one.advantages, other.advantages)
    assert ScoreScale().apply(np.array([0.1, 7e300])).tolist() == [0.1, 7e300]


def test_the_shards_of_a_step_get_what_the_whole_batch_gets() -> None:
    groups = mixture(seed=2)
    known = moments_of(groups)
    whole = by_group(trained(groups, "rloo", ZSCORE, known))
    shards = [by_group(trained(groups[rank::3], "rloo", ZSCORE, known)) for rank in range(3)]
    parts = {name: advantages for shard in shards for name, advantages in shard.items()}
    assert parts.keys() == whole.keys()
    for name in whole:
        assert_array_equal(parts[name], whole[name])


def test_penalties_and_advantages_of_the_environment_are_not_scaled() -> None:
    columns: dict[str, Any] = {
        "tokens": [[1, 2, 3], [4, 5]],
        "mask": [[0, 1, 1], [0, 1]],
        "inference_logprobs": [[0.0, -1.0, -2.0], [0.0, -0.5]],
    }
    known = {"e": Moments(99, 800.0, 0.5, 800 * 0.25, 0.0, 1.0)}
    own = some_group("own", [0.0, 1.0], **columns, advantages=[[0.0, 0.5, -1.0], [0.0, 2.0]])
    (example,) = trained([dataclasses.replace(own, env="e")], "dr_grpo", ZSCORE, known).examples
    assert example.advantages.tolist() == [0.0, 0.5, -1.0, 0.0, 2.0]
    penalized = some_group("kl", [0.0, 1.0], **columns, ref_logprobs=[[5.0, -1.5, -2.25], [5.0, -0.25]])
    penalized = dataclasses.replace(penalized, env="e")
    kl: dict[str, Any] = {"kl": 0.2, "kl_in": "reward", "kl_estimator": "k1"}
    (example,) = trained([penalized], "dr_grpo", ZSCORE, known, **kl).examples
    # Scores in deviations of .5: -1 and 1. k1 of the trained tokens: .5 + .25 and -.25; their mean is .25.
    assert example.advantages.tolist() == pytest.approx([-1 - 0.2 * 0.5] * 3 + [1 + 0.2 * 0.5] * 2)


@pytest.mark.parametrize("rewards", [NormalizationConfig(), ZSCORE])
def test_every_reported_reward_is_raw(rewards: NormalizationConfig) -> None:
    groups = [group_of("a", [100.0, 300.0], "high"), group_of("b", [1.0, 2.0], "low")]
    known = moments_of(groups)
    batch = MemoryBatch(1, groups, moments=known)
    advantages = trained(groups, "dr_grpo", rewards, known)
    part = StepPart.of(batch, advantages, rewards)
    report = StepReport([part], PolicyVersion(0, 1), {"loss": 0.0})
    line, event = report.line(0.0), report.event("run", 0.0, 0.0, 0.0)
    assert line is not None
    assert line.rewards == (200.0, 1.5)
    assert event.reward == 403.0 / 4
    assert mean_score(advantages.trained) == 403.0 / 4
    assert [group.scores.tolist() for group in groups] == [[100.0, 300.0], [1.0, 2.0]]


def test_the_step_says_the_version_of_the_moments_and_only_if_they_were_used() -> None:
    groups = mixture()
    batch = MemoryBatch(1, groups, moments=moments_of(groups))
    advantages = trained(groups, "dr_grpo")
    metrics = {"loss": 0.0}
    used = StepReport([StepPart.of(batch, advantages, ZSCORE)] * 2, PolicyVersion(0, 1), metrics)
    line = used.line(0.0)
    assert line is not None
    assert line.moments == {"low": 40, "high": 40}
    extra = used.event("run", 0.0, 0.0, 0.0).extra
    assert (extra["moments_groups/low"], extra["moments_groups/high"]) == (40, 40)
    unused = StepReport([StepPart.of(batch, advantages)], PolicyVersion(0, 1), metrics)
    line = unused.line(0.0)
    assert line is not None
    assert line.moments == {}
    assert not [name for name in unused.event("run", 0.0, 0.0, 0.0).extra if name.startswith("moments")]
