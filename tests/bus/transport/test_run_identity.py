"""The identity of a run: one for all its lives, another one for a fresh run of the same name."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.broker.bench import Bench, config

from rolloutmq.bus.producer import connection
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.producer.resend import resend_spools
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport import discovery
from rolloutmq.bus.transport.discovery import Search, reach
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.bus.transport.run_identity import made_run_id, run_id_of
from rolloutmq.bus.transport.sockets import make_context
from rolloutmq.schemas.errors import DamagedFileError, RefusedError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.schemas.wire.envelope import ErrorCode, Message
from rolloutmq.schemas.wire.replies import ErrorReply
from rolloutmq.schemas.wire.requests import RegisterConsumer, RegisterProducer
from rolloutmq.services.broker.server import running_broker

OWN, GONE = "2" * 32, "1" * 32
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    monkeypatch.setattr(discovery, "PROBE_S", 0.3)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.3)


async def send_on(producer: Producer, group: Callable[..., Group]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            await producer.send(group("g"))
            await asyncio.sleep(0.05)


def fresh_layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "fresh")
    layout.root.mkdir(mode=0o700)
    return layout


def test_it_is_made_once_in_a_directory(run_dir: Path, tmp_path: Path) -> None:
    layout, fresh = RunLayout(run_dir), fresh_layout(tmp_path)
    assert run_id_of(layout) == ""
    for _ in range(2):  # the second is the resumed run
        with running_broker(config(), layout) as broker:
            assert broker.endpoints.run_id == run_id_of(layout) == made_run_id(layout)
    assert made_run_id(fresh) != run_id_of(layout)
    assert layout.identity.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", [b"", b"{}", b'{"run_id": "../x"}'])
def test_a_damaged_one_ends_the_start(run_dir: Path, text: bytes) -> None:
    layout = RunLayout(run_dir)
    layout.identity.write_bytes(text)
    with pytest.raises(DamagedFileError, match=r"identity\.json, line 1: is no id of a run; restore it"):
        made_run_id(layout)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda run_id: RegisterProducer(producer="p", env="e", run_id=run_id),
        lambda run_id: RegisterConsumer(consumer="c", run_id=run_id),
    ],
)
def test_a_broker_refuses_what_belongs_to_another_run(
    request_of: Callable[[str], RegisterProducer | RegisterConsumer],
) -> None:
    bench = Bench(config(e={}))
    bench.core.bound(Endpoints(ingest="", serve="", events="", publish="", pid=1, epoch=1, run_id=OWN))
    refused = bench.ask(request_of(GONE), ErrorReply)
    assert refused.code is ErrorCode.INVALID
    assert "belongs to a run that is gone" in refused.detail
    assert "(got 11111111, it has 22222222)" in refused.detail
    for known in (OWN, ""):
        assert not isinstance(bench.ask(request_of(known), Message), ErrorReply)


async def test_no_group_of_a_run_that_is_gone_comes_into_a_fresh_one(
    run_dir: Path, tmp_path: Path, group: Callable[..., Group]
) -> None:
    """Neither of a producer that goes on, nor of its file."""
    layout, fresh, saved = RunLayout(run_dir), fresh_layout(tmp_path), tmp_path / "spools" / "p"
    with running_broker(config(), fresh) as other:
        with running_broker(config(broker={"durability": "memory"}), layout) as broker:
            opened = Producer.open(run_dir, env="e", producer="p", save_to=saved, drain_s=0.2)
            producer = await opened.__aenter__()
            broker.stop()
            write_json(layout.endpoints, replace(other.endpoints, run_id=""))
            with pytest.raises(RefusedError, match="belongs to a run that is gone"):
                await send_on(producer, group)
            await opened.__aexit__(None, None, None)
        left = list(saved.parent.iterdir())
        assert left, "its groups are kept"
        with pytest.raises(RefusedError, match="belongs to a run that is gone"):
            await resend_spools(fresh.root, saved.parent)
        assert list(saved.parent.iterdir()) == left
        with BlockingClient(other.endpoints.serve) as client:
            reply = client.request(GetStatus(), LIMIT_S)
        assert isinstance(reply, StatusReply)
        assert reply.pressure.ledger.accepted == 0


async def test_a_client_of_a_directory_waits_while_its_address_serves_another_run(
    run_dir: Path, tmp_path: Path
) -> None:
    """A trainer of another host went on at its own step; the command that holds it ends it."""
    fresh, search = fresh_layout(tmp_path), Search(run_dir)
    with running_broker(config(), fresh) as other:
        write_json(RunLayout(run_dir).endpoints, replace(other.endpoints, run_id=GONE))
        context = make_context()
        waiting = asyncio.create_task(reach(run_dir, context, search))
        async with asyncio.timeout(LIMIT_S):
            while "serves a fresh run" not in search.problem:  # noqa: ASYNC110 - it polls
                await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        context.term()
