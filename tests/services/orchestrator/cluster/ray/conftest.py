"""Nodes of real Ray, and runs whose workers they have."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.services.orchestrator.cluster.ray.nodes import Nodes, Run


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three nodes."""
    pytest.importorskip("ray", reason="needs Ray: make .venv-ray/.installed")
    directory = Path(tempfile.mkdtemp(prefix="rmq-ray-", dir="/tmp"))  # sockets need a short path
    made = Nodes(directory)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def start(nodes: Nodes, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs on the nodes; what is left of them is killed."""
    runs: list[Run] = []

    def started(*settings: str, **more: Path) -> Run:
        runs.append(Run(nodes, tmp_path, *settings, **more))
        return runs[-1]

    try:
        yield started
    finally:
        for run in runs:
            run.close()
