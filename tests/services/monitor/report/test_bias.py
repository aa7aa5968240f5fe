"""Shares that differ are told from shares that do not, and few groups from both.

Produced against trained: a bias that is there shows, with its reason, and none shows where there is none.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.files import AckedGroup
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.report.bias import (
    ALPHA,
    DIMENSIONS,
    FATES,
    SMALL_H,
    Bias,
    BiasVerdict,
    Produced,
    chi2_tail,
    compare,
    described,
    find_bias,
)
from rolloutmq.services.monitor.report.summary import GroupCounts


@pytest.mark.parametrize(
    ("df", "at"), [(1, 10.828), (2, 13.816), (3, 16.266), (4, 18.467), (5, 20.515), (9, 27.877), (30, 59.703)]
)
def test_tail_of_chi_square_is_that_of_the_tables(df: int, at: float) -> None:
    assert chi2_tail(at, df) == pytest.approx(0.001, rel=1e-3)
    assert chi2_tail(0.0, df) == 1.0
    assert 0.0 <= chi2_tail(1e6, df) < 1e-300


def test_small_difference_is_the_published_one() -> None:
    found = compare([500, 600], [1000, 1000])
    assert found.h == pytest.approx(2 * math.asin(math.sqrt(0.6)) - 2 * math.asin(math.sqrt(0.5)))
    assert (found.verdict, found.h > SMALL_H) == (BiasVerdict.BIASED, True)
    # The pooled two-proportion test: z**2 is chi-square with one degree of freedom.
    z = 0.1 / math.sqrt(0.55 * 0.45 * 2 / 1000)
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)))


@pytest.mark.parametrize(
    ("hits", "totals", "verdict"),
    [
        ([], [], BiasVerdict.TOO_FEW),
        ([0, 0], [0, 0], BiasVerdict.TOO_FEW),
        ([7], [9], BiasVerdict.ONE_PART),
        ([7, 0], [9, 0], BiasVerdict.ONE_PART),
        ([10, 0], [10, 10], BiasVerdict.BIASED),
        ([9, 0], [9, 9], BiasVerdict.TOO_FEW),
        ([10_000, 9_996], [10_000, 10_000], BiasVerdict.TOO_FEW),
        ([900, 100, 900], [1000, 1000, 1000], BiasVerdict.BIASED),
        ([400, 1], [1000, 2], BiasVerdict.TOO_FEW),
        ([50, 50], [50, 50], BiasVerdict.NONE_SHOWS),
        ([0, 0], [50, 50], BiasVerdict.NONE_SHOWS),
        ([50_000, 52_000], [100_000, 100_000], BiasVerdict.NONE_SHOWS),
    ],
)
def test_verdicts(hits: list[int], totals: list[int], verdict: BiasVerdict) -> None:
    assert compare(hits, totals).verdict is verdict


def test_more_than_chance_alone_is_no_bias_where_it_is_tiny() -> None:
    found = compare([50_000, 52_000], [100_000, 100_000])
    assert found.p is not None
    assert found.p < ALPHA
    assert found.h < SMALL_H


def test_false_alarms_are_as_rare_as_they_are_said_to_be() -> None:
    dice = random.Random(20)
    tests, alarms, tight = 4000, 0, 0
    for _ in range(tests):
        share = dice.uniform(0.2, 0.8)
        found = compare([sum(dice.random() < share for _ in range(40)) for _ in range(4)], [40] * 4)
        alarms += found.verdict is BiasVerdict.BIASED
        tight += found.p is not None and found.p < 0.05
    assert alarms <= 3 * ALPHA * tests
    # The test is no formality: at 5 % it is wrong about one time in twenty.
    assert 0.035 * tests < tight < 0.065 * tests


BIASED, NONE_SHOWS = BiasVerdict.BIASED, BiasVerdict.NONE_SHOWS

Choose = Callable[[Produced, random.Random], str]


def make(dice: random.Random, env: str = "sort3", **fields: Any) -> Produced:
    """Return a group whose figures have nothing to do with each other."""
    group = Produced(
        env, 8, dice.lognormvariate(5, 1), dice.lognormvariate(0, 1), dice.choice([0, 0.25, 0.5, 1])
    )
    return group._replace(**fields)


def join(groups: Sequence[tuple[Produced | None, str]]) -> Bias:
    """Compare groups of which the fates are known; one that is None is known by its id only."""
    places: dict[str, set[str]] = {fate: set() for fate in FATES}
    produced = {}
    for number, (group, fate) in enumerate(groups):
        places[fate].add(f"g{number}")
        if group is not None:
            produced[f"g{number}"] = group
    accepted = frozenset().union(*places.values())
    return find_bias(
        produced, GroupCounts(accepted=accepted, **{fate: frozenset(ids) for fate, ids in places.items()})
    )


def simulate(choose: Choose, *, seed: int = 1, count: int = 800) -> Bias:
    dice = random.Random(seed)
    return join([(group, choose(group, dice)) for group in (make(dice) for _ in range(count))])


def verdicts(bias: Bias, env: str = "sort3") -> dict[str, BiasVerdict]:
    return {name: found.verdict for name, found in bias.environments[env].dimensions.items()}


def by_chance(_group: Produced, dice: random.Random) -> str:
    return "trained" if dice.random() < 0.6 else dice.choice(["filtered", "expired"])


@pytest.mark.parametrize("figure", DIMENSIONS)
def test_a_bias_shows_in_its_figure_alone_and_names_its_reason(figure: str) -> None:
    limit = {"length": 300.0, "duration": 2.0, "reward": 0.9}[figure]

    def choose(group: Produced, dice: random.Random) -> str:
        late = getattr(group, figure) > limit and dice.random() < 0.5
        return "expired" if late else "trained"

    bias = simulate(choose)
    assert verdicts(bias) == {name: BIASED if name == figure else NONE_SHOWS for name in DIMENSIONS}
    found = bias.environments["sort3"].dimensions[figure]
    assert found.biased == ["trained", "expired"]
    assert found.ratio is not None
    assert found.ratio < 0.7
    assert "expired" not in found.bins[0].dropped
    last = found.bins[-1]
    assert last.trained == pytest.approx(1 - last.dropped["expired"])
    produced, trained = bias.environments["sort3"].produced, bias.environments["sort3"].trained
    assert getattr(trained, figure) < getattr(produced, figure)
    assert bias.short()["environments"]["sort3"][figure] == "biased"


def test_none_shows_where_there_is_none() -> None:
    tests, alarms = 0, 0
    for seed in range(200):
        env = simulate(by_chance, seed=seed, count=400).environments["sort3"]
        for found in env.dimensions.values():
            compared = [found.trained, *found.reasons.values()]
            assert all(one.p is not None for one in compared)
            tests += len(compared)
            alarms += len(found.biased)
    assert tests == 200 * 3 * 3
    assert alarms <= 3 * ALPHA * tests


def test_strong_bias_shows_whatever_the_seed() -> None:
    def choose(group: Produced, dice: random.Random) -> str:
        return "trained" if dice.random() < (0.8 if group.length < 150 else 0.5) else "expired"

    for seed in range(100):
        assert verdicts(simulate(choose, seed=seed))["length"] is BIASED


def test_reasons_that_make_up_for_each_other_show_each() -> None:
    def choose(group: Produced, dice: random.Random) -> str:
        if dice.random() < 0.5:
            return "trained"
        return "filtered" if group.length < 150 else "expired"

    found = simulate(choose).environments["sort3"].dimensions["length"]
    assert found.verdict is NONE_SHOWS
    assert found.biased == ["filtered", "expired"]


def test_filter_is_not_blamed_for_what_never_came_so_far() -> None:
    def choose(group: Produced, dice: random.Random) -> str:
        if group.length > 300 and dice.random() < 0.8:
            return "expired"
        return dice.choice(["trained", "filtered"])

    assert simulate(choose, count=3000).environments["sort3"].dimensions["length"].biased == [
        "trained",
        "expired",
    ]


def test_share_that_is_low_in_the_middle_shows() -> None:
    def choose(group: Produced, dice: random.Random) -> str:
        return "dead" if group.reward in {0.25, 0.5} and dice.random() < 0.5 else "trained"

    assert verdicts(simulate(choose))["reward"] is BIASED


def test_few_groups_are_no_verdict() -> None:
    bias = simulate(lambda group, _: "trained" if group.length < 150 else "expired", count=12)
    assert set(verdicts(bias).values()) == {BiasVerdict.TOO_FEW}
    assert (
        simulate(lambda *_: "in_flight").environments["sort3"].dimensions["length"].verdict
        is BiasVerdict.TOO_FEW
    )
    assert join([]).short() == {"across_environments": "too few", "environments": {}, "undescribed": 0}


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_value_that_most_groups_share_does_not_hide_the_rest(common: float) -> None:
    dice = random.Random(3)
    groups = []
    for number in range(1000):
        rare = number % 10 == 0
        group = make(dice, reward=1.0 - common if rare else common)
        groups.append((group, "expired" if rare and number % 20 == 0 else "trained"))
    found = join(groups).environments["sort3"].dimensions["reward"]
    assert (found.verdict, len(found.bins)) == (BIASED, 2)
    assert sorted(one.produced for one in found.bins) == [100, 900]
    same = join([(make(dice, reward=common), fate) for _, fate in groups])
    assert verdicts(same)["reward"] is BiasVerdict.ONE_PART


def test_environments_are_compared_with_each_other() -> None:
    dice = random.Random(4)
    groups = [(make(dice, env), by_chance(make(dice), dice)) for env in ("easy", "hard") for _ in range(200)]
    assert join(groups).across.verdict is NONE_SHOWS
    groups = [(group, "trained" if group.env == "easy" else fate) for group, fate in groups]
    bias = join(groups)
    assert bias.across.verdict is BIASED
    assert list(bias.environments) == ["easy", "hard"]


def test_only_sealed_fates_of_groups_for_training_are_compared() -> None:
    dice = random.Random(5)
    groups: list[tuple[Produced | None, str]] = [
        (make(dice, duration=math.nan if fate == "dead" else 1.0), fate) for fate in FATES for _ in range(10)
    ]
    groups += [(None, "trained"), (None, "lost"), (make(dice, split=Split.EVAL), "lost")]
    bias = join(groups)
    env = bias.environments["sort3"]
    assert env.fates == dict.fromkeys(FATES, 10)
    assert sum(one.sealed for one in env.dimensions["length"].bins) == 50
    assert sum(one.produced for one in env.dimensions["length"].bins) == 70
    assert env.dimensions["duration"].unknown == 10
    assert (env.produced.groups, env.produced.sequences, env.trained.groups) == (70, 560, 10)
    assert env.produced.duration == 1.0
    assert (bias.evaluation, bias.undescribed) == (1, {"trained": 1, "lost": 1})


def test_figures_beyond_all_measure_stay_numbers() -> None:
    huge = 1.7e308
    groups = [
        (Produced("e", 1, 2.0**62, huge, huge * (-1) ** number), ("trained", "expired")[number % 3 == 0])
        for number in range(300)
    ]
    bias = join(groups)
    assert bias.environments["e"].produced.duration == pytest.approx(huge)
    json.dumps(msgspec.to_builtins(bias), allow_nan=False)


def line(**fields: object) -> AckedGroup:
    usual = {"group_id": "g", "session": 1, "seq": 1, "at": 0.0, "env": "e", "sequences": 4, "tokens": 40}
    return msgspec.convert(usual | fields, AckedGroup)


def test_line_describes_its_group() -> None:
    assert described(line(duration_s=2.5, reward=-1.0, split=1)) == Produced(
        "e", 4, 10.0, 2.5, -1.0, Split.EVAL
    )
    assert described(line(sequences=0)) is None
    unknown = described(line(duration_s=-0.1))
    assert unknown is not None
    assert math.isnan(unknown.duration)
    assert math.isnan(unknown.reward)
