"""Relays of other hosts: names, tickets by the relay's own clock, and what is refused."""

from typing import Any

import pytest

from rolloutmq.bus.transport.keys import ticket
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.joining import RelayBeat, WeightsTicket
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.services.broker.io import relays as module
from rolloutmq.services.broker.io.relays import GONE_S, TAKEN_S, Relays

SECRET = "ab" * 32
YEARS_S = 1e8


def beat(name: str = "relay.b", **about: Any) -> RelayBeat:
    return RelayBeat(name=name, host="b", **about)


def serving(name: str = "relay.b", **about: Any) -> RelayBeat:
    return beat(name, serves="tcp://10.0.0.7:7764", secret=SECRET, **about)


def refusal(reply: object, code: ErrorCode) -> str:
    assert isinstance(reply, ErrorReply)
    assert reply.code is code
    return reply.detail


def test_a_ticket_is_valid_by_the_clock_of_the_relay() -> None:
    relays = Relays()
    assert relays.beat(serving(at=YEARS_S), 5.0, "engine-b") == Ok()
    made = relays.ticket("relay.b", 7.0, "engine-c")
    assert isinstance(made, WeightsTicket)
    assert (made.host, made.port, made.sealed) == ("10.0.0.7", 7764, True)
    shown = ticket.read(made.shown, YEARS_S + 2.0)
    assert shown.name == "engine-c"
    assert made.key == ticket.key_of(SECRET, made.shown)
    assert shown.until == YEARS_S + 2.0 + ticket.VALID_S


def test_what_is_heard_is_told_until_it_is_silent() -> None:
    relays = Relays()
    relays.beat(serving(version=PolicyVersion(1, 2), waits_for="x"), 1.0, "engine-b")
    (told,) = relays.report(3.0)
    assert (told.name, told.host, told.key, told.silent_s) == ("relay.b", "b", "engine-b", 2.0)
    assert (told.version, told.waits_for, told.serves) == (PolicyVersion(1, 2), "x", "tcp://10.0.0.7:7764")
    relays.sweep(1.0 + GONE_S)
    assert relays.report(0.0)
    relays.sweep(1.1 + GONE_S)
    assert not relays.report(0.0)


def test_relays_behind_each_other_get_no_ticket_and_hear_why() -> None:
    """They passed the same weights to and fro without a pause, and `status` gave no reason."""
    relays = Relays()
    behind = {"relay.a": "relay.c", "relay.b": "relay.a", "relay.c": "relay.b", "relay.d": "relay.c"}
    for name, other in behind.items():
        relays.beat(serving(name=name, behind=other), 1.0, "k")
    for name in behind:
        told = refusal(relays.ticket(name, 1.0, "k"), ErrorCode.INVALID)
        assert "get the weights from each other, and none from the run" in told
        assert all(one in told for one in ("relay.a", "relay.b", "relay.c"))
        assert "relay.d" not in told
    relays.beat(serving(name="relay.c"), 2.0, "k")
    for name in behind:
        assert isinstance(relays.ticket(name, 2.0, "k"), WeightsTicket)
    relays.beat(serving(name="relay.c", behind="relay.c"), 3.0, "k")
    assert "relay: relay.c get" in refusal(relays.ticket("relay.d", 3.0, "k"), ErrorCode.INVALID)


def test_relays_of_copies_of_one_machine_do_not_share_a_name() -> None:
    """Their hosts have one name, so do the relays, and their one entry told now of the one, now of the other."""
    relays = Relays()
    assert relays.beat(beat(network="net-1"), 1.0, "k") == Ok()
    for other in (beat(network="net-2"), beat(network="net-2", ends=True)):
        told = refusal(relays.beat(other, 2.0, "k"), ErrorCode.FORBIDDEN)
        assert (
            "a relay of another host called b has it (got relay.b of host b); give each relay a --name"
            in told
        )
    assert relays.beat(beat(network="net-1"), 3.0, "k") == Ok()
    assert relays.beat(beat(network="net-2"), 3.1 + TAKEN_S, "k") == Ok(), "it has started again"


def test_an_orderly_end_is_told_at_once() -> None:
    relays = Relays()
    relays.beat(beat(), 1.0, "k")
    assert relays.beat(beat(ends=True), 1.0, "k") == Ok()
    assert not relays.report(1.0)


def test_a_name_belongs_to_its_key_while_it_is_heard() -> None:
    relays = Relays()
    relays.beat(serving(), 1.0, "engine-b")
    for other in (beat(), beat(ends=True)):
        detail = refusal(relays.beat(other, 1.0, "engine-c"), ErrorCode.FORBIDDEN)
        assert "relay.b with key engine-c" in detail
    relays.sweep(2.0 + GONE_S)
    assert relays.beat(beat(), 40.0, "engine-c") == Ok()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (beat("inference.b"), "must be relay.NAME"),
        (beat(serves="http://10.0.0.7:1", secret=SECRET), "serves: must be tcp"),
        (beat(serves="tcp://10.0.0.7:7764"), "with a secret"),
    ],
)
def test_wrong_heartbeats_are_refused(wrong: RelayBeat, told: str) -> None:
    assert told in refusal(Relays().beat(wrong, 0.0, "k"), ErrorCode.INVALID)


def test_a_relay_that_is_unknown_or_serves_none_has_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RELAYS_LIMIT", 2)
    relays = Relays()
    relays.beat(serving(), 1.0, "k")
    relays.beat(beat("relay.c"), 1.0, "k")
    refusal(relays.beat(beat("relay.d"), 1.0, "k"), ErrorCode.LIMIT)
    unknown = refusal(relays.ticket("relay.x", 1.0, "k"), ErrorCode.UNKNOWN)
    assert "no relay relay.x is heard (those that serve others: relay.b)" in unknown
    assert "--listen" in refusal(relays.ticket("relay.c", 1.0, "k"), ErrorCode.UNKNOWN)
