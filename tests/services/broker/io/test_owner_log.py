"""The owners of names survive the broker."""

import logging
from pathlib import Path

import pytest

from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.broker.io.owner_log import OwnerLog

ROLES = {"k": Role.WORKER, "t": Role.TRAINER}


def test_changes_are_read_again_and_the_last_counts(tmp_path: Path) -> None:
    file = tmp_path / "owners.jsonl"
    log = OwnerLog(file, ROLES)
    assert log.owners == {}
    log.write({"producer:a": "k", "producer:b": "k", "consumer:a": "t"})
    log.write({"producer:a": "", "producer:b": "t"})
    assert OwnerLog(file, ROLES).owners == {"producer:b": "t", "consumer:a": "t"}
    assert len(file.read_bytes().splitlines()) == 2
    assert file.stat().st_mode & 0o777 == 0o600


def test_keys_that_may_not_enter_have_no_names(tmp_path: Path) -> None:
    file = tmp_path / "owners.jsonl"
    OwnerLog(file, ROLES).write({"producer:a": "k", "consumer:a": "t"})
    assert OwnerLog(file, {"t": Role.TRAINER}).owners == {"consumer:a": "t"}


def test_damage_costs_its_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "owners.jsonl"
    OwnerLog(file, ROLES).write({"producer:a": "k"})
    with file.open("ab") as torn:
        torn.write(b'\xff\n{"name": 3}\n{"name": "producer:b", "ke')
    with caplog.at_level(logging.WARNING):
        assert OwnerLog(file, ROLES).owners == {"producer:a": "k"}
    assert caplog.text.count("line of owners left out") == 3
    assert OwnerLog(file, ROLES).owners == {"producer:a": "k"}


def test_a_disk_that_takes_nothing_ends_no_broker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = OwnerLog(tmp_path / "owners.jsonl", ROLES)
    (tmp_path / "owners.jsonl").unlink()
    (tmp_path / "owners.jsonl").mkdir()
    log.write({"producer:a": "k"})
    assert "owners of names not written" in caplog.text
