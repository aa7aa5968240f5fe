"""The audit of a soak notices each way in which a group can go wrong: a checker that cannot fail proves nothing."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from benchmarks.soak import audit
from benchmarks.soak.audit import Auditor, Books, Promise, Verdict
from benchmarks.soak.books import Asked, Began, Entry, Got, ProducerLife, Told
from rolloutmq.schemas.files import DroppedGroup
from rolloutmq.schemas.wire.control import LedgerCounts
from rolloutmq.schemas.wire.envelope import Split

A, B = "p0.0-0", "p0.0-1"
SPLITS = {"p0": Split.TRAIN, "t0": Split.TRAIN, "t1": Split.TRAIN, "e0": Split.EVAL}
Ranks = dict[tuple[str, int], list[Entry]]


def life(number: int = 0, **about: Any) -> ProducerLife:
    """A life that built ten groups; the first two are acked."""
    return ProducerLife("p0", number, **{"built": 10, "sent": {0, 1}, "acked": {0, 1}, **about})


def got(lease: int, *ids: str, **about: Any) -> Got:
    usual = {"at": float(lease), "generation": 1, "incarnation": 0, "step": lease, "world": 1}
    return Got(lease=lease, ids=ids, **{**usual, **about})


def settled(lease: int, *ids: str, told: str = "settled", **about: Any) -> list[Entry]:
    """A shard that was pulled, and settled as far as its rank knows; no answer with an empty `told`."""
    asked = {name: about.pop(name, ()) for name in ("filtered", "rejected")}
    entries: list[Entry] = [got(lease, *ids, **about), Asked(float(lease), lease, 1, **asked)]
    return [*entries, Told(float(lease), lease, 1, told)] if told else entries  # type: ignore[arg-type]


def dropped(group_id: str, state: str, reason: str) -> DroppedGroup:
    return DroppedGroup(at=0.0, group_id=group_id, state=state, reason=reason)


def audited(
    ranks: Ranks,
    lives: Sequence[ProducerLife] = (),
    drops: Sequence[DroppedGroup] = (),
    promise: Promise = Promise(),
) -> Verdict:
    books = Books(list(lives) or [life()], ranks, SPLITS, list(drops))
    return Auditor(books, promise).audit()


def one(entries: list[Entry]) -> Ranks:
    return {("t0", 0): entries}


def kinds(verdict: Verdict) -> list[str]:
    return sorted(verdict.violations)


def test_what_was_acked_and_settled_once_is_fine() -> None:
    verdict = audited(one([*settled(1, A), *settled(2, B, filtered=(B,))]))
    assert verdict.violations == {}
    assert verdict.states == {A: "trained", B: "filtered"}


def test_a_lost_group_is_noticed() -> None:
    verdict = audited(one(settled(1, A)))
    assert kinds(verdict) == ["lost"]
    assert B in verdict.violations["lost"][0]


@pytest.mark.parametrize("told", ["", "lost"])
def test_a_group_whose_last_batch_went_back_is_lost(told: str) -> None:
    pulled: list[Entry] = [got(2, B, world=2)]
    verdict = audited({("t0", 0): [*settled(1, A), *pulled], ("t0", 1): settled(2, told=told, world=2)})
    assert kinds(verdict) == ["lost"]


def test_a_group_that_nobody_acked_may_be_gone() -> None:
    assert audited(one(settled(1, A)), [life(acked={0})]).violations == {}


def test_a_group_that_nobody_acked_must_not_come_twice() -> None:
    verdict = audited(one([*settled(1, A), *settled(2, A)]), [life(acked=set())])
    assert kinds(verdict) == ["twice"]


def test_groups_that_a_producer_saved_are_acked_once_a_later_life_has_opened() -> None:
    left = life(acked={0}, left=True)
    assert audited(one(settled(1, A)), [left, life(1, sent=set(), acked=set())]).violations == {}
    taken = [left, life(1, sent=set(), acked=set(), took_over=True)]
    assert kinds(audited(one(settled(1, A)), taken)) == ["lost"]


def test_a_group_settled_twice_is_noticed() -> None:
    assert kinds(audited(one([*settled(1, A), *settled(2, A, B)]))) == ["twice"]


def test_a_settled_group_that_only_comes_again_is_noticed() -> None:
    verdict = audited(one([*settled(1, A, B), got(2, A), *settled(3, A)]))
    assert kinds(verdict) == ["twice"]
    assert len(verdict.violations["twice"]) == 2


def test_a_group_of_two_trainers_is_noticed() -> None:
    ranks: Ranks = {("t0", 0): settled(1, A, B), ("t1", 0): settled(2, A)}
    assert kinds(audited(ranks)) == ["twice"]


def test_a_stopped_rank_may_note_a_batch_that_went_on_to_another_meanwhile() -> None:
    early = got(1, A, at=9.0)  # the broker took it back before the rank woke up
    ranks: Ranks = {("t0", 0): [early], ("t1", 0): settled(2, A, B)}
    assert audited(ranks).violations == {}


def test_a_group_may_come_again_after_an_answer_that_never_came() -> None:
    assert audited(one([*settled(1, A, B, told=""), *settled(2, A, B)])).violations == {}


def test_a_settlement_of_one_rank_of_two_is_provisional() -> None:
    ranks: Ranks = {
        ("t0", 0): [*settled(1, A, world=2), *settled(2, A, world=2)],
        ("t0", 1): [got(1, B, world=2), *settled(2, B, world=2)],
    }
    assert audited(ranks).violations == {}


def test_a_settlement_of_all_ranks_is_final() -> None:
    ranks: Ranks = {
        ("t0", 0): [*settled(1, A, world=2), *settled(2, A, world=2)],
        ("t0", 1): [*settled(1, B, world=2), *settled(2, world=2)],
    }
    assert kinds(audited(ranks)) == ["twice"]


def resumed(checkpoint: int) -> list[Entry]:
    return [Began(3.0, 1, checkpoint)]


def test_a_resumed_trainer_gets_later_steps_again() -> None:
    before, after = settled(5, A), settled(7, A, incarnation=1, step=5)
    verdict = audited(one([*before, *settled(6, B), *resumed(4), *after, *settled(8, B, incarnation=1)]))
    assert verdict.violations == {}
    assert (verdict.states, verdict.again) == ({A: "trained", B: "trained"}, 2)


def test_a_resumed_trainer_gets_no_step_before_its_checkpoint() -> None:
    verdict = audited(one([*settled(5, A, B), *resumed(5), *settled(7, A, incarnation=1)]))
    assert kinds(verdict) == ["twice"]


def test_a_resume_of_another_trainer_excuses_nothing() -> None:
    ranks: Ranks = {("t0", 0): [*settled(5, A, B), *settled(7, A)], ("t1", 0): resumed(1)}
    assert kinds(audited(ranks)) == ["twice"]


def test_a_resume_that_came_before_excuses_nothing() -> None:
    verdict = audited(one([*resumed(1), *settled(5, A, B, incarnation=1), *settled(7, A, incarnation=1)]))
    assert kinds(verdict) == ["twice"]


def test_a_batch_without_a_trained_group_may_come_again_after_a_resume() -> None:
    nothing = settled(5, A, B, filtered=(A, B))
    assert audited(one([*nothing, *resumed(5), *settled(7, A, B, incarnation=1)])).violations == {}


@pytest.mark.parametrize(
    "ids", [("p0.0-10",), ("p0.1-0",), ("nonsense",)], ids=["number", "life", "no id of a soak"]
)
def test_a_group_that_was_never_built_is_noticed(ids: tuple[str, ...]) -> None:
    assert kinds(audited(one(settled(1, A, B, *ids)))) == ["torn"]


def test_a_torn_group_is_noticed() -> None:
    assert kinds(audited(one(settled(1, A, B, torn=(B,))))) == ["torn"]


def test_a_group_of_another_split_is_noticed() -> None:
    assert kinds(audited({("e0", 0): settled(1, A, B)})) == ["torn"]


def test_a_group_twice_in_one_batch_is_noticed() -> None:
    assert "twice" in kinds(audited(one(settled(1, A, A, B))))


EXPIRED, DEAD = dropped(B, "expired", "stale"), dropped(B, "dead", "lost with 3 leases")


@pytest.mark.parametrize(
    ("drop", "promise", "expected"),
    [
        (EXPIRED, Promise(may_expire=True), []),
        (EXPIRED, Promise(may_die=True), ["dropped"]),
        (DEAD, Promise(may_die=True), []),
        (DEAD, Promise(may_expire=True), ["dropped"]),
        (dropped(B, "dead", "damaged"), Promise(may_die=True), ["dropped"]),
        (dropped(B, "dead", "rejected: drawn"), Promise(may_die=True), ["dropped"]),
        (dropped(B, "discarded", "reset"), Promise(may_die=True), ["dropped"]),
    ],
)
def test_a_drop_needs_a_reason_that_the_run_allows(
    drop: DroppedGroup, promise: Promise, expected: list[str]
) -> None:
    assert kinds(audited(one(settled(1, A)), drops=[drop], promise=promise)) == expected


def test_a_rejected_group_is_dead_by_its_own_rank() -> None:
    rejected = settled(1, A, B, rejected=(B,))
    assert audited(one(rejected), drops=[dropped(B, "dead", "rejected: drawn")]).violations == {}


@pytest.mark.parametrize("told", ["", "lost"])
def test_a_group_whose_batch_perhaps_went_back_may_be_dropped_later(told: str) -> None:
    drops, promise = [dropped(A, "expired", "stale")], Promise(may_expire=True)
    verdict = audited(one([*settled(1, A, told=told), *settled(2, B)]), drops=drops, promise=promise)
    assert verdict.violations == {}
    assert verdict.states == {A: "expired", B: "trained"}
    assert kinds(audited(one([*settled(1, A, told=told), *settled(2, B)]), drops=drops)) == ["dropped"]


def test_a_settled_group_must_not_be_dropped() -> None:
    assert kinds(audited(one(settled(1, A, B)), drops=[EXPIRED], promise=Promise(may_expire=True))) == [
        "twice"
    ]


def test_the_journal_explains_a_drop_without_a_line() -> None:
    books = Books([life()], one(settled(1, A)), SPLITS)
    asked = []

    def history(group_id: str) -> tuple[str, str, str]:
        asked.append(group_id)
        return "expired", "stale", ""

    assert Auditor(books, Promise(may_expire=True), history).audit().states == {A: "trained", B: "expired"}
    assert asked == [B]
    silent = Auditor(books, Promise(may_expire=True), lambda _: ("queued", "", "it is queued")).audit()
    assert kinds(silent) == ["lost"]


FULL = LedgerCounts(accepted=2, trained=1, filtered=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"trained": 0, "committed": 1}, []),
        ({"accepted": 3}, ["accepted: 2 by the books, 3 by the product"]),
        ({"trained": 2}, ["trained: 1 by the books, 2 by the product"]),
        ({"queued": 1}, ["queued and leased: 0 by the books, 1 by the product"]),
        ({"dead": 1}, ["dead: 0 by the books, 1 by the product"]),
    ],
)
def test_the_counts_of_the_product_are_those_of_the_books(change: dict[str, int], said: list[str]) -> None:
    verdict = audited(one([*settled(1, A), *settled(2, B, filtered=(B,))]))
    audit.compare(verdict, msgspec.structs.replace(FULL, **change))
    assert verdict.violations.get("counts", []) == said


def test_a_long_list_of_violations_is_cut() -> None:
    verdict = audited({}, [life(built=99, acked=set(range(99)))])
    lines = list(verdict.lines())
    assert len(verdict.violations["lost"]) == 99
    assert (len(lines), lines[-1]) == (audit.SHOWN + 1, "lost: and 79 more")
