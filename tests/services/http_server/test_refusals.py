"""Refusals by key in one file of the run, bounded, and written seldom."""

from pathlib import Path

from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.http_server.access import HttpAccess
from rolloutmq.services.http_server.refusals import (
    KEYS_LIMIT,
    OTHER,
    REASONS_LIMIT,
    WRITE_S,
    HttpRefusals,
    read_refusals,
)
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.tokens import Holder


def told(path: Path) -> dict[str, dict[str, int]]:
    return {key: one.refused for key, one in read_refusals(path).items()}


def test_servers_add_up_what_they_refuse_each_key(tmp_path: Path) -> None:
    path, now = tmp_path / "http_refused.json", 5.0
    first, second = (
        HttpAccess(server=server, refusals=HttpRefusals(path, lambda: now))
        for server in (Server.GATEWAY, Server.ENGINE)
    )
    worker, gone = Holder("worker-7", Role.WORKER), Holder("old", Role.WORKER, is_revoked=True)
    refused = first.denied(gone, "GET", "/info")
    assert refused is not None
    assert refused.reason == "authorization: key old was revoked; get another one, of `rolloutmq keys new`"
    assert first.denied(worker, "GET", "/status-env") is None
    assert second.denied(gone, "POST", "/v1/completions") is not None
    now += WRITE_S
    assert first.denied(worker, "GET", "/batch") is not None
    assert first.denied(None, "GET", "/batch") is not None, "of nobody"
    assert told(path) == {
        "old": {"HTTP gateway with a revoked token": 1, "HTTP engine with a revoked token": 1},
        "worker-7": {"HTTP gateway /batch": 1},
    }
    assert read_refusals(path)["worker-7"].at == now
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_client_that_asks_on_and_on_costs_one_write_a_second(tmp_path: Path) -> None:
    path, now = tmp_path / "http_refused.json", 0.0
    refusals = HttpRefusals(path, lambda: now)
    for count in range(100):
        refusals.add("k", "x")
        refusals.write()
        assert told(path) == {"k": {"x": 1}}, count
    now += WRITE_S
    refusals.write()
    assert told(path) == {"k": {"x": 100}}


def test_keys_and_reasons_are_bounded(tmp_path: Path) -> None:
    path, now = tmp_path / "http_refused.json", 0.0
    refusals = HttpRefusals(path, lambda: now)
    for number in range(2 * REASONS_LIMIT):
        refusals.add("k", f"reason {number}")
    for number in range(2 * KEYS_LIMIT):
        refusals.add(f"key-{number}", "x")
    refusals.write()
    found = told(path)
    assert len(found) == KEYS_LIMIT
    assert found["k"][OTHER] == REASONS_LIMIT
    assert len(found["k"]) == REASONS_LIMIT + 1


def test_a_damaged_or_missing_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "http_refused.json"
    assert read_refusals(path) == {}
    path.write_bytes(b"{")
    assert read_refusals(path) == {}
    refusals = HttpRefusals(path)
    refusals.add("k", "x")
    refusals.write()
    assert told(path) == {"k": {"x": 1}}


def test_a_file_that_cannot_be_written_keeps_the_counts(tmp_path: Path) -> None:
    directory, now = tmp_path / "run", 0.0
    refusals = HttpRefusals(directory / "http_refused.json", lambda: now)
    refusals.add("k", "x")
    refusals.write()
    directory.mkdir()
    now += WRITE_S
    refusals.write()
    assert told(directory / "http_refused.json") == {"k": {"x": 1}}
