"""The directory of a run of another host: what the broker tells goes into files, and nothing else does."""

import os
import time
from pathlib import Path

import pytest

from rolloutmq.bus.engine_registry import SILENT_S, engines_of
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.transport.mirror.run_copy import RunCopy
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.schemas.files import Connection, InferenceAddress, RunLayout
from rolloutmq.schemas.network.keys import Role, TokenRecord
from rolloutmq.schemas.wire.joining import EngineState, HttpToken, RunReply, SharedFile

ADDRESS = "tcp://head:7760"
LATER = SILENT_S + 0.1


@pytest.fixture
def copy(tmp_path: Path) -> RunCopy:
    return RunCopy(RunLayout(tmp_path), Connection(addresses=(ADDRESS,)))


def reply(*engines: EngineState, teacher: str = "") -> RunReply:
    return RunReply(epoch=1, run="r", digest="d", engines=engines, teacher=teacher)


def engine(name: str = "inference", url: str = "http://0.0.0.0:1", number: int = 1) -> EngineState:
    return EngineState(name=name, url=url, pid=7, number=number)


def test_engines_come_and_go(copy: RunCopy) -> None:
    copy.take_servers(reply(engine(), engine("inference.gpu7", "http://gpu7:9")), ADDRESS, 0.0)
    assert [(one.name, one.url) for one in engines_of(copy.layout)] == [
        ("inference", "http://head:1"),
        ("inference.gpu7", "http://gpu7:9"),
    ]
    copy.take_servers(reply(engine(number=2)), ADDRESS, 1.0)
    copy.take_servers(reply(engine(number=2)), ADDRESS, 1.0 + LATER)
    assert [one.number for one in engines_of(copy.layout)] == [2]


def test_an_engine_of_this_host_is_not_set_back(copy: RunCopy) -> None:
    path = copy.layout.engine("inference.here")
    write_json(path, InferenceAddress(url="http://here:1", pid=7, name="inference.here", number=9))
    copy.take_servers(reply(engine("inference.here", "http://here:1", 8)), ADDRESS, 0.0)
    found = read_json(path, InferenceAddress)
    assert found is not None
    assert found.number == 9
    copy.take_servers(reply(), ADDRESS, 0.0)  # the broker has not heard of it yet
    assert path.exists()


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_an_engine_of_this_host_stays_whatever_the_clock_of_its_files(copy: RunCopy, ahead_s: float) -> None:
    """A file server stamps files by its own clock; an hour behind, a living engine lost its address."""
    path = copy.layout.engine("inference.here")
    for number in range(20):
        write_json(path, InferenceAddress(url="http://here:1", pid=7, name="inference.here", number=number))
        stamp = time.time() + ahead_s + number
        os.utime(path, (stamp, stamp))
        copy.take_servers(reply(), ADDRESS, float(number))
        assert path.exists(), f"beat {number}"
    copy.take_servers(reply(), ADDRESS, 19.0 + LATER)
    assert not path.exists(), "nobody writes it any more"


def test_the_next_life_of_an_engine_of_this_host_is_not_replaced_by_the_last(copy: RunCopy) -> None:
    """Else the mirror and the engine wrote the file in turn, and the broker heard of the dead one."""
    path = copy.layout.engine("inference.here")
    own = InferenceAddress(url="http://127.0.0.1:2", pid=8, name="inference.here", number=1, at=50.0)
    write_json(path, own)
    last = EngineState(name="inference.here", url="http://127.0.0.1:1", pid=7, number=99, at=49.0)
    copy.take_servers(reply(last), ADDRESS, 0.0)
    assert read_json(path, InferenceAddress) == own
    copy.take_servers(reply(last), ADDRESS, LATER)  # nobody writes it any more: the run knows better
    assert [one.pid for one in engines_of(copy.layout)] == [7]


@pytest.mark.parametrize(
    ("name", "url"),
    [("config", "http://h:1"), ("inference-x", "http://h:1"), ("inference", "file:///etc/passwd")],
)
def test_other_names_and_urls_write_nothing(copy: RunCopy, name: str, url: str) -> None:
    before = sorted(copy.layout.root.iterdir())
    copy.take_servers(reply(engine(name, url)), ADDRESS, 0.0)
    assert sorted(copy.layout.root.iterdir()) == before


def test_the_teacher_comes_and_goes(copy: RunCopy) -> None:
    copy.take_servers(reply(teacher="http://0.0.0.0:5"), ADDRESS, 0.0)
    found = read_json(copy.layout.teacher, InferenceAddress)
    assert found is not None
    assert found.url == "http://head:5"
    copy.take_servers(reply(), ADDRESS, 0.0)
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


RUN, NEXT = "1" * 32, "2" * 32


def test_a_fresh_run_finds_nothing_of_the_one_before(copy: RunCopy) -> None:
    layout = copy.layout
    copy.begin(RUN)
    copy.take_servers(reply(engine()), ADDRESS, 0.0)
    copy.take_file(words := SharedFile(name="tokenizer.json", nbytes=2, mark="a"), b"{}")
    segment = segment_file.create("weights", 4096)
    segment_file.write_address(layout.weights, segment)
    try:
        RunCopy(layout, Connection(addresses=(ADDRESS,))).begin(RUN)
        assert layout.weights.exists(), "the mirror of another command of the same run leaves them"
        assert segment.path.exists()
        copy.begin(NEXT)
        assert not segment.path.exists()
    finally:
        segment.discard()
    assert not layout.weights.exists()
    assert engines_of(layout) == []
    assert run_id_of(layout) == NEXT
    assert copy.missing([words]) == [words]
