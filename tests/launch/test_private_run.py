"""A run keeps its secrets and its files to itself, and stays out of what other users prepared for it."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import PERMANENT_FAILURE

SECRET = "s3cret-of-the-test"
LIMIT_S = 120.0
NOBODY = 65534

ENVIRONMENT = """
class Leaky:
    def __init__(self, key):
        self.key = key

    async def rollout(self, policy, size, rng):
        raise PermissionError(f"401: {self.key} was refused")
"""

CONFIG = """
[environment.leaky]
entry = "leaky.py:Leaky"
options = { key = "env:LEAKY_KEY" }
max_workers = 1
failure_limit = 3
pacing = false

[inference]
kind = "external"
url = "http://127.0.0.1:9/v1"

[trainer]
enabled = false
"""


def rolloutmq(*words: object, limit_s: float = LIMIT_S, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "rolloutmq.launch.cli", *map(str, words)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def test_a_secret_is_in_no_file_and_no_output_of_its_run(tmp_path: Path) -> None:
    """Though its environment raises it. And whatever the run writes, other users cannot read."""
    (tmp_path / "leaky.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(CONFIG)
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir(mode=0o755)
    command = "up", tmp_path / "run.toml", "--plain", "--run-dir", layout.root
    ended = rolloutmq(*command, LEAKY_KEY=SECRET)
    assert ended.returncode == 1
    assert "401: env:LEAKY_KEY was refused" in layout.log("leaky-0").read_text()
    files = [path for path in layout.root.rglob("*") if path.is_file()]
    assert {layout.config, layout.metrics, layout.log("up"), layout.log("broker")} <= {*files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in ended.stdout + ended.stderr
    modes = {path.name: oct(path.stat().st_mode) for path in layout.root.iterdir()}
    assert not [mode for mode in modes.values() if not mode.endswith("00")], modes


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of the system in which everybody may write, like /tmp."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def prepared(shared: Path, tmp_path: Path) -> tuple[Path, list[Path]]:
    """Let another user prepare a run with links to a file of ours; return the file, and all that is there."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = ("dropped.jsonl", "summary.json", "metrics.jsonl", "logs/up.log", "logs/broker.log", "doubts.new")
    traps = " && ".join(f"ln -s {victim} {shared}/run/{name}" for name in names)
    script = f"mkdir -m 777 {shared}/run {shared}/run/logs && echo {{}} > {shared}/run/config.json && {traps}"
    subprocess.run(["sh", "-ec", script], user=NOBODY, group=NOBODY, extra_groups=[], check=True, timeout=20)
    return victim, sorted(shared.rglob("*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_a_report_on_a_directory_that_another_user_prepared_writes_nothing(
    shared: Path, tmp_path: Path
) -> None:
    victim, before = prepared(shared, tmp_path)
    ended = rolloutmq("report", shared / "run", limit_s=60.0)
    assert "Traceback" not in ended.stderr
    assert "precious" not in ended.stdout + ended.stderr
    assert sorted(shared.rglob("*")) == before
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
@pytest.mark.parametrize(
    "words",
    [
        ("broker", "--run-dir"),
        ("gateway", "--plain", "--port", "0", "--run-dir"),
        ("down",),
    ],
    ids=lambda words: words[0],
)
def test_a_directory_that_another_user_prepared_is_left_alone(
    shared: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    victim, before = prepared(shared, tmp_path)
    ended = rolloutmq(*words, shared / "run", limit_s=30.0)
    assert ended.returncode in {1, PERMANENT_FAILURE}
    assert f"{shared}/run: belongs to user {NOBODY}" in ended.stderr
    assert sorted(shared.rglob("*")) == before
    assert victim.read_text() == "precious"
