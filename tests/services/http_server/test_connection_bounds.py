"""Which connection makes room, what the log says of it, and how many descriptors a server leaves to the others."""

import resource

import pytest

from rolloutmq.services.http_server.connection_bounds import CLIENTS_LEAST, ConnectionBounds, client_limit


class Peer:
    """A connection that is idle or not."""

    def __init__(self, bounds: ConnectionBounds, *, is_idle: bool = True) -> None:
        self.is_idle = is_idle
        self.is_dropped = False
        self._bounds = bounds
        bounds.add(self)

    def drop(self) -> None:
        self.is_dropped = True
        self._bounds.discard(self)


def test_the_one_idle_for_the_longest_time_makes_room() -> None:
    bounds = ConnectionBounds("test", 3)
    busy, old, worked = Peer(bounds, is_idle=False), Peer(bounds), Peer(bounds)
    bounds.touch(old)
    fresh = Peer(bounds)
    assert [one.is_dropped for one in (busy, old, worked, fresh)] == [False, False, True, False]
    assert (len(bounds), bounds.dropped) == (3, 1)


def test_the_new_one_goes_if_all_are_at_work() -> None:
    bounds = ConnectionBounds("test", 2)
    busy = [Peer(bounds, is_idle=False) for _ in range(2)]
    fresh = Peer(bounds, is_idle=False)
    assert fresh.is_dropped
    assert not any(one.is_dropped for one in busy)


def test_a_dropped_one_is_not_taken_in_again() -> None:
    bounds = ConnectionBounds("test", 1)
    old = Peer(bounds)
    Peer(bounds)
    bounds.touch(old)
    assert len(bounds) == 1


def test_many_drops_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    bounds = ConnectionBounds("engine", 1)
    for _ in range(100):
        Peer(bounds)
    (record,) = caplog.records
    assert "server=engine limit=1" in record.getMessage()


@pytest.mark.parametrize(("soft", "limit"), [(8_000, 3_000), (100, CLIENTS_LEAST), (10**7, 16_384)])
def test_a_server_leaves_descriptors_to_files_and_the_bus(
    monkeypatch: pytest.MonkeyPatch, soft: int, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert client_limit() == limit


def test_no_limit_of_descriptors_is_no_endless_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (unlimited, unlimited))
    assert client_limit() == 16_384
