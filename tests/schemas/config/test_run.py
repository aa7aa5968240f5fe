"""Sections of a run that must agree with each other."""

from typing import Any

import pytest

from rolloutmq.launch.settings import validate
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
