"""A trainer and the run directory of another host; whatever they have in shared memory goes at the end."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.weights.stream.support import Trainer

from rolloutmq.schemas.files import RunLayout


@pytest.fixture
def trainer(run_dir: Path) -> Iterator[Trainer]:
    root = run_dir / "trainer"
    root.mkdir(mode=0o700)
    made = Trainer(root)
    yield made
    made.close()
    gc.collect()


@pytest.fixture
def host(run_dir: Path) -> RunLayout:
    """The run directory of the other host."""
    root = run_dir / "host"
    root.mkdir(mode=0o700)
    return RunLayout(root)
