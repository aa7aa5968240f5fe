"""Which token an engine gets: that of the run on its own host, and there alone."""

import random
from pathlib import Path

import pytest

from rolloutmq.bus import lifecycle
from rolloutmq.bus.files import write_private
from rolloutmq.bus.lifecycle import without_secrets
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Connection, InferenceAddress, RunLayout
from rolloutmq.services.http_server.access import with_token
from rolloutmq.services.http_server.run_token import engine_token
from rolloutmq.services.worker.openai.engine_choice import Engine, Engines
from rolloutmq.services.worker.openai.engine_tokens import token_of

TOKEN = "0123456789abcdef"
OWN = Engine("http://a", name="inference")
SECOND = Engine("http://b", name="inference-1")
FAR = Engine("http://c", name="inference.gpu7", key="engine-7")
OTHER = Engine("http://d", name="inference.gpu8", key="engine-8")
KEYLESS = Engine("http://e", name="inference.gpu9")


def run_at(path: Path, **sections: object) -> RunConfig:
    write_private(path / "token", TOKEN.encode())
    return RunConfig.model_validate({"run": {"http_token_file": "token"}, "base_dir": path, **sections})


def test_the_token_of_the_run_does_not_leave_its_host(tmp_path: Path) -> None:
    of = token_of(run_at(tmp_path), RunLayout(tmp_path))
    assert of(OWN) == of(SECOND) == TOKEN
    assert of(FAR) == engine_token(TOKEN, "engine-7")
    assert len({TOKEN, of(FAR), of(OTHER)}) == 3, "an engine cannot use it at the engines of another key"
    assert TOKEN not in of(FAR)
    assert of(KEYLESS) == ""


def test_a_worker_of_another_host_sends_that_of_its_key(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_json(layout.connection, Connection(addresses=("tcp://head:7760",), key="worker.key"))
    of = token_of(run_at(tmp_path), layout)
    assert of(OWN) == of(FAR) == of(KEYLESS) == TOKEN


def test_engines_that_are_not_the_runs_get_none(tmp_path: Path) -> None:
    external = {"kind": "external", "url": "http://elsewhere/v1"}
    assert token_of(run_at(tmp_path, inference=external), RunLayout(tmp_path))(OWN) == ""
    assert token_of(RunConfig(), RunLayout(tmp_path))(FAR) == ""


def test_the_key_of_an_engine_comes_from_its_address(tmp_path: Path) -> None:
    address = InferenceAddress(url="http://c", pid=7, name="inference.gpu7", key="engine-7")
    found = Engines(lambda: [address], random.Random(0)).take(0.0)
    assert found is not None
    assert token_of(run_at(tmp_path), RunLayout(tmp_path))(found) == engine_token(TOKEN, "engine-7")


def test_no_log_of_the_worker_has_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_hidden", {})
    of = token_of(run_at(tmp_path), RunLayout(tmp_path))
    for engine in (OWN, FAR):
        line = f"HTTP Request: POST {with_token(engine.url, of(engine))}/v1/completions"
        assert without_secrets(line) == f"HTTP Request: POST {engine.url}/t/TOKEN/v1/completions"
