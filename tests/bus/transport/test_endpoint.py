"""Endpoints: private, short enough, claimed by one broker at a time, found by clients."""

import asyncio
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport import endpoint, sockets
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.errors import (
    AddressInUseError,
    BrokerUnavailableError,
    ConfigError,
    MalformedError,
)
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.replies import InfoReply, RunInfo
from rolloutmq.schemas.wire.requests import GetInfo

FOUND = Endpoints(ingest="ipc://i", serve="ipc://s", events="ipc://e", publish="ipc://p", pid=1, epoch=2)


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_sockets_lie_in_a_private_directory_and_are_removed(layout: RunLayout) -> None:
    with endpoint.bindings(BrokerConfig(), layout) as addresses:
        paths = [Path(addresses[name].removeprefix("ipc://")) for name in endpoint.SOCKETS]
        assert {path.parent for path in paths} == {layout.sockets.resolve()}
        assert _mode(layout.sockets) == 0o700
        for path in paths:
            path.touch()
    assert list(layout.sockets.iterdir()) == []


def test_long_run_directory_gets_a_short_place_of_its_own(run_dir: Path) -> None:
    layout = RunLayout(run_dir / ("x" * 100))
    with endpoint.bindings(BrokerConfig(), layout) as addresses:
        directory = Path(addresses["serve"].removeprefix("ipc://")).parent
        assert directory.parent == Path(tempfile.gettempdir())
        assert _mode(directory) == 0o700
        for address in addresses.values():
            assert len(address.removeprefix("ipc://").encode()) <= endpoint.IPC_PATH_LIMIT_BYTES
    assert not directory.exists()


def test_wide_open_directory_is_closed_first(layout: RunLayout) -> None:
    layout.sockets.mkdir()
    layout.sockets.chmod(0o777)
    with endpoint.claim(layout):
        assert _mode(layout.sockets) == 0o700


def test_link_is_no_private_directory(layout: RunLayout, tmp_path: Path) -> None:
    layout.sockets.symlink_to(tmp_path)
    with pytest.raises(AddressInUseError, match="no directory"), endpoint.claim(layout):
        pass


def test_second_broker_is_told_who_holds_the_sockets(layout: RunLayout) -> None:
    with (
        endpoint.claim(layout),
        pytest.raises(AddressInUseError, match=f"process {os.getpid()}"),
        endpoint.claim(layout),
    ):
        pass
    with endpoint.claim(layout):
        pass


def test_epochs_grow_even_if_the_clock_goes_back(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    for wall_ns in (5_000, 4_000, 6_000):
        monkeypatch.setattr("time.time_ns", lambda wall_ns=wall_ns: wall_ns)
        with endpoint.claim(layout) as epoch:
            epochs.append(epoch)
    assert epochs == [5_000, 5_001, 6_000]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "example.org", "::"])
def test_plain_tcp_beyond_this_machine_must_be_allowed(layout: RunLayout, host: str) -> None:
    refused = BrokerConfig(transport="tcp", host=host)
    with (
        pytest.raises(ConfigError, match=r"broker\.insecure = true") as caught,
        endpoint.bindings(refused, layout),
    ):
        pass
    assert caught.value.path == "broker.host"
    allowed = BrokerConfig(transport="tcp", host=host, insecure=True)
    with endpoint.bindings(allowed, layout) as addresses:
        assert all(address.endswith(":*") for address in addresses.values())


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "tcp://127.0.0.1:*"), ("::1", "tcp://[::1]:*")])
def test_loopback_is_allowed(layout: RunLayout, host: str, address: str) -> None:
    with endpoint.bindings(BrokerConfig(transport="tcp", host=host), layout) as addresses:
        assert addresses["serve"] == address


def test_wildcard_becomes_an_address_that_can_be_connected_to() -> None:
    assert endpoint.connectable("tcp://127.0.0.1:5") == "tcp://127.0.0.1:5"
    for bound in ("tcp://0.0.0.0:5", "tcp://[::]:5"):
        connectable = endpoint.connectable(bound)
        assert connectable.endswith(":5")
        assert "0.0.0.0" not in connectable
        assert "::" not in connectable


async def test_run_directory_is_waited_for(layout: RunLayout) -> None:
    waiting = asyncio.create_task(endpoint.resolve(layout.root, 10))
    await asyncio.sleep(0)
    assert not waiting.done()
    written = layout.endpoints.with_suffix(".tmp")
    written.write_bytes(msgspec.json.encode(FOUND))
    written.replace(layout.endpoints)
    assert await waiting == FOUND
    assert endpoint.resolve_blocking(str(layout.root)) == FOUND


async def test_run_directory_without_a_broker(layout: RunLayout) -> None:
    with pytest.raises(BrokerUnavailableError):
        await endpoint.resolve(layout.root, 0.05)
    with pytest.raises(BrokerUnavailableError):
        endpoint.resolve_blocking(layout.root, 0.05)


def test_broken_endpoints_file_is_named(layout: RunLayout) -> None:
    layout.endpoints.write_text("{")
    with pytest.raises(MalformedError, match=r"endpoints\.json"):
        endpoint.read_endpoints(layout.root)


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[str]:
    """The address of a broker that answers two times GetInfo."""
    with ExitStack() as stack:
        context = sockets.make_context()
        stack.callback(context.term)
        router = stack.enter_context(sockets.serve_router(context, 1 << 16))
        router.bind(f"ipc://{tmp_path}/serve")
        info = InfoReply(
            epoch=9,
            info=RunInfo(),
            ingest="ipc://i",
            events="ipc://e",
            publish="ipc://p",
            max_group_bytes=1,
        )

        def serve() -> None:
            for _ in range(2):
                if not router.poll(5000):
                    return
                *route, request = router.recv_multipart(zmq.NOBLOCK)
                assert codec.decode_request(request) == GetInfo()
                router.send_multipart([*route, codec.encode(info)])

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        yield f"ipc://{tmp_path}/serve"


async def test_address_is_asked(answering: str) -> None:
    expected = Endpoints(
        ingest="ipc://i", serve=answering, events="ipc://e", publish="ipc://p", pid=0, epoch=9
    )
    assert await endpoint.resolve(answering) == expected
    assert endpoint.resolve_blocking(answering) == expected


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("gpu-7", "http://gpu-7:80"),
    ],
)
def test_a_server_that_is_bound_to_all_addresses_is_reached_at_one(host: str, url: str) -> None:
    assert endpoint.http_url(host, 80) == url
