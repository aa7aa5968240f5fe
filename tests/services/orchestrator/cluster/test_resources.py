"""What a process needs of a node, and how a need that no node can meet is told."""

import pytest
from pydantic import ValidationError

from rolloutmq.bus.engine_registry import PLACED
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.services.orchestrator.cluster.resources import Need, need_of, shortage

SMALL, LARGE = {"CPU": 2.0}, {"CPU": 16.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("need", "nodes", "told"),
    [
        (Need(4, 1), [SMALL], "needs 4 CPU and 1 GPU; the largest node has 2 CPU"),
        (Need(4, 2), [SMALL, LARGE], "needs 4 CPU and 2 GPU; the largest node has 16 CPU and 1 GPU"),
        (Need(20, 1), [LARGE, SMALL], "needs 20 CPU and 1 GPU; the largest node has 16 CPU and 1 GPU"),
        (Need(2, 0), [SMALL], "needs 2 CPU; every node that has as much is in use"),
        (Need(1, 0), [], "needs 1 CPU; the cluster has no node"),
        (Need(0.5, 0), [{"memory": 5.0}], "needs 0.5 CPU; the largest node has no CPU"),
    ],
)
def test_a_need_without_a_node_is_told_in_numbers(
    need: Need, nodes: list[dict[str, float]], told: str
) -> None:
    assert shortage(need, nodes) == told


def test_a_worker_needs_what_the_configuration_says() -> None:
    config = RunConfig.model_validate(
        {
            "environment": {"a": {"entry": "e.py:E", "gpus": 2}, "b": {"entry": "e.py:E"}},
            "cluster": {"engine": "ray", "worker_cpus": 0.5},
        }
    )
    assert need_of(config, "a") == Need(0.5, 2)
    assert need_of(config, "b").amounts == {"CPU": 0.5}
    assert need_of(config, "gone") == Need(0.5, 0)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"orchestrator": {"enabled": False}}, "orchestrator.enabled"),
        ({"orchestrator": {"start_workers": False}}, "orchestrator.start_workers"),
        ({"cluster": {"engine": "slurm"}}, "engine"),
        ({"cluster": {"engine": "ray", "lease_s": 1.0}}, "lease_s"),
    ],
)
def test_what_a_cluster_cannot_run_is_refused(tree: dict[str, object], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        RunConfig.model_validate({"cluster": {"engine": "ray"}, **tree})


def test_an_engine_may_need_a_part_of_a_gpu() -> None:
    tree = {"cluster": {"engine_cpus": 0.5, "engine_gpus": 0.25, "worker_cpus": 3}}
    need = need_of(RunConfig.model_validate(tree), PLACED)
    assert str(need) == "0.5 CPU and 0.25 GPU"
    assert need.fits({"CPU": 1.0, "GPU": 0.25})
    assert not need.fits({"CPU": 1.0, "GPU": 0.2})
