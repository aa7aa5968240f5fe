"""The same group is accepted once: while it exists, and while it is remembered."""

from itertools import count

import pytest
from msgspec.structs import replace
from tests.services.broker.bench import Bench, config, ids, stored

from rolloutmq.schemas.wire.control import Reset
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.requests import Commit
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.groups import Groups, identity


def refused(bench: Bench) -> int:
    return bench.status().rejected_by_reason.get("duplicate", 0)


def test_identity_is_environment_split_id_size_and_contents() -> None:
    head = stored(1).header
    changed = {"group_id": "another", "nbytes": head.nbytes + 1, "crc": head.crc ^ 1}
    others = [replace(head, **{name: value}) for name, value in changed.items()]
    mine = identity("e", Split.TRAIN, head)
    found = {mine, identity("f", Split.TRAIN, head), identity("e", Split.EVAL, head)}
    found |= {identity("e", Split.TRAIN, other) for other in others}
    assert len(found) == 6
    assert mine == identity("e", Split.TRAIN, replace(head, seq=9, position=9))
    assert 0 <= mine < 1 << 64


def test_ended_groups_are_remembered_up_to_their_number() -> None:
    groups = Groups(remembered=2)
    made = [stored(order) for order in (1, 2, 3)]
    for group in made:
        groups.add(group)
    for group in made:
        assert groups.present(identity("e", Split.TRAIN, group.header)) is group
        groups.gone(BatchShare((group,)))
        groups.gone(BatchShare((group,)))
    assert [groups.known(identity("e", Split.TRAIN, group.header)) for group in made] == [False, True, True]
    assert groups.present(identity("e", Split.TRAIN, made[2].header)) is None
    groups.clear()
    assert not groups.known(identity("e", Split.TRAIN, made[2].header))


def test_groups_that_end_together_end_as_one_after_the_other() -> None:
    """One of them has ended before."""
    together, apart = Groups(remembered=2), Groups(remembered=2)
    for groups in (together, apart):
        made = [stored(order) for order in (1, 2, 3, 4)]
        for group in made:
            groups.add(group)
        groups.gone(BatchShare((made[1],)))
        shares = [made[:3]] if groups is together else [[group] for group in made[:3]]
        for share in shares:
            groups.gone(BatchShare(share))
        assert [group.body.in_memory for group in made] == [False, False, False, True]
    assert together.ended == apart.ended
    assert len(together) == len(apart) == together.of_lane("e", Split.TRAIN) == 1
    assert apart.of_lane("e", Split.TRAIN) == 1


def test_a_group_sent_again_is_accepted_once() -> None:
    """In one session, by another session and by other producers; queued, leased, settled and committed."""
    bench = Bench(config(broker={"max_deliveries": 3}, e={"max_staleness": 99}))
    first, second = bench.producer("p"), bench.producer("q")
    bench.consumer()
    sent = count(1)

    def again() -> None:
        for peer in (first, second, bench.producer("new")):
            peer.deliver(peer.next(group_id="same"))
            assert refused(bench) == next(sent)

    first.deliver(first.next(group_id="same"))
    first.deliver(first.next(group_id="other"))
    again()
    batch = bench.batch(0)
    assert sorted(ids(batch)) == ["other", "same"]
    again()
    bench.settle(batch)
    again()
    commit = Commit(consumer="c", group="trainer", version=PolicyVersion(0, 1))
    bench.send(commit)
    again()
    assert bench.pressure().ledger.accepted == 2


def test_the_same_id_with_other_contents_is_another_group() -> None:
    bench = Bench()
    peer = bench.producer()
    for frames in (1, 2, 3):
        peer.deliver(peer.next(group_id="same", frames=frames, nbytes=100 + frames))
    assert refused(bench) == 0
    assert bench.pressure().ledger.accepted == 3


def test_eval_and_train_do_not_count_as_one() -> None:
    bench = Bench()
    for split in Split:
        peer = bench.producer("p", split=split)
        peer.deliver(peer.next(group_id="same"))
    assert refused(bench) == 0


@pytest.mark.parametrize("restart", ["events", "snapshot"])
def test_a_restart_remembers_ended_groups(restart: str) -> None:
    bench = Bench(config(broker={"remembered_groups": 3}, e={"max_staleness": 99}))
    peer = bench.producer()
    names = peer.send(6)
    bench.consumer()
    for step in range(3):
        bench.train(step)
    bench.send(Commit(consumer="c", group="trainer", version=PolicyVersion(0, 3)))
    if restart == "snapshot":
        bench.restart()
    later = bench.reborn()
    other = later.producer("q")
    for name in names:
        other.deliver(other.next(group_id=name))
    assert refused(later) == 3
    assert later.pressure().ledger.accepted == 9


def test_a_reset_forgets_them() -> None:
    bench = Bench()
    bench.producer().send(1, group_id="same")
    bench.send(Reset(reason="again"))
    bench.producer().send(1, group_id="same")
    assert refused(bench) == 0
