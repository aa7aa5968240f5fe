"""A share counts its groups once for all containers, and the counts are those of its groups one by one."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.services.broker.bench import stored

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.split_queue import Load

GROUPS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.integers(0, 99), st.integers(0, 3)))


def group(order: int, env: str, sequences: int, tokens: int, step: int) -> StoredGroup:
    one = stored(order, sequences, env=env)
    one.header = replace(one.header, nbytes=10 + tokens, tokens=tokens, oldest=PolicyVersion(0, step))
    return one


@given(GROUPS)
def test_the_totals_of_a_lane_are_those_of_its_groups(given: list[tuple[str, int, int, int]]) -> None:
    groups = [group(order, *one) for order, one in enumerate(given, 1)]
    share = BatchShare(groups)
    assert [totals.first.env for totals in share.lanes] == list(dict.fromkeys(one.env for one in groups))
    for totals in share.lanes:
        own = [one for one in groups if one.env == totals.first.env]
        assert totals.first is own[0]
        one_by_one, together = Load(), Load()
        for one in own:
            one_by_one.add(one)
        together.count(totals)
        assert together.as_tuple() == one_by_one.as_tuple()
        assert totals.oldest == {one.header.oldest for one in own}
    assert share.nbytes == sum(one.header.nbytes for one in groups)
    assert share.sequences == sum(one.header.sequences for one in groups)


def test_groups_counted_together_count_in_the_total_too_and_can_be_counted_out() -> None:
    total = Load()
    part = Load(total)
    share = BatchShare([stored(1), stored(2, sequences=3)])
    (totals,) = share.lanes
    part.count(totals)
    assert part.as_tuple() == total.as_tuple() == (2, 7, 70, 200)
    part.count(totals, -1)
    assert part.as_tuple() == total.as_tuple() == (0, 0, 0, 0)
