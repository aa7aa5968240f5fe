"""The directory of a run of another host: what the broker tells goes into files, and nothing else does."""

import os
from pathlib import Path

import pytest

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.transport.mirror.run_copy import RunCopy
from rolloutmq.schemas.files import Connection, InferenceAddress, RunLayout
from rolloutmq.schemas.network.keys import Role, TokenRecord
from rolloutmq.schemas.wire.joining import EngineState, HttpToken, RunReply, SharedFile

ADDRESS = "tcp://head:7760"


@pytest.fixture
def copy(tmp_path: Path) -> RunCopy:
    return RunCopy(RunLayout(tmp_path), Connection(addresses=(ADDRESS,)))


def reply(*engines: EngineState, teacher: str = "") -> RunReply:
    return RunReply(epoch=1, run="r", digest="d", engines=engines, teacher=teacher)


def engine(name: str = "inference", url: str = "http://0.0.0.0:1", number: int = 1) -> EngineState:
    return EngineState(name=name, url=url, pid=7, number=number)


def test_engines_come_and_go(copy: RunCopy) -> None:
    copy.take_servers(reply(engine(), engine("inference.gpu7", "http://gpu7:9")), ADDRESS)
    assert [(one.name, one.url) for one in engines_of(copy.layout)] == [
        ("inference", "http://head:1"),
        ("inference.gpu7", "http://gpu7:9"),
    ]
    gone = copy.layout.engine("inference.gpu7")
    os.utime(gone, (0.0, 0.0))
    copy.take_servers(reply(engine(number=2)), ADDRESS)
    assert [one.number for one in engines_of(copy.layout)] == [2]


def test_an_engine_of_this_host_is_not_set_back(copy: RunCopy) -> None:
    path = copy.layout.engine("inference.here")
    write_json(path, InferenceAddress(url="http://here:1", pid=7, name="inference.here", number=9))
    copy.take_servers(reply(engine("inference.here", "http://here:1", 8)), ADDRESS)
    found = read_json(path, InferenceAddress)
    assert found is not None
    assert found.number == 9
    copy.take_servers(reply(), ADDRESS)  # the broker has not heard of it yet
    assert path.exists()


def test_the_next_life_of_an_engine_of_this_host_is_not_replaced_by_the_last(copy: RunCopy) -> None:
    """Else the mirror and the engine wrote the file in turn, and the broker heard of the dead one."""
    path = copy.layout.engine("inference.here")
    own = InferenceAddress(url="http://127.0.0.1:2", pid=8, name="inference.here", number=1, at=50.0)
    write_json(path, own)
    last = EngineState(name="inference.here", url="http://127.0.0.1:1", pid=7, number=99, at=49.0)
    copy.take_servers(reply(last), ADDRESS)
    assert read_json(path, InferenceAddress) == own
    os.utime(path, (0.0, 0.0))  # nobody writes it any more: the run knows better
    copy.take_servers(reply(last), ADDRESS)
    assert [one.pid for one in engines_of(copy.layout)] == [7]


@pytest.mark.parametrize(
    ("name", "url"),
    [("config", "http://h:1"), ("inference-x", "http://h:1"), ("inference", "file:///etc/passwd")],
)
def test_other_names_and_urls_write_nothing(copy: RunCopy, name: str, url: str) -> None:
    before = sorted(copy.layout.root.iterdir())
    copy.take_servers(reply(engine(name, url)), ADDRESS)
    assert sorted(copy.layout.root.iterdir()) == before


def test_the_teacher_comes_and_goes(copy: RunCopy) -> None:
    copy.take_servers(reply(teacher="http://0.0.0.0:5"), ADDRESS)
    found = read_json(copy.layout.teacher, InferenceAddress)
    assert found is not None
    assert found.url == "http://head:5"
    copy.take_servers(reply(), ADDRESS)
    assert not copy.layout.teacher.exists()


def test_only_files_of_the_list_are_wanted_and_each_once(copy: RunCopy) -> None:
    words = SharedFile(name="tokenizer.json", nbytes=2, mark="a")
    other = SharedFile(name="../../config.json", nbytes=2, mark="a")
    assert copy.missing([words, other, SharedFile(name="model.safetensors", nbytes=1, mark="a")]) == [words]
    copy.take_file(words, b"{}")
    assert (copy.layout.model / "tokenizer.json").read_bytes() == b"{}"
    assert copy.missing([words]) == []
    assert copy.missing([SharedFile(name="tokenizer.json", nbytes=2, mark="b")]) != []


def test_a_token_is_private_and_removed_with_its_key(copy: RunCopy) -> None:
    path = copy.take_token("secret-of-sixteen")
    assert path is not None
    assert path.read_text() == "secret-of-sixteen"
    assert path.stat().st_mode & 0o077 == 0
    assert copy.take_token("") is None
    assert not path.exists()


def test_tokens_of_roles_that_this_version_does_not_know_open_nothing(copy: RunCopy) -> None:
    hashes = [HttpToken(name=f"k-{role}", role=role, token="0" * 64) for role in ("worker", "auditor")]
    copy.take_tokens(tuple(hashes))
    assert read_json(copy.layout.http_tokens, list[TokenRecord]) == [
        TokenRecord(name="k-worker", role=Role.WORKER, token="0" * 64)
    ]
    copy.take_tokens(None)
    assert not copy.layout.http_tokens.exists()


def test_the_authority_comes_and_goes(copy: RunCopy) -> None:
    assert copy.take_ca("-----BEGIN CERTIFICATE-----") == copy.layout.tls_ca
    assert copy.layout.tls_ca.read_text() == "-----BEGIN CERTIFICATE-----"
    assert copy.take_ca("") is None
    assert not copy.layout.tls_ca.exists()
