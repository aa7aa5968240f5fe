"""Heartbeats of a relay: what the broker hears of it, and the address that further relays are told."""

import pytest

from rolloutmq.bus.transport.keys.ticket import new_secret
from rolloutmq.launch.commands.remote import relay_beats
from rolloutmq.launch.commands.remote.programs import Passing, Way, join_relay
from rolloutmq.launch.commands.remote.relay_beats import RelayBeats
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import Connection, RelayState, StreamAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.joining import WAIT_CHARS

BROKER = "tcp://head:7760"
STATE = RelayState(number=3, version=PolicyVersion(1, 2), waits_for="x" * 1000)


def served(port: int = 7764) -> StreamAddress:
    return StreamAddress(host="127.0.0.1", port=port, secret=new_secret(), sealed=True, sender=(1, 2, 3))


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [
        ("tcp://0.0.0.0:0", "", "tcp://10.0.0.9:7764"),
        ("tcp://[::]:0", "", "tcp://10.0.0.9:7764"),
        ("tcp://10.0.0.7:7764", "", "tcp://10.0.0.7:7764"),
        ("tcp://[fd00::7]:7764", "", "tcp://[fd00::7]:7764"),
        ("tcp://0.0.0.0:7764", "gpu7.cluster", "tcp://gpu7.cluster:7764"),
        ("tcp://0.0.0.0:7764", "fd00::1", "tcp://[fd00::1]:7764"),
    ],
)
def test_others_are_told_an_address_that_they_reach(
    listen: str, advertise: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_beats, "own_host", {"head": "10.0.0.9"}.__getitem__)
    stream = served()
    beat = RelayBeats("relay.b", listen, advertise).beat(STATE, stream, BROKER)
    assert (beat.serves, beat.secret, beat.sealed) == (told, stream.secret, True)
    assert (beat.name, beat.version, beat.ends) == ("relay.b", PolicyVersion(1, 2), False)
    assert beat.waits_for == "x" * WAIT_CHARS


@pytest.mark.parametrize("stream", [None, served()])
def test_without_an_address_no_secret_is_told(stream: StreamAddress | None) -> None:
    """The directory may have the address of another relay, as one that served the run before."""
    beat = RelayBeats("relay.b").beat(STATE, stream, BROKER, ends=True)
    assert (beat.serves, beat.secret, beat.ends) == ("", "", True)


def test_before_it_listens_the_relay_serves_none() -> None:
    beat = RelayBeats("relay.b", "tcp://0.0.0.0:7764").beat(STATE, None, BROKER)
    assert (beat.serves, beat.secret) == ("", "")


@pytest.mark.parametrize(
    ("passing", "key"),
    [
        (Passing(behind="relay.b"), "--behind"),
        (Passing(behind="../x"), "--behind"),
        (Passing(behind="inference.b"), "--behind"),
        (Passing(listen="0.0.0.0:7764"), "--listen"),
        (Passing(listen="http://h:1"), "--listen"),
    ],
)
def test_wrong_names_and_addresses_are_refused_before_anything_starts(passing: Passing, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        join_relay(passing, Way(Connection(addresses=(BROKER,)), name="b"))
    assert refused.value.path == key
