"""The example with Ray actors, as a user runs it. `make test-ray` runs it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.examples.ray.conftest import ENVIRON, KeyedBroker

from rolloutmq.schemas.network.keys import Role
from rolloutmq.testing import assert_nothing_lost, assert_settled

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "clients" / "ray_actors.py"
LIMIT_S = 300


@pytest.mark.rival
def test_the_example_trains_each_group_once(cluster: "Cluster", tmp_path: Path) -> None:
    with KeyedBroker(tmp_path, "trainer.batch_sequences=16", "trainer.steps=20") as broker:
        address = broker.way("worker", Role.WORKER).address
        broker.way("trainer", Role.TRAINER)
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), address],
            cwd=tmp_path,
            env={**os.environ, **ENVIRON, "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "trained 20 steps of 80 groups" in done.stdout
        assert_nothing_lost(broker, [f"task-{number}" for number in range(80)])
        assert_settled(broker, 80)
