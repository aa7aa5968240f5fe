"""Permits: each ends once, and the counts always add up."""

from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.bus.producer.credit import Credit, Permit
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Ack, Durability, Wait


def granted(starts: int, size: int = 0) -> Credit:
    credit = Credit()
    credit.grant(
        Ack(
            epoch=1,
            session=1,
            cumulative=0,
            byte_limit=size,
            start_limit=starts,
            policy=PolicyVersion(2, 5),
            durability=Durability.DISK,
            wait=Wait.NO_CREDIT,
        )
    )
    return credit


def test_permits_end_at_the_limit() -> None:
    credit = granted(2, 77)
    assert credit.begin() is not None
    assert credit.begin() is not None
    assert credit.begin() is None
    assert (credit.byte_limit, credit.policy, credit.wait) == (77, PolicyVersion(2, 5), Wait.NO_CREDIT)
    assert credit.durability is Durability.DISK


def test_an_abandoned_permit_stays_used_and_one_put_back_does_not() -> None:
    credit = granted(1)
    permit = credit.begin()
    assert permit is not None
    credit.put_back(permit)
    credit.put_back(permit)
    permit = credit.begin()
    assert permit is not None
    with permit:
        pass
    assert not credit.abandon(permit)
    assert not credit.arrive(permit)
    assert credit.begin() is None
    assert (credit.begun, credit.in_hand, credit.abandoned) == (1, 0, 1)


def test_a_new_session_takes_over_what_is_in_hand() -> None:
    credit = granted(9)
    permits = [credit.begin() for _ in range(4)]
    assert permits[0] is not None
    assert permits[1] is not None
    credit.abandon(permits[0])
    credit.arrive(permits[1])
    credit.restart(spooled=1)
    assert (credit.begun, credit.in_hand, credit.abandoned) == (3, 2, 0)


def test_a_permit_tells_the_policy_of_its_beginning() -> None:
    credit = granted(1)
    permit = credit.begin()
    assert permit is not None
    credit.grant(
        Ack(epoch=1, session=1, cumulative=0, byte_limit=0, start_limit=0, policy=PolicyVersion(3, 4))
    )
    assert (permit.policy, permit.step) == (PolicyVersion(2, 5), 5)
    assert credit.policy == PolicyVersion(3, 4)


def test_lower_limits_hold_back_what_was_not_begun() -> None:
    credit = granted(3)
    permits = [credit.begin() for _ in range(3)]
    credit.grant(Ack(epoch=2, session=1, cumulative=0, byte_limit=0, start_limit=2))
    assert credit.begin() is None
    assert permits[2] is not None
    assert credit.arrive(permits[2])


def test_a_pause_starts_nothing_and_what_was_granted_before_does_not_count_after_it() -> None:
    credit = granted(3)
    assert credit.begin() is not None
    credit.pause(paused=True)
    assert credit.begin() is None
    assert not credit.may_begin_all(1)
    credit.pause(paused=False)
    assert credit.begin() is None, "others may have got it"
    credit.grant(Ack(epoch=2, session=1, cumulative=0, byte_limit=0, start_limit=2))
    assert credit.begin() is not None


def test_a_restored_session_has_nothing_in_hand() -> None:
    credit = granted(9)
    credit.restore(produced=4, abandoned=2)
    assert (credit.begun, credit.in_hand, credit.abandoned) == (6, 0, 2)


@given(st.lists(st.sampled_from(["begin", "arrive", "abandon", "put_back"]), max_size=80), st.integers(0, 20))
def test_every_permit_is_counted_once(steps: list[str], limit: int) -> None:
    credit, permits, arrived = granted(limit), list[Permit](), 0
    for index, step in enumerate(steps):
        if step == "begin":
            permit = credit.begin()
            assert (permit is None) == (credit.begun >= limit and permit is None)
            permits += [permit] if permit else []
        elif permits:
            ended = getattr(credit, step)(permits[index % len(permits)])
            arrived += step == "arrive" and bool(ended)
        assert credit.begun == credit.in_hand + credit.abandoned + arrived <= limit
        assert credit.in_hand == sum(permit.is_open for permit in permits)
