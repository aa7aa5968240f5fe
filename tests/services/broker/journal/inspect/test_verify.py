"""The ledger verifier: recomputed counts, and every way in which a group may be unaccounted for."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.services.broker.journal.handmade import (
    SESSION,
    TRAINER,
    Handmade,
    batch,
    began,
    flip,
    item,
    ledger,
    settles,
    version,
)

from rolloutmq.launch.commands.records.ledger import witness
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Began,
    Committed,
    Dropped,
    Event,
    Forgot,
    LeaseSnapshot,
    Lost,
    Numbers,
    Opened,
    Requeued,
    RetainedBatchSnapshot,
    Rewound,
    RewoundBatchSnapshot,
    SessionSnapshot,
    Skipped,
    WasReset,
)
from rolloutmq.services.broker.journal.inspect.verify import Verdict, Witness, verify

COMMIT = Committed(TRAINER, version(1))


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    return Handmade(run_dir)


def check(made: Handmade, *, quick: bool = False) -> Verdict:
    layout = made.layout
    verdict = verify(layout.journal, layout.dead, lambda: witness(layout), quick=quick)
    assert sum(verdict.counts.values()) == verdict.accepted or verdict.problems
    return verdict


def problems_of(made: Handmade, *, quick: bool = False) -> list[str]:
    return [str(problem) for problem in check(made, quick=quick).problems]


def counted(made: Handmade) -> dict[str, int]:
    """Return the counts that are not zero, after finding no problem."""
    verdict = check(made)
    assert verdict.problems == []
    return {state: count for state, count in verdict.counts.items() if count}


def bury(made: Handmade, *orders: int) -> None:
    store = DeadLetterStore(made.layout.dead, 1 << 20, sync=False)
    for order in orders:
        group = made.groups[order]
        store.bury(group, group.body.frames, "odd", 1.0)


def accepted(made: Handmade, count: int) -> list[Accepted]:
    return [made.accept(order) for order in range(1, count + 1)]


# Ledgers that add up.


def test_every_state_is_counted_with_its_reason(made: Handmade) -> None:
    lease, other, rest = made.lease([1, 2], [3]), made.lease([4], step=2), made.lease([5])
    made.log(
        began(),
        accepted(made, 8),
        [lease, settles(lease, "g1", filtered=["g2"]), settles(lease, rejected=["g3"], rank=1)],
        [COMMIT, other, settles(other, "g4"), rest],
        [Dropped(6, "expired", "stale"), Dropped(7, "dead", "deliveries")],
    )
    bury(made, 3, 7)
    verdict = check(made)
    assert verdict.problems == []
    assert verdict.counts == {
        "queued": 1, "leased": 1, "trained": 1, "committed": 1,
        "filtered": 1, "expired": 1, "dead": 2, "discarded": 0,
    }  # fmt: skip
    assert verdict.reasons == {"dead(deliveries)": 1, "dead(rejected)": 1, "expired(stale)": 1}
    assert (verdict.accepted, verdict.groups_checked, verdict.since) == (8, 3, None)
    assert verdict.bytes_checked == sum(made.groups[order].header.nbytes for order in (4, 5, 8))


def test_a_lease_that_is_not_settled_by_all_ranks_is_leased(made: Handmade) -> None:
    lease = made.lease([1], [2])
    made.log(began(), accepted(made, 2), [lease, settles(lease, "g1")])
    assert counted(made) == {"leased": 2}


@pytest.mark.parametrize("state", ["c", ""])
def test_a_forged_event_is_a_problem_and_the_others_are_counted(made: Handmade, state: str) -> None:
    made.log(began(), accepted(made, 2), [Dropped(2, state, "stale")])
    verdict = check(made)
    assert [problem.what for problem in verdict.problems] == [
        f"an event, Dropped, contradicts itself or those before it: {state!r} is not a valid GroupState"
    ]
    assert (verdict.accepted, verdict.counts["queued"]) == (2, 2)


def test_a_forged_snapshot_is_a_problem(made: Handmade) -> None:
    kept = RetainedBatchSnapshot(
        TRAINER, version(1), True, Split.TRAIN, ((1,),), (("trained", "trained"),), False
    )
    made.log([*began(), kept])
    (problem, *_) = check(made).problems
    assert "a record of a snapshot, RetainedBatchSnapshot, contradicts itself" in problem.what


def test_a_lost_lease_goes_back_and_its_dead_are_dropped(made: Handmade) -> None:
    lease = made.lease([1, 2])
    made.log(began(), accepted(made, 2), [lease, Lost(1, True, "silent"), Dropped(2, "dead", "deliveries")])
    bury(made, 2)
    assert counted(made) == {"queued": 1, "dead": 1}


def test_a_rewind_brings_back_what_is_after_it_in_composition_and_order(made: Handmade) -> None:
    one, two, three = made.lease([1]), made.lease([2, 3], step=2), made.lease([4], step=3)
    steps = [one, settles(one, "g1"), two, settles(two, "g2", filtered=["g3"]), three]
    rewind = [Lost(three.number, True, "rewound", recalled=True), Rewound(TRAINER, version(1), "trainer-0")]
    again = [made.lease([2, 3], again=True), made.lease([4], again=True)]
    made.log(began(), accepted(made, 4), steps, rewind)
    verdict = check(made)
    assert (verdict.counts["queued"], verdict.counts["committed"], verdict.rewound) == (3, 1, 2)
    made.log(
        began(),
        accepted(made, 4),
        steps,
        rewind,
        [again[0], Lost(4, False, "given back"), again[0], again[1]],
        number=1,
    )
    assert counted(made) == {"leased": 3, "committed": 1}
    made.log(began(), accepted(made, 4), steps, rewind, [again[1]], number=1)
    assert (
        "group g2 (order 2) is not the same in the batch that came again and in the one that was due"
        in problems_of(made)
    )
    made.log(began(), accepted(made, 4), steps, rewind, [made.lease([2], again=True)], number=1)
    assert (
        "group g3 (order 3) is not the same in the batch that came again and in the one that was due"
        in problems_of(made)
    )
    made.log(began(), accepted(made, 4), steps, rewind, [made.lease([2])], number=1)
    assert any("from the rewind queue as if it were new" in line for line in problems_of(made))


def test_a_batch_that_was_lost_may_come_again_in_parts(made: Handmade) -> None:
    lease = made.lease([3], [1, 2])
    back = [lease, Lost(1, True, "rewound", recalled=True), Rewound(TRAINER, version(0), "trainer-0")]
    made.log(began(), accepted(made, 3), back, [made.lease([1], again=True), made.lease([2], again=True)])
    assert counted(made) == {"leased": 2, "queued": 1}
    parts = [RewoundBatchSnapshot(TRAINER, Split.TRAIN, ((order,),), True) for order in (1, 2, 3)]
    groups = [item(made.accept(order), 1) for order in (1, 2, 3)]
    made.log(began(), [group.accepted for group in groups], back, number=1)
    made.log([Numbers(4, 1, 1), *groups, *parts, ledger(3, queued=3)])
    assert counted(made) == {"queued": 3}
    made.log([Numbers(4, 1, 1), *groups, *parts[1:], ledger(3, queued=3)], number=2)
    assert problems_of(made)[0] == (
        "group g1 (order 1) was on the rewind queue before events-00000002.rmq, and is queued in it"
    )


def test_batches_that_are_not_kept_stay_counted_as_trained(made: Handmade) -> None:
    one, two = made.lease([1]), made.lease([2], step=2)
    made.log(
        began(), accepted(made, 2), [one, settles(one, "g1"), two, settles(two, "g2"), Forgot(TRAINER, 1)]
    )
    verdict = check(made)
    assert (verdict.counts["trained"], verdict.forgotten, verdict.groups_checked) == (2, 1, 1)
    made.log(began(), accepted(made, 2), [one, settles(one, "g1"), Forgot(TRAINER, 1 << 62)], number=1)
    assert (check(made).forgotten, check(made).groups_checked) == (1, 1)


def test_a_reset_discards_what_is_queued_or_leased(made: Handmade) -> None:
    one, two = made.lease([1]), made.lease([2], step=2)
    made.log(began(), accepted(made, 3), [one, settles(one, "g1"), two, WasReset("asked")])
    verdict = check(made)
    assert (verdict.counts["trained"], verdict.counts["discarded"], verdict.forgotten) == (1, 2, 1)
    assert verdict.reasons == {"discarded(reset)": 2}


def test_a_dead_group_that_is_queued_again_is_a_new_one(made: Handmade) -> None:
    made.log(
        began(), [made.accept(1), Dropped(1, "dead", "damaged")], [Requeued(1), made.accept(2, "g1", seq=1)]
    )
    verdict = check(made)
    assert verdict.problems == []
    assert (verdict.accepted, verdict.counts["queued"], verdict.counts["discarded"]) == (2, 1, 1)
    assert verdict.reasons == {"dead(damaged)": 1, "discarded(requeued)": 1}


def test_a_group_that_no_fact_names_yet_is_accepted_by_its_record(made: Handmade) -> None:
    made.log(began(), [made.accept(1)])
    made.accept(2, segment=2)
    made.acked("g1", "g2")
    assert counted(made) == {"queued": 2}
    made.log([Numbers(3, 0, 0), *map(item, accepted(made, 2)), ledger(2, queued=2), Began(2, 1, "disk")])
    assert problems_of(made) == []


def test_snapshots_on_the_way_are_those_of_the_facts(made: Handmade) -> None:
    one, two, three = made.lease([1], [2]), made.lease([3], step=2), made.lease([4], step=3)
    events: list[Event] = [
        one,
        settles(one, "g1"),
        settles(one, filtered=["g2"], rank=1),
        two,
        settles(two, "g3"),
    ]
    events += [three, Dropped(5, "expired", "stale")]
    made.log(began(), accepted(made, 6), events)
    known = {order: item(made.accept(order)) for order in (1, 2, 3, 4, 6)}
    states = (("trained",), ("filtered",))
    reasons = {"expired(stale)": 1, "passed(stale)": 3}
    whole = [
        Numbers(7, 3, 3),
        *known.values(),
        LeaseSnapshot(3, 3, TRAINER, Split.TRAIN, 3, version(2), 2, ((4,),), False, False, (("", "", None),)),
        RetainedBatchSnapshot(TRAINER, version(1), True, Split.TRAIN, ((1,), (2,)), states, False),
        RetainedBatchSnapshot(TRAINER, version(2), True, Split.TRAIN, ((3,),), (("trained",),), False),
        ledger(6, queued=1, leased=1, trained=2, filtered=1, expired=1, reasons=reasons),
    ]  # fmt: skip
    made.log(whole, [Rewound(TRAINER, version(1), "trainer-0")])
    assert counted(made) == {"queued": 2, "leased": 1, "committed": 1, "filtered": 1, "expired": 1}

    for index, changed, problem in (
        (1, None, "group g1 (order 1) was trained before events-00000002.rmq, and is not in it"),
        (6, None, "group g4 (order 4) was leased before events-00000002.rmq, and is queued in it"),
        (8, None, "group g3 (order 3) was trained before events-00000002.rmq, and is queued in it"),
        (9, ledger(6, queued=1, leased=1, trained=2, filtered=1, dead=1),
         "the ledger in events-00000002.rmq has 1 dead, by the events before it there are 0"),
        (9, ledger(6, rewound=1, queued=1, leased=1, trained=2, filtered=1, expired=1),
         "the ledger in events-00000002.rmq has 1 rewound, by the events before it there are 0"),
        (9, ledger(6, forgotten=1, queued=1, leased=1, trained=2, filtered=1, expired=1),
         "the ledger in events-00000002.rmq has 1 forgotten, by the events before it there are 0"),
        (9, ledger(6, queued=1, leased=1, trained=2, filtered=1, expired=1, reasons={"expired(late)": 1}),
         "the ledger in events-00000002.rmq has 1 expired(late), by the events before it there are 0"),
        (9, ledger(7, queued=1, leased=1, trained=2, filtered=1, expired=1),
         "the ledger of a snapshot has 7 accepted, which is not the sum"),
        (9, ledger(6, queued=2, leased=1, trained=2, filtered=1),
         "a snapshot names 1 groups that are queued, its ledger counts 2"),
        (7, RetainedBatchSnapshot(TRAINER, version(1), True, Split.TRAIN, ((2,), (1,)), states[::-1], False),
         "the batches kept in events-00000002.rmq are not those of the events before it"),
    ):  # fmt: skip
        broken = [*whole[:index], *([changed] if changed else []), *whole[index + 1 :]]
        made.log(broken, number=2)
        assert problem in problems_of(made)


def test_what_was_before_the_history_is_counted_without_names(made: Handmade) -> None:
    session = SessionSnapshot(
        SESSION,
        True,
        "sort3-0",
        "sort3",
        Split.TRAIN,
        1,
        0,
        "",
        (),
        0,
        3,
        0,
        False,
        False,
        2,
        3,
        0,
        0,
        ((4, 9),),
    )
    opened = Opened(SESSION + 1, "sort3-1", "sort3", Split.TRAIN, 1, 1, 1.0, 0.0, 0, "")
    made.log(
        [Numbers(5, 0, 0), session, item(made.accept(3)), ledger(4, queued=1, committed=2, dead=1)],
        [made.accept(5, seq=3), opened, Requeued(2), made.accept(6, "g2", seq=2)],
    )
    made.acked("g-a", "g-b", "g5", "g-d")
    verdict = check(made)
    assert verdict.problems == []
    assert verdict.since == 2001.0
    assert verdict.counts["committed"] == 2
    assert (verdict.counts["queued"], verdict.counts["dead"], verdict.counts["discarded"]) == (3, 0, 1)
    made.acked("g-a", "g-b", "g5", "g-d", "g-e")
    assert problems_of(made) == [
        f"group g-e was acked as number 5 of session {SESSION}, and was never accepted"
    ]
    made.acked("g-f", session=SESSION + 1)
    assert len(problems_of(made)) == 1
    made.acked("g-f", session=SESSION - 1)
    assert problems_of(made) == []


# Ledgers that do not.


def test_a_lost_group_is_named(made: Handmade) -> None:
    made.log(began(), [made.accept(1)])
    made.acked("g1", "g2", "g2")
    assert problems_of(made) == [
        f"group g2 was acked as number 2 of session {SESSION}, and was never accepted"
    ]


Doubtful = Callable[[Handmade], Sequence[Event]]


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (lambda m: [m.lease([1]), m.lease([1])], "group g1 (order 1) was leased as 2 while it was leased"),
        (lambda m: [m.lease([9])], "group ? (order 9) was leased as 1, and was never accepted"),
        (lambda m: [m.accept(1)], "group g1 (order 1) was accepted as an order that was given before"),
        (lambda m: [m.accept(3, seq=1)], f"group g3 (order 3) is number 1 of session {SESSION} for a second time"),
        (lambda m: [x := m.lease([1]), settles(x, "g1"), m.lease([1])], "was leased as 2 while it was trained"),
        (lambda m: [x := m.lease([1]), settles(x, "g2")], "group g1 (order 1) was left out when lease 1 was settled"),
        (lambda m: [x := m.lease([1]), settles(x, "g1", "g2")], "lease 1 settled group g2, which was not in it"),
        (lambda m: [settles(m.lease([1]), "g1")], "rank 0 settled lease 1, which is not open"),
        (lambda _: [Lost(5, True, "silent")], "lease 5 was lost, and was not open"),
        (lambda _: [Dropped(1, "expired", "stale"), Dropped(1, "dead", "damaged")], "while it was expired"),
        (lambda _: [Requeued(1)], "group g1 (order 1) was requeued while it was queued"),
        (lambda _: [Skipped(8, 1, 1, 1, "g9")], "group g9 was taken for one that is here already, and none is"),
        (lambda m: [m.lease([1], again=True)], "in the batch that came again"),
    ],
)  # fmt: skip
def test_facts_that_contradict_each_other_are_named(made: Handmade, events: Doubtful, problem: str) -> None:
    made.log(began(), accepted(made, 2), events(made))
    bury(made, 1)
    assert any(problem in line for line in problems_of(made)), problems_of(made)


def test_a_number_that_is_taken_for_a_group_that_is_here_is_fine(made: Handmade) -> None:
    made.log(began(), [made.accept(1), Skipped(8, 1, 1, 1, "g1")])
    assert problems_of(made) == []


def test_a_bit_flip_in_a_payload_is_found_unless_in_a_hurry(made: Handmade) -> None:
    made.log(began(), accepted(made, 3))
    place = made.accept(4).place
    assert place is not None
    flip(made.segment(), place.offset - 100)
    expected = "group g3 (order 3) is queued, and its record in groups-00000001.rmq at"
    assert any(line.startswith(expected) for line in problems_of(made))
    assert problems_of(made, quick=True) == []


@pytest.mark.parametrize("quick", [False, True])
def test_a_header_that_is_damaged_is_found_in_any_case(made: Handmade, quick: bool) -> None:
    made.log(began(), groups := accepted(made, 3))
    place = groups[1].place
    assert place is not None
    flip(made.segment(), place.offset + 5)
    assert problems_of(made, quick=quick) == [
        f"group g2 (order 2) is queued, and its record in groups-00000001.rmq at {place.offset} is damaged"
    ]


@pytest.mark.parametrize("quick", [False, True])
def test_only_what_is_needed_must_be_there(made: Handmade, quick: bool) -> None:
    lease = made.lease([1])
    made.log(began(), [made.accept(1), made.accept(2, segment=2)], [lease, settles(lease, "g1")])
    made.segment(1).unlink()
    assert problems_of(made, quick=quick) == [
        "group g1 (order 1) is trained, and its segment groups-00000001.rmq is gone"
    ]
    made.log(
        began(), [made.accept(1), made.accept(2, segment=2)], [lease, settles(lease, "g1"), COMMIT], number=1
    )
    made.segment(1).unlink()
    assert problems_of(made, quick=quick) == []


def test_a_stale_segment_is_not_taken_for_the_one_that_was_there(made: Handmade) -> None:
    made.log(began(), [made.accept(1), made.accept(2, segment=2)])
    made.segment(1).write_bytes(made.segment(2).read_bytes())
    assert len(problems_of(made)) == 1


def test_a_record_of_another_group_is_not_the_record(made: Handmade) -> None:
    made.log(began(), [made.accept(1)])
    other = Handmade(made.layout.root)
    other.accept(1, "h1")
    assert len(problems_of(made)) == 1


def test_a_record_that_no_fact_ever_named_is_found(made: Handmade) -> None:
    first, _, third = accepted(made, 3)
    made.log(began(), [first, third])
    assert any("lies in groups-00000001.rmq" in line and "g2 (order 2)" in line for line in problems_of(made))


def test_a_group_that_was_lost_to_damage_stays_a_problem(made: Handmade) -> None:
    """Its death is in the ledger, and the ledger adds up; but it was accepted for good."""
    made.log(began(), accepted(made, 3), [Dropped(2, "dead", "damaged")])
    bury(made, 2)
    found = ["group g2 (order 2) is dead, since its record was damaged or its segment gone"]
    assert problems_of(made) == found
    counts = {"queued": 2, "dead": 1}
    reasons = {"dead(damaged)": 1}
    state = [
        Numbers(4, 0, 0),
        item(made.accept(1)),
        item(made.accept(3)),
        ledger(3, **counts, reasons=reasons),
    ]
    made.log_file().unlink()
    made.log([*state, Began(2, 1, "disk")], number=2)
    assert problems_of(made) == [
        "1 groups were lost to damage before the history begins; `rolloutmq dead list` has their ids"
    ]


def test_a_dead_group_must_have_its_letter(made: Handmade) -> None:
    made.log(began(), accepted(made, 2), [Dropped(1, "dead", "deliveries"), Dropped(2, "dead", "deliveries")])
    bury(made, 1)
    assert problems_of(made) == ["group g2 (order 2) is dead, and its dead letter is missing"]
    bury(made, 2)
    assert problems_of(made) == []
    (path,) = made.layout.dead.glob("*2.rmq")
    flip(path, 30)
    assert problems_of(made) == [
        "group g2 (order 2) is dead, and its dead letter is damaged: the beginning of the file is damaged"
    ]


def test_what_the_trainer_learned_from_must_be_trained(made: Handmade) -> None:
    lease = made.lease([1])
    made.log(began(), accepted(made, 3), [lease, settles(lease, "g1")])
    made.trained(batch(1, "g1"), batch(2, "g2"), batch(3, "g9"))
    assert problems_of(made) == [
        "group g2 (order 2) was trained, and is queued",
        "group g9 was trained, and was never accepted",
    ]
    made.trained(batch(1, "g1"), batch(2, "g1"))
    assert problems_of(made) == ["group g1 (order 1) was trained 2 times"]
    made.trained(batch(1, "g1"), batch(0, resumed=True), batch(1, "g1"))
    assert problems_of(made) == []
    made.trained(batch(1, "g2"), batch(0, resumed=True))
    assert problems_of(made) == []


def test_the_trainer_may_say_so_before_its_settlement_or_lose_the_lease(made: Handmade) -> None:
    leases = made.lease([1]), made.lease([2]), made.lease([3])
    lost = [Lost(1, True, "silent"), Dropped(1, "expired", "stale")]
    made.log(began(), accepted(made, 3), [*leases, *lost, settles(leases[1], filtered=["g2"])])
    made.trained(batch(1, "g1"), batch(2, "g3"))
    assert problems_of(made) == []
    made.trained(batch(1, "g2"))
    assert problems_of(made) == ["group g2 (order 2) was trained, and is filtered"]


def test_damage_and_gaps_of_the_logs_are_problems(made: Handmade) -> None:
    made.log(began(), [made.accept(1)], [made.accept(2)])
    flip(made.log_file(), made.log_file().read_bytes().index(b"g1"))
    assert any("are damaged" in line for line in problems_of(made))


def test_a_journal_that_is_not_there_is_a_problem(run_dir: Path) -> None:
    verdict = verify(run_dir / "journal", run_dir / "dead", Witness)
    assert [str(problem) for problem in verdict.problems] == [f"there is no journal in {run_dir}"]


def test_what_a_living_broker_changes_meanwhile_is_no_problem(made: Handmade) -> None:
    lease = made.lease([1])
    settled = [lease, settles(lease, "g1"), COMMIT]
    made.log(began(), accepted(made, 2), settled[:1])
    made.segment().unlink()
    looks = 0

    def meanwhile() -> Witness:
        nonlocal looks
        looks += 1
        if looks == 2:
            made.log(began(), accepted(made, 2), settled, number=1)
        return Witness()

    verdict = verify(made.journal, made.layout.dead, meanwhile)
    assert (verdict.problems, looks) == ([], 2)
