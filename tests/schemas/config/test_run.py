"""Sections of a run that must agree with each other."""

from typing import Any

import pytest
from pydantic import ValidationError

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

OPEN = "tcp://0.0.0.0:0"


@pytest.mark.parametrize("listen", [OPEN, "tcp://gpu-7:1", "nothing"])
def test_a_stream_of_weights_for_everybody_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({"weights": {"backend": "stream", "listen": listen}})
    assert str(refused.value).startswith("weights.listen: ")
    assert f"(got {listen!r})" in str(refused.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"weights": {"backend": "stream"}},
        {"weights": {"backend": "stream", "listen": OPEN, "insecure": True}},
        {
            "weights": {"backend": "stream", "listen": OPEN},
            "broker": {"keys": "keys", "listen": "tcp://0.0.0.0:0"},
        },
    ],
)
def test_weights_of_one_host_or_with_keys_are_streamed(sections: dict[str, Any]) -> None:
    assert validate(sections).weights.backend == "stream"


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"orchestrator": {"max_processes": 4}}, "orchestrator.max_processes: bounds the workers"),
        (
            {
                "environment": {"e": {"command": ["true"], "group_size": 1}},
                "gateway": {"enabled": True, "listen": True},
            },
            r"environment\.e\.command, which only the run can start",
        ),
    ],
)
def test_what_only_the_run_can_start_needs_its_orchestrator(tree: dict[str, Any], told: str) -> None:
    own = {**tree.get("orchestrator", {}), "start_workers": False}
    with pytest.raises(ValidationError, match=told):
        RunConfig.model_validate({**tree, "orchestrator": own})


def test_engines_on_a_cluster_need_weights_that_are_sent() -> None:
    cluster: dict[str, object] = {"engine": "ray"}
    tree = {"cluster": cluster, "inference": {"max_engines": 2}, "weights": {"backend": "disk"}}
    with pytest.raises(ValidationError, match=r"weights\.backend: must be posix_shm or stream .*got disk"):
        RunConfig.model_validate(tree)
    cluster["place_engines"] = False
    assert not RunConfig.model_validate(tree).places_engines
