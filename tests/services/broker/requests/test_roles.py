"""What each role may do: the table is complete, and its refusals say what to do."""

from typing import get_args

import pytest

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.control import Drain, GetStatus, Reset, SetValues, Shutdown
from rolloutmq.schemas.wire.joining import GetWeightsTicket
from rolloutmq.schemas.wire.requests import GetInfo, Pull, RegisterProducer, Request
from rolloutmq.services.broker.requests.roles import HEARS, REQUESTS, TELLS, hears, refusal, tells


def kinds(union: object) -> set[type]:
    """Return the classes of a union of unions."""
    found = get_args(union)
    return {kind for one in found for kind in kinds(one)} if found else {union}  # type: ignore[arg-type]


def test_every_request_is_in_the_table() -> None:
    assert REQUESTS.keys() == kinds(Request)
    assert HEARS.keys() == TELLS.keys() == set(Role)


def test_an_unlisted_request_is_refused_to_all_but_admins() -> None:
    class Unlisted:
        pass

    for role in Role:
        assert bool(refusal("k", role, Unlisted)) is (role is not Role.ADMIN)
    assert (
        refusal("k", Role.WORKER, Unlisted)
        == "key k (role worker) may not send Unlisted; use a key of role admin"
    )


def test_refusals_name_key_role_and_remedy() -> None:
    assert refusal("worker-7", Role.WORKER, Drain) == (
        "key worker-7 (role worker) may not drain workers; use a key of role admin"
    )
    assert (
        refusal("m", Role.MONITOR, Pull)
        == "key m (role monitor) may not pull batches; use a key of role admin or trainer"
    )


def test_engines_and_trainers_get_the_weights() -> None:
    assert [role for role in Role if not refusal("k", role, GetWeightsTicket)] == [
        Role.TRAINER,
        Role.ENGINE,
        Role.ADMIN,
    ]


@pytest.mark.parametrize("kind", [Drain, Reset, Shutdown, SetValues])
def test_orders_are_for_admins_alone(kind: type) -> None:
    assert [role for role in Role if not refusal("k", role, kind)] == [Role.ADMIN]


def test_roles_are_apart() -> None:
    assert [role for role in Role if not refusal("k", role, RegisterProducer)] == [Role.WORKER, Role.ADMIN]
    assert [role for role in Role if not refusal("k", role, Pull)] == [Role.TRAINER, Role.ADMIN]
    assert [role for role in Role if not refusal("k", role, GetStatus)] == [Role.MONITOR, Role.ADMIN]
    assert not any(refusal("k", role, GetInfo) for role in Role)


def test_topics_of_roles() -> None:
    assert hears(Role.WORKER, topics.ack("w-1"))
    assert hears(Role.WORKER, topics.control("w-1"))
    for topic in (b"", b"a", b"telemetry.", topics.STEP):
        assert not hears(Role.WORKER, topic)
        assert hears(Role.MONITOR, topic)
    assert tells(Role.TRAINER, topics.STEP)
    assert tells(Role.WORKER, topics.telemetry("trace", "w-1"))
    for topic in (
        topics.STEP,
        topics.POLICY,
        topics.telemetry("scale", "e"),
        topics.telemetry("evaluation", "r"),
    ):
        assert not tells(Role.WORKER, topic)
        assert not tells(Role.MONITOR, topic)
