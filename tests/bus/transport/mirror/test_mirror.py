"""The mirror follows a run of another host: over the address that answers, through restarts, with whole files only."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.bus.transport.listening import INSECURE

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.mirror import mirror as mirroring
from rolloutmq.bus.transport.mirror import run_copy
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.bus.transport.sockets import Channel, make_context
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import Connection, RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.joining import FilePart, GetFile, GetRun, RunReply, SharedFile
from rolloutmq.schemas.wire.replies import ErrorReply, InfoReply, RunInfo
from rolloutmq.services.broker.server import running_broker

NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "ASK_S", 0.05)
    monkeypatch.setattr(mirroring, "ANSWER_S", 0.5)


def accept(data: bytes, _layout: RunLayout) -> RunConfig:
    return RunConfig.model_validate_json(data)


@asynccontextmanager
async def mirrored(mirror: Mirror) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(mirror.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        # What is waited for is a file: there is no event.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"run": {"name": "sums"}, "broker": INSECURE, **sections})


async def test_the_first_address_that_answers_is_used_and_a_restart_is_followed(
    run_dir: Path, tmp_path: Path
) -> None:
    layout, own = RunLayout(run_dir), RunLayout(tmp_path / "own")
    with running_broker(config(), layout) as broker:
        address = broker.endpoints.listen[0]
        mirror = Mirror(Connection(addresses=(NOBODY, address)), accept, own.root)
        async with mirrored(mirror):
            await mirror.ready()
            found = read_endpoints(own.root)
            assert found is not None
            assert (found.serve, found.pid, found.key) == (address, 0, "")
            assert {one.rpartition(":")[0] for one in (found.ingest, found.events)} == {"tcp://127.0.0.1"}
            assert load_run(own.root)[0].run.name == "sums"
            broker.stop()
            await until(lambda: mirror.problem)
            assert read_endpoints(own.root) == found, "what is there stays while the broker is away"


async def test_a_broker_that_moved_is_found_at_the_other_address(run_dir: Path, tmp_path: Path) -> None:
    layout, own = RunLayout(run_dir), RunLayout(tmp_path / "own")
    with running_broker(config(), layout) as other:
        later = other.endpoints.listen[0]
        info = InfoReply(
            epoch=1, info=RunInfo(), ingest="", events="", publish="", max_group_bytes=1, ports=(1, 2, 3)
        )
        run = RunReply(epoch=1, run="sums", digest="d", config=config().model_dump_json().encode())
        async with fake({GetRun: run}, info) as (first, stop):
            mirror = Mirror(Connection(addresses=(first, later)), accept, own.root)
            async with mirrored(mirror):
                await mirror.ready()
                before = read_endpoints(own.root)
                assert before is not None
                assert before.serve == first
                stop.set()
                await until(lambda: (now := read_endpoints(own.root)) and now.serve == later)
                await until(lambda: mirror.changes == 2)


async def test_a_refused_configuration_is_raised(run_dir: Path, tmp_path: Path) -> None:
    def refuse(_data: bytes, _layout: RunLayout) -> RunConfig:
        raise ConfigError("environment.e.entry", "is not allowed")

    with running_broker(config(), RunLayout(run_dir)) as broker:
        mirror = Mirror(Connection(addresses=(broker.endpoints.listen[0],)), refuse, tmp_path / "own")
        async with mirrored(mirror):
            with pytest.raises(ConfigError, match="is not allowed"):
                await mirror.ready()
    assert not RunLayout(tmp_path / "own").config.exists()


async def test_files_of_the_model_follow(run_dir: Path, tmp_path: Path) -> None:
    layout, own = RunLayout(run_dir), RunLayout(tmp_path / "own")
    data = bytes(range(256)) * 3000
    layout.model.mkdir()
    (layout.model / "tokenizer.json").write_bytes(data)
    with running_broker(config(), layout) as broker:
        mirror = Mirror(Connection(addresses=(broker.endpoints.listen[0],)), accept, own.root)
        async with mirrored(mirror):
            await mirror.ready()
            assert (own.model / "tokenizer.json").read_bytes() == data
            (layout.model / "tokenizer.json").write_bytes(b"{}")
            await until(lambda: (own.model / "tokenizer.json").read_bytes() == b"{}")


async def test_a_full_disk_ends_nothing_and_is_told(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout, own = RunLayout(run_dir), RunLayout(tmp_path / "own")
    full = asyncio.Event()

    def write_if_room(path: Path, value: object) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, value)

    monkeypatch.setattr(run_copy, "write_json", write_if_room)
    with ExitStack() as lives:
        address = lives.enter_context(running_broker(config(), layout)).endpoints.listen[0]
        mirror = Mirror(Connection(addresses=(address,)), accept, own.root)
        async with mirrored(mirror) as task:
            await mirror.ready()
            first = read_endpoints(own.root)
            full.set()
            lives.close()
            again = {**INSECURE, "listen": address}
            lives.enter_context(running_broker(config(broker=again, trainer={"steps": 7}), layout))
            await until(lambda: "No space left" in caplog.text or task.done())
            assert not task.done()
            assert read_endpoints(own.root) == first
            full.clear()
            await until(lambda: mirror.changes == 2)
            assert read_endpoints(own.root) != first


async def test_a_directory_that_cannot_be_written_at_the_start_is_raised(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_copy, "write_json", refuse)
    with running_broker(config(), RunLayout(run_dir)) as broker:
        mirror = Mirror(Connection(addresses=(broker.endpoints.listen[0],)), accept, tmp_path / "own")
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(mirror.run(), 30)


@asynccontextmanager
async def fake(
    replies: dict[type, Any], info: InfoReply | None = None
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A broker with these replies, until the event is set."""
    context, stop = make_context(), asyncio.Event()
    socket = context.socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    channel = Channel(socket)

    async def answer() -> None:
        while not stop.is_set():
            *way, request = await channel.receive()
            if stop.is_set():
                return
            reply: Any = replies.get(type(codec.decode_request(request)), info)
            await channel.send([*way, reply if isinstance(reply, bytes) else codec.encode(reply)])

    task = asyncio.create_task(answer())
    try:
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), stop
    finally:
        task.cancel()
        await asyncio.wait({task})
        channel.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (FilePart(offset=0, data=b"abcd", checksum=1), "is damaged"),
        (FilePart(offset=4, data=b"abcd", checksum=0), "is not the part from 0"),
        (FilePart(offset=0, data=b"", checksum=0), "is not the part from 0"),
        (FilePart(offset=0, data=b"abcdefgh", checksum=0x0A9421B7), "has more than 4 bytes"),
        (FilePart(offset=0, data=b"a", checksum=0xC1D04330), "has 1 bytes, too few"),
    ],
)
async def test_a_hostile_broker_writes_no_file_and_is_told(
    tmp_path: Path, part: FilePart, problem: str
) -> None:
    own = RunLayout(tmp_path / "own")
    run = RunReply(
        epoch=1,
        run="sums",
        digest="d",
        config=b"{}",
        files=(SharedFile(name="tokenizer.json", nbytes=4, mark="m"),),
    )
    info = InfoReply(
        epoch=1, info=RunInfo(), ingest="", events="", publish="", max_group_bytes=1, ports=(1, 2, 3)
    )
    async with fake({GetRun: run, GetFile: part}, info) as (address, _):
        mirror = Mirror(Connection(addresses=(address,)), accept, own.root)
        async with mirrored(mirror):
            await until(lambda: problem in mirror.problem)
            assert not (own.model / "tokenizer.json").exists()
            assert not own.config.exists()


@pytest.mark.parametrize(
    "run",
    [
        {"run": "../up"},
        {"run": "/etc"},
        {"run": "a" * (1 << 20)},
        {"run": "sums", "files": [{"name": "../x" * 20, "nbytes": 4, "mark": "m", "kind": "shared_file"}]},
        {"run": "sums", "files": [{"name": "x", "nbytes": 1 << 40, "mark": "m", "kind": "shared_file"}]},
        {"run": "sums", "a_field_of_a_later_version": 1},
    ],
    ids=["parent", "absolute", "a megabyte", "long file", "huge file", "later version"],
)
async def test_a_reply_that_cannot_be_is_told_and_writes_nothing(
    tmp_path: Path, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    reply = msgspec.msgpack.encode({"kind": "run_reply", "epoch": 1, "digest": "d", "config": b"{}", **run})
    async with fake({GetRun: reply}) as (address, _):
        mirror = Mirror(Connection(addresses=(address,)), accept)
        async with mirrored(mirror):
            await until(lambda: "may have another version of RolloutMQ than this host" in mirror.problem)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "weights.safetensors"])
async def test_a_file_that_is_not_on_the_list_is_not_asked_for(tmp_path: Path, name: str) -> None:
    own = RunLayout(tmp_path / "own")
    files = (SharedFile(name=name, nbytes=4, mark="m"),)
    run = RunReply(epoch=1, run="sums", digest="d", config=config().model_dump_json().encode(), files=files)
    info = InfoReply(
        epoch=1, info=RunInfo(), ingest="", events="", publish="", max_group_bytes=1, ports=(1, 2, 3)
    )
    async with fake({GetRun: run}, info) as (address, _):  # it would answer GetFile with another reply
        mirror = Mirror(Connection(addresses=(address,)), accept, own.root)
        async with mirrored(mirror):
            await mirror.ready()
    assert not list(own.model.iterdir())


async def test_a_broker_of_another_version_ends_the_mirror(tmp_path: Path) -> None:
    refusal = ErrorReply(code=ErrorCode.MALFORMED, detail="unknown kind get_run")
    async with fake({GetRun: refusal}) as (address, _):
        mirror = Mirror(Connection(addresses=(address,)), accept, tmp_path / "own")
        with pytest.raises(ConfigError, match=r"unknown kind get_run.*install the same on both"):
            await asyncio.wait_for(mirror.run(), 30)


async def test_a_name_that_is_unknown_is_told(tmp_path: Path) -> None:
    mirror = Mirror(Connection(addresses=("tcp://no-such-host.invalid:7760",)), accept, tmp_path / "own")
    async with mirrored(mirror):
        await until(lambda: "the name no-such-host.invalid is unknown here" in mirror.problem)


async def test_why_a_key_is_refused_is_told(tmp_path: Path) -> None:
    keys = KeyDirectory.create(tmp_path / "keys")
    save_bundle(tmp_path / "w.key", keys.new("w", Role.WORKER))
    keys.revoke("w")
    (tmp_path / "run").mkdir()
    section = {"listen": "tcp://127.0.0.1:0", "keys": str(tmp_path / "keys")}
    with running_broker(config(broker=section), RunLayout(tmp_path / "run")) as broker:
        where = Connection(addresses=(broker.endpoints.listen[0],), key=str(tmp_path / "w.key"))
        mirror = Mirror(where, accept, tmp_path / "own")
        async with mirrored(mirror):
            await until(lambda: "key w was refused" in mirror.problem)
            assert "revoked or unknown; get a new one" in mirror.problem


@pytest.mark.parametrize("pauses", [True, False])
async def test_a_fresh_run_of_the_same_name_is_another_one(
    run_dir: Path, tmp_path: Path, pauses: bool
) -> None:
    """It has the same name and configuration; with programs of the old run, nothing is written before they end."""
    own, fresh = RunLayout(tmp_path / "own"), RunLayout(tmp_path / "fresh")
    fresh.root.mkdir(mode=0o700)
    with (
        running_broker(config(), RunLayout(run_dir)) as broker,
        running_broker(config(), fresh) as other,
    ):
        addresses = broker.endpoints.listen[0], other.endpoints.listen[0]
        mirror = Mirror(Connection(addresses=addresses), accept, own.root, pauses=pauses)
        async with mirrored(mirror):
            await mirror.ready()
            first = run_id_of(own)
            assert first == broker.endpoints.run_id
            broker.stop()
            if pauses:
                await until(lambda: mirror.replaced)
                assert run_id_of(own) == first
                mirror.follow()
            await until(lambda: mirror.changes == 2)
            assert run_id_of(own) == other.endpoints.run_id != first
            found = read_endpoints(own.root)
            assert found is not None
            assert found.run_id == other.endpoints.run_id
            assert mirror.refused is None
