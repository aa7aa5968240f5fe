"""A name without an address of IPv4 is reached by IPv6, and no silent name service holds anybody up."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.way import families
from rolloutmq.bus.transport.way.families import Families

FAMILIES = {
    "old": [socket.AF_INET],
    "new": [socket.AF_INET6],
    "both": [socket.AF_INET6, socket.AF_INET],
    "none": [],
}
LIMIT_S = 30.0


class Names:
    """A name service; it answers while it is `free`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.free = threading.Event()
        self.free.set()
        self.known = dict(FAMILIES)

    def getaddrinfo(self, name: str, *_: Any, **__: Any) -> list[tuple[int, int, int, str, Any]]:
        self.asked.append(name)
        assert self.free.wait(LIMIT_S)
        if not self.known.get(name):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, 1, 6, "", ("x", 0)) for family in self.known[name]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(families, "LOOK_S", LIMIT_S)
    yield made
    made.free.set()


@pytest.mark.parametrize(
    ("host", "is_ipv6"),
    [("old", False), ("new", True), ("both", False), ("none", False), ("10.0.0.1", False), ("[::1]", True)],
)
def test_only_a_host_without_an_address_of_ipv4_needs_ipv6(names: Names, host: str, is_ipv6: bool) -> None:
    assert Families().is_ipv6(f"tcp://{host}:1") is is_ipv6
    assert names.asked == [host] * (host in FAMILIES), "nobody looks up an address"


def test_an_answer_is_kept_for_some_time(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Families()
    assert [found.is_ipv6("tcp://new:1") for _ in range(3)] == [True] * 3
    assert names.asked == ["new"]
    monkeypatch.setattr(families, "KEPT_S", -1.0)
    names.known["new"] = []
    assert found.is_ipv6("tcp://new:1"), "the last answer holds while the name service knows nothing"
    names.known["new"] = [socket.AF_INET]
    assert not found.is_ipv6("tcp://new:1")


def test_a_silent_name_service_holds_nobody_up(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "LOOK_S", 0.01)
    names.free.clear()
    found = Families()
    assert not found.is_ipv6("tcp://new:1")
    assert not found.is_ipv6("tcp://new:1")
    assert names.asked == ["new"], "one look-up at a time"
    names.free.set()
    monkeypatch.setattr(families, "LOOK_S", LIMIT_S)
    assert found.is_ipv6("tcp://new:1")


@pytest.mark.parametrize(("host", "option"), [("old", 0), ("new", 1), ("both", 0)])
def test_sockets_are_connected_by_the_family_of_the_name(
    names: Names, monkeypatch: pytest.MonkeyPatch, host: str, option: int
) -> None:
    monkeypatch.setattr(sockets, "families", Families())
    context = sockets.make_context()
    try:
        with sockets.client_dealer(context, f"tcp://{host}:1") as made:
            assert made.getsockopt(zmq.IPV6) == option
    finally:
        context.term()
    assert names.asked == [host]
