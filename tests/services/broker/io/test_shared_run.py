"""What the broker tells other hosts of its directory: what is on the lists, in parts, and nothing else."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.transport.keys import ticket
from rolloutmq.bus.transport.keys.directory import KeyDirectory, hash_of_token
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import EndNotice, InferenceAddress, RunLayout, StreamAddress
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.joining import (
    PART_BYTES,
    TOKENS_LIMIT,
    EngineBeat,
    EngineState,
    FilePart,
    GetFile,
    GetRun,
    GetWeightsTicket,
    HttpToken,
    KeyUse,
    RelayBeat,
    RunReply,
    WeightsTicket,
)
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.services.broker.io.shared_run import GONE_S, KEPT_S, SharedRun
from rolloutmq.services.http_server.refusals import HttpRefusals
from rolloutmq.services.http_server.run_token import engine_token

EPOCH = 5
TOKEN = "0123456789abcdef"


def shared_of(run_dir: Path, **sections: Any) -> SharedRun:
    return SharedRun(validate({"run": {"name": "sums"}, **sections}), RunLayout(run_dir), EPOCH)


def told(run: SharedRun, now: float = 0.0, have: str = "") -> RunReply:
    reply = run.answer(GetRun(have=have), now)
    assert isinstance(reply, RunReply)
    return reply


def refusal(reply: object) -> ErrorReply:
    assert isinstance(reply, ErrorReply)
    return reply


def served(run_dir: Path, name: str, url: str, number: int = 1) -> None:
    path = RunLayout(run_dir).engine(name)
    write_json(path, InferenceAddress(url=url, pid=7, name=name, number=number))


def beat(name: str = "inference.gpu7", url: str = "http://gpu7:8000", *, ends: bool = False) -> EngineBeat:
    return EngineBeat(engine=EngineState(name=name, url=url, pid=3, number=2), host="gpu7", ends=ends)


def test_the_configuration_is_told_once(run_dir: Path) -> None:
    run = shared_of(run_dir)
    first = told(run)
    assert (first.epoch, first.run) == (EPOCH, "sums")
    assert RunConfig.model_validate_json(first.config).run.name == "sums"
    again = told(run, have=first.digest)
    assert (again.digest, again.config) == (first.digest, b"")


@pytest.mark.parametrize(
    ("inference", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "insecure": True}, "http://0.0.0.0:8000"),
        ({"host": "::", "insecure": True}, "http://[::]:8000"),
        ({"advertise": "head.cluster"}, "http://head.cluster:8000"),
        ({"advertise": "fd00::1"}, "http://[fd00::1]:8000"),
    ],
)
def test_engines_are_told_as_others_reach_them(run_dir: Path, inference: dict[str, Any], url: str) -> None:
    served(run_dir, "inference", "http://127.0.0.1:8000")
    served(run_dir, "inference.gpu7", "http://gpu7:9")
    assert [one.url for one in told(shared_of(run_dir, inference=inference)).engines] == [
        url,
        "http://gpu7:9",
    ]


def test_the_files_are_looked_at_once_in_a_while(run_dir: Path) -> None:
    run = shared_of(run_dir)
    assert told(run).engines == ()
    served(run_dir, "inference", "http://127.0.0.1:8000")
    assert told(run, KEPT_S / 2).engines == ()
    assert len(told(run, KEPT_S).engines) == 1


def test_files_of_the_model_come_in_checked_parts(run_dir: Path) -> None:
    run, layout = shared_of(run_dir), RunLayout(run_dir)
    layout.model.mkdir()
    data = bytes(range(256)) * (PART_BYTES // 128)
    (layout.model / "tokenizer.json").write_bytes(data)
    (layout.model / "model.safetensors").write_bytes(b"weights")
    (file,) = told(run).files
    assert (file.name, file.nbytes) == ("tokenizer.json", len(data))
    found = b""
    while len(found) < file.nbytes:
        part = run.answer(GetFile(name=file.name, mark=file.mark, offset=len(found)), 0.0)
        assert isinstance(part, FilePart)
        assert part.checksum == google_crc32c.value(part.data)
        found += part.data
    assert found == data
    (layout.model / "tokenizer.json").write_bytes(b"{}")
    changed = refusal(run.answer(GetFile(name=file.name, mark=file.mark), 0.0))
    assert (changed.code, "has changed" in changed.detail) == (ErrorCode.UNKNOWN, True)


@pytest.mark.parametrize("name", ["model.safetensors", "../config.json", "/etc/passwd", "", "lives.json"])
def test_no_other_file_is_told(run_dir: Path, name: str) -> None:
    (run_dir / "model").mkdir()
    (run_dir / "model" / "model.safetensors").write_bytes(b"weights")
    reply = refusal(shared_of(run_dir).answer(GetFile(name=name, mark=""), 0.0))
    assert "the run shares no such file" in reply.detail


def test_a_model_by_path_is_told_from_its_directories(run_dir: Path, tmp_path: Path) -> None:
    for folder in ("model", "words"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    model = {"path": str(tmp_path / "model"), "tokenizer": str(tmp_path / "words")}
    trainer = {"enabled": False, "learning_rate": 1e-6}
    run = shared_of(run_dir, model=model, trainer=trainer, inference={"kind": "none"})
    assert [one.name for one in told(run).files] == ["config.json", "tokenizer.json"]


def test_an_engine_of_another_host_is_known_here_while_it_is_heard(run_dir: Path) -> None:
    run, layout = shared_of(run_dir), RunLayout(run_dir)
    assert run.answer(beat(), 0.0) == Ok()
    found = read_json(layout.engine("inference.gpu7"), InferenceAddress)
    assert found == InferenceAddress(url="http://gpu7:8000", pid=3, name="inference.gpu7", number=2)
    run.sweep(GONE_S)
    assert len(engines_of(layout)) == 1
    run.sweep(GONE_S + 0.1)
    assert engines_of(layout) == []
    run.answer(beat(), 100.0)
    run.answer(beat(ends=True), 100.0)
    assert engines_of(layout) == []


def test_an_engine_belongs_to_its_key_as_long_as_it_is_heard(run_dir: Path) -> None:
    layout, run = RunLayout(run_dir), shared_of(run_dir)
    run.answer(beat(), 0.0, "engine-7")
    for stolen in (beat(url="http://elsewhere:8000"), beat(ends=True)):
        reply = refusal(run.answer(stolen, 1.0, "engine-8"))
        assert reply.code is ErrorCode.FORBIDDEN
        assert "inference.gpu7 with key engine-8" in reply.detail
    assert [one.url for one in engines_of(layout)] == ["http://gpu7:8000"]
    run.answer(beat(ends=True), 1.0, "engine-7")
    run.answer(beat(url="http://elsewhere:8000"), 2.0, "engine-8")
    assert [one.url for one in engines_of(layout)] == ["http://elsewhere:8000"]


def test_engines_that_an_earlier_broker_knew_are_forgotten_too(run_dir: Path) -> None:
    served(run_dir, "inference.gpu7", "http://gpu7:9")
    served(run_dir, "inference", "http://127.0.0.1:9")
    run = shared_of(run_dir)
    run.sweep(50.0)
    run.sweep(50.0 + GONE_S + 0.1)
    assert [one.name for one in engines_of(RunLayout(run_dir))] == ["inference"]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (beat("inference"), "name: must be inference.NAME (got 'inference')"),
        (beat("inference-1"), "name: must be inference.NAME"),
        (beat("config"), "name: must be inference.NAME"),
        (beat("inference.a.b"), "name: must be inference.NAME"),
        (beat(url="file:///etc/passwd"), "url: must be http://HOST:PORT"),
        (beat(url="http://user:word@h:1"), "url: must be http://HOST:PORT"),
        (beat(url=""), "url: must be http://HOST:PORT"),
    ],
)
def test_what_is_no_engine_of_another_host_writes_nothing(
    run_dir: Path, wrong: EngineBeat, problem: str
) -> None:
    before: Sequence[Path] = sorted(run_dir.iterdir())
    reply = refusal(shared_of(run_dir).answer(wrong, 0.0))
    assert (reply.code, problem in reply.detail) == (ErrorCode.INVALID, True)
    assert sorted(run_dir.iterdir()) == before


STREAMED: Any = {"weights": {"backend": "stream"}}


def test_a_ticket_is_made_for_the_key_that_asks(run_dir: Path) -> None:
    secret = ticket.new_secret()
    address = StreamAddress(host="127.0.0.1", port=7764, secret=secret, sealed=True, sender=(1, 2, 3))
    write_json(RunLayout(run_dir).stream, address)
    reply = shared_of(run_dir, **STREAMED).answer(GetWeightsTicket(), 0.0, "engine-7")
    assert isinstance(reply, WeightsTicket)
    assert (reply.port, reply.sealed) == (7764, True)
    assert reply.key == ticket.key_of(secret, reply.shown)
    assert ticket.read(reply.shown, time.time()).name == "engine-7"
    assert secret not in repr(reply)


def test_without_a_relay_there_is_no_ticket(run_dir: Path) -> None:
    run = shared_of(run_dir, **STREAMED)
    assert "does not serve them yet" in refusal(run.answer(GetWeightsTicket(), 0.0)).detail
    for damaged in (b"", b"{", b'{"host": 1}'):
        RunLayout(run_dir).stream.write_bytes(damaged)
        assert "cannot be read" in refusal(run.answer(GetWeightsTicket(), 0.0)).detail
    write_json(
        RunLayout(run_dir).stream,
        StreamAddress(host="h", port=1, secret="no hex", sealed=True, sender=(1, 2, 3)),
    )
    assert "cannot be read" in refusal(run.answer(GetWeightsTicket(), 0.0)).detail
    other = refusal(shared_of(run_dir).answer(GetWeightsTicket(), 0.0))
    assert other.detail == "weights.backend: must be stream for other hosts (got posix_shm)"


@pytest.fixture
def keyed(run_dir: Path, tmp_path: Path) -> SharedRun:
    """A run with keys, whose own token is known."""
    (tmp_path / "keys").mkdir(mode=0o700)
    keys = KeyDirectory.create(tmp_path / "keys")
    for role in Role:
        keys.new(f"{role.value}-7", role)
    write_private(tmp_path / "token", TOKEN.encode())
    run = {"name": "sums", "http_token_file": str(tmp_path / "token")}
    return shared_of(run_dir, run=run, broker={"keys": str(keys.path)})


def hashes(run: SharedRun, sender: str, now: float = 0.0, have: str = "") -> RunReply:
    reply = run.answer(GetRun(have_tokens=have), now, sender)
    assert isinstance(reply, RunReply)
    return reply


def test_hashes_of_tokens_go_to_keys_with_servers_alone(keyed: SharedRun, tmp_path: Path) -> None:
    listed = {(key.name, key.role.value, key.token) for key in KeyDirectory(tmp_path / "keys").records()}
    for sender in ("engine-7", "admin-7"):
        found = hashes(keyed, sender)
        own = ("(run)", "worker", hash_of_token(engine_token(TOKEN, sender)))
        assert {(one.name, one.role, one.token) for one in found.tokens} == listed | {own}
        again = hashes(keyed, sender, have=found.tokens_digest)
        assert (again.tokens, again.tokens_digest) == ((), found.tokens_digest)
        assert TOKEN.encode() not in msgspec.msgpack.encode(found)
        assert hash_of_token(TOKEN).encode() not in msgspec.msgpack.encode(found)
    for sender in ("worker-7", "trainer-7", "monitor-7", "nobody", ""):
        assert (hashes(keyed, sender).tokens, hashes(keyed, sender).tokens_digest) == ((), "")
    assert told(keyed).tokens == (), "nobody gets them who did not ask"


def test_a_revocation_goes_to_the_engines(keyed: SharedRun, tmp_path: Path) -> None:
    before = hashes(keyed, "engine-7")
    KeyDirectory(tmp_path / "keys").revoke("worker-7")
    after = hashes(keyed, "engine-7", now=1.0, have=before.tokens_digest)
    assert {one.name for one in after.tokens if one.revoked is not None} == {"worker-7"}
    KeyDirectory(tmp_path / "keys").revoke("engine-7")
    assert hashes(keyed, "engine-7", now=2.0).tokens == ()


def test_the_address_of_an_engine_has_its_key(run_dir: Path, keyed: SharedRun) -> None:
    assert keyed.answer(beat(), 0.0, "engine-7") == Ok()
    (found,) = engines_of(RunLayout(run_dir))
    assert found.key == "engine-7"


def test_ten_thousand_hashes_fit_a_reply() -> None:
    one = HttpToken(name="x" * 64, role="trainer", token="0" * 64, revoked=1e9)
    reply = RunReply(epoch=1, run="r", digest="d", tokens=(one,) * TOKENS_LIMIT)
    data = msgspec.msgpack.encode(reply)
    assert msgspec.msgpack.decode(data, type=RunReply) == reply
    assert len(data) < 3 << 20


def test_heartbeats_of_another_run_are_refused(run_dir: Path) -> None:
    """An engine that still serves the weights of a run that is gone must not be found, nor a relay give them on."""
    run = SharedRun(validate({"run": {"name": "sums"}}), RunLayout(run_dir), EPOCH, "2" * 32)
    assert told(run).run_id == "2" * 32
    for run_id, expected in (("1" * 32, ErrorReply), ("2" * 32, Ok)):
        engine = msgspec.structs.replace(beat().engine, run_id=run_id)
        assert isinstance(run.answer(EngineBeat(engine=engine), 0.0), expected)
        assert isinstance(run.answer(RelayBeat(name="relay.gpu7", run_id=run_id), 0.0), expected)
        assert bool(engines_of(RunLayout(run_dir))) == bool(run.relays.report(0.0)) == (expected is Ok)


def test_the_broker_knows_since_when_an_engine_is_behind(run_dir: Path) -> None:
    run = shared_of(run_dir)
    seen = []
    for now, step, newest in (
        (0.0, 1, 1),
        (60.0, 1, 1),
        (61.0, 1, 2),
        (63.0, 2, 2),
        (70.0, 2, 3),
        (79.0, 2, 3),
    ):
        engine = msgspec.structs.replace(beat().engine, version=PolicyVersion(0, step))
        assert isinstance(run.answer(EngineBeat(engine=engine), now), Ok)
        (joined,) = run.engines(now + 0.5, PolicyVersion(0, newest))
        assert (joined.version, joined.silent_s) == (PolicyVersion(0, step), 0.5)
        seen.append(joined.unchanged_s)
    assert seen == [0.0, 0.0, 0.0, 0.0, 0.0, 9.0]
    assert engines_of(RunLayout(run_dir))[0].version == PolicyVersion(0, 2)
    assert told(run).engines[0].version == PolicyVersion(0, 2)


def test_two_hosts_have_no_engine_of_one_name(run_dir: Path) -> None:
    run = shared_of(run_dir)

    def told_by(host: str, now: float, *, ends: bool = False, network: str = "") -> object:
        engine = msgspec.structs.replace(beat().engine, network=network)
        return run.answer(EngineBeat(engine=engine, host=host, ends=ends), now)

    assert isinstance(told_by("a", 0.0), Ok)
    for ends in (False, True):
        refused = told_by("b", 5.0, ends=ends)
        assert isinstance(refused, ErrorReply)
        assert "an engine of host a has it (got inference.gpu7 of host b); give each engine" in refused.detail
    assert isinstance(told_by("a", 6.0), Ok)
    assert isinstance(told_by("b", 16.5), Ok), "the first one is gone"
    refused = told_by("b", 17.0, network="that of a copy of its machine")
    assert isinstance(refused, ErrorReply)
    assert "an engine of another host called b has it (got inference.gpu7 of host b)" in refused.detail
    assert [one.host for one in run.engines(17.0, PolicyVersion())] == ["b"]


def test_what_http_servers_refuse_counts_to_the_key(run_dir: Path) -> None:
    """`status` counted what the broker refused, and nothing of what gateway and engines did."""
    run, keys = (
        shared_of(run_dir),
        (KeyUse(name="w", role="worker", silent_s=2.0, refused={"drain workers": 1}),),
    )
    assert run.with_refused(keys, 9.0) == keys
    refusals = HttpRefusals(RunLayout(run_dir).http_refused, lambda: 5.0)
    for key in ("w", "old", "old"):
        refusals.add(key, "HTTP gateway with a revoked token")
    refusals.write()
    first, second = run.with_refused(keys, 9.0)
    assert first.refused == {"drain workers": 1, "HTTP gateway with a revoked token": 1}
    assert (second.name, second.role, second.silent_s) == ("old", "", 4.0)
    assert second.refused == {"HTTP gateway with a revoked token": 2}


def test_it_tells_when_the_run_needs_no_engine_any_more(run_dir: Path) -> None:
    run, layout = shared_of(run_dir), RunLayout(run_dir)
    assert not told(run).over
    write_json(layout.ending, EndNotice("ending, waits for: trainer"))
    assert not told(run, 1.0).over
    layout.ending.write_text("{")
    assert not told(run, 2.0).over
    write_json(layout.ending, EndNotice("", over=True))
    assert told(run, 3.0).over
