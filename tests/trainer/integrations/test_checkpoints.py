"""Checkpoints of another project's trainer: synced, then committed; and the counter of its lives."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.bus import files
from rolloutmq.schemas.errors import UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.integrations import checkpoints
from rolloutmq.trainer.integrations.checkpoints import COMMIT_S, commit, lives_of, make_durable, next_life
from rolloutmq.trainer.integrations.trl import training as trl
from rolloutmq.trainer.integrations.trl.training import Training


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is synced to disk."""
    found: list[Path] = []
    monkeypatch.setattr(files, "force", found.append)
    monkeypatch.setattr(checkpoints, "force", found.append)
    return found


def saved(root: Path) -> Path:
    """A checkpoint with files at two depths, and the file that names it."""
    folder = root / "global_step_4"
    (folder / "policy").mkdir(parents=True)
    for path in (folder / "data.pt", folder / "policy" / "weights", root / "latest.txt"):
        path.write_text("4")
    return folder


def test_a_checkpoint_is_synced_with_its_folders_and_what_names_it(
    tmp_path: Path, forced: list[Path]
) -> None:
    folder = saved(tmp_path)
    make_durable(folder, ["latest.txt", "absent.txt"])
    assert {*forced} == {
        tmp_path / "latest.txt",
        folder / "data.pt",
        folder / "policy" / "weights",
        folder / "policy",
        folder,
        tmp_path,
    }
    assert forced[-1] == tmp_path, "its own entry comes last"


def test_a_checkpoint_in_a_cloud_storage_is_not_synced(forced: list[Path]) -> None:
    make_durable("s3://bucket/global_step_4", ["latest.txt"])
    assert forced == []


def test_a_commit_waits_for_the_broker_no_longer_than_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[PolicyVersion, float]] = []

    def send(version: PolicyVersion, *, timeout_s: float) -> None:
        asked.append((version, timeout_s))
        raise WaitTimeoutError("commit", timeout_s, "the broker is away")

    commit(send, PolicyVersion(1, 4))
    assert asked == [(PolicyVersion(1, 4), COMMIT_S)]
    assert "checkpoint not reported" in caplog.text


def test_lives_are_counted_where_each_of_them_looks(tmp_path: Path, run_dir: Path) -> None:
    assert lives_of(run_dir, "s3://bucket/mine") == RunLayout(run_dir).checkpoints
    assert lives_of("tcp://127.0.0.1:1", str(tmp_path)) == tmp_path
    assert [next_life("tcp://127.0.0.1:1", str(tmp_path)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UsageError, match=r"checkpoints: must be a local folder .*s3://bucket/mine"):
        next_life("tcp://127.0.0.1:1", "s3://bucket/mine")


@pytest.mark.parametrize("rank", [0, 1])
def test_trls_leading_rank_syncs_a_checkpoint_once_all_have_written_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(trl, "from_all", lambda _given: done.append("all are there"))
    monkeypatch.setattr(trl, "make_durable", done.append)
    consumer = SimpleNamespace(commit=lambda version, timeout_s: done.append((version, timeout_s)))
    nothing: Any = None
    training = Training(
        consumer=consumer,  # type: ignore[arg-type]
        journal=nothing,
        publication=nothing,
        tell=nothing,
        demand=nothing,
        generation=nothing,
        version=PolicyVersion(0, 4),
        rank=rank,
        ranks=2,
    )
    folder = saved(tmp_path)
    training.commit(folder)
    committed = [folder, (PolicyVersion(0, 4), COMMIT_S)] if rank == 0 else []
    assert done == ["all are there", *committed]
    training.commit(tmp_path / "absent")
    assert done == ["all are there", *committed, "all are there"], "nothing is committed that is not there"
