"""`[cluster]`: what processes ask for."""

import pytest
from pydantic import ValidationError

from rolloutmq.schemas.config.orchestrator import ClusterConfig


@pytest.mark.parametrize("gpus", [0.0, 0.25, 1.0, 3.0])
def test_an_engine_has_a_part_of_a_gpu_or_whole_ones(gpus: float) -> None:
    assert ClusterConfig(engine_gpus=gpus).engine_gpus == gpus


@pytest.mark.parametrize("gpus", [1.5, -1.0, float("inf"), float("nan")])
def test_no_cluster_gives_other_numbers_of_gpus(gpus: float) -> None:
    with pytest.raises(ValidationError, match="engine_gpus"):
        ClusterConfig(engine_gpus=gpus)


def test_only_a_cluster_keeps_a_part_of_this_host() -> None:
    assert ClusterConfig(engine="ray", reserve_gpus=1).reserves
    assert not ClusterConfig(reserve_gpus=1).reserves
    assert not ClusterConfig(engine="ray").reserves
