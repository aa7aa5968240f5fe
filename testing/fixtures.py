"""Plugin for pytest: `pytest_plugins = ["rolloutmq.testing.fixtures"]` in the `conftest.py` of the root directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutmq.testing.broker import LocalBroker


@pytest.fixture
def rolloutmq_broker(tmp_path: Path) -> Iterator[LocalBroker]:
    """A broker in this process, for one test; its run directory is `tmp_path / "run"`."""
    with LocalBroker(run_dir=tmp_path / "run") as broker:
        yield broker
