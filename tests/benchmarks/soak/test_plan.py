import pytest

from benchmarks.soak.plan import ACT_GROUPS, DURABILITIES, LONGEST_DOWN_S, RANKS, SILENCE_S, Act, Kind, acts


def many(seeds: int = 20) -> list[Act]:
    return [act for seed in range(seeds) for act in acts(30_000, 300, seed)]


@pytest.mark.parametrize(("groups", "kills"), [(1, 1), (1000, 7), (1_000_000, 1000)])
def test_the_acts_together_have_the_groups_and_the_kills(groups: int, kills: int) -> None:
    found = list(acts(groups, kills, 3))
    assert sum(act.groups for act in found) == groups
    assert sum(act.kills for act in found) == kills
    assert max(act.groups for act in found) <= ACT_GROUPS


def test_a_seed_repeats_its_plan() -> None:
    assert list(acts(5000, 50, 7)) == list(acts(5000, 50, 7))
    assert list(acts(5000, 50, 7)) != list(acts(5000, 50, 8))


def test_every_durability_meets_every_number_of_ranks() -> None:
    found = {(act.durability, act.trainers[0].ranks) for act in acts(9 * ACT_GROUPS, 9, 0)}
    assert found == {(durability, ranks) for durability in DURABILITIES for ranks in RANKS}


def test_everything_is_killed_and_stopped_and_left() -> None:
    found = many()
    kinds = {(fault.kind, _kind_of(fault.victim)) for act in found for fault in act.faults}
    assert {(Kind.KILL, who) for who in ("broker", "producer", "rank", "trainer")} <= kinds
    assert {(Kind.STOP, who) for who in ("broker", "producer", "rank", "trainer")} <= kinds
    assert {(Kind.DRAIN, "producer"), (Kind.LEAVE, "producer"), (Kind.LEAVE, "rank")} <= kinds
    stops = [fault.lasts_s for act in found for fault in act.faults if fault.kind is Kind.STOP]
    assert min(stops) < 0.2 < SILENCE_S < max(stops)
    assert all(f.lasts_s <= LONGEST_DOWN_S for act in found for f in act.faults if f.kind is Kind.KILL)


def _kind_of(victim: str) -> str:
    if victim == "broker":
        return victim
    return "producer" if victim.startswith("p") else "rank" if "/" in victim else "trainer"


def test_the_acts_differ_in_everything_that_matters() -> None:
    found = many()
    for pick in (
        lambda act: act.transport,
        lambda act: act.may_die,
        lambda act: act.may_expire,
        lambda act: act.trainers[0].commits,
        lambda act: act.trainers[0].ahead,
        lambda act: bool(act.trainers[0].tokens),
        lambda act: len(act.trainers),
    ):
        assert len({pick(act) for act in found}) == 2
    for act in found:
        act.config("")
        assert {producer.frames for producer in act.producers} == {True, False}
        assert {producer.split for producer in act.producers} == {trainer.split for trainer in act.trainers}


def test_faults_come_in_order_within_the_act() -> None:
    for act in many(5):
        moments = [fault.at for fault in act.faults]
        assert moments == sorted(moments)
        assert 0 <= moments[0] <= moments[-1] < act.groups
