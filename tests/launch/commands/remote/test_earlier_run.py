"""What a command has of an earlier run is set aside, and nothing of another command."""

from pathlib import Path

from rolloutmq.launch.commands.remote.earlier_run import WORKERS, EarlierRun
from rolloutmq.schemas.files import RunLayout

FIRST, SECOND = "1" * 32, "2" * 32


def workers_of(root: Path) -> EarlierRun:
    return EarlierRun(RunLayout(root), "own-far", WORKERS)


def test_the_same_run_keeps_all(tmp_path: Path) -> None:
    (tmp_path / "spools").mkdir()
    (tmp_path / "spools" / "own-far.0").write_bytes(b"groups")
    for _ in range(2):
        assert not workers_of(tmp_path).is_of_another(FIRST)
        workers_of(tmp_path).begin(FIRST)
    assert (tmp_path / "spools" / "own-far.0").exists()


def test_files_of_an_earlier_run_are_set_aside_each_time(tmp_path: Path) -> None:
    spool, checkpoints = tmp_path / "spools" / "own-far.0", tmp_path / "checkpoints" / "step-000010"
    spool.parent.mkdir()
    checkpoints.mkdir(parents=True)
    for run_id, other in ((FIRST, SECOND), (SECOND, FIRST), (FIRST, SECOND)):
        workers_of(tmp_path).begin(run_id)
        spool.write_bytes(run_id.encode())
        assert workers_of(tmp_path).is_of_another(other)
        workers_of(tmp_path).begin(other)
        assert list(spool.parent.iterdir()) == []
    found = {path.parent.parent.name: path.read_text() for path in (tmp_path / "earlier").glob("*/spools/*")}
    assert found == {"11111111": FIRST, "22222222": SECOND, "11111111.2": FIRST}
    assert checkpoints.exists(), "the trainer of this host has it"
