"""Clients find a broker's endpoints."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport import endpoint, sockets
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    MalformedError,
    UsageError,
)
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.replies import InfoReply, RunInfo
from rolloutmq.schemas.wire.requests import GetInfo

FOUND = Endpoints(ingest="ipc://i", serve="ipc://s", events="ipc://e", publish="ipc://p", pid=1, epoch=2)


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


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


@pytest.mark.parametrize("where", [None, 5, b"runs/mine"])
def test_what_can_be_neither_a_directory_nor_an_address_is_refused(where: Any) -> None:
    with pytest.raises(UsageError, match=rf"^where: must be a run directory or .* \(got {where!r}\)"):
        endpoint.is_address(where)


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
