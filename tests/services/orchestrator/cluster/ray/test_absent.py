"""A run that asks for Ray where no cluster runs. Ray finds one by its processes, so this has a module of its own."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rolloutmq.schemas.process import python_command

pytestmark = [pytest.mark.rival, pytest.mark.timeout(400)]


def test_without_a_cluster_nothing_starts(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: make .venv-ray/.installed")
    if any(process.info["name"] == "gcs_server" for process in psutil.process_iter(["name"])):
        pytest.skip("a Ray cluster runs on this machine")
    words = ("up", "examples/quickstart.toml", "--cluster", "ray", "--run-dir", str(tmp_path / "run"))
    done = subprocess.run(
        python_command(sys.executable, "rolloutmq.launch.cli", *words),
        env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[5],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "ray start --head" in done.stderr
    assert not (tmp_path / "run").exists()
