"""Requirements of subclasses of `InferenceApp`."""

import pytest

from rolloutmq.services.inference.app import InferenceApp, wanted_port
from rolloutmq.services.inference.jobs import Job


def test_an_engine_that_lacks_something_cannot_be_made() -> None:
    class Half(InferenceApp):
        async def sample(self, job: Job) -> None:
            """Sample nothing."""

    with pytest.raises(TypeError, match=r"abstract.*busy_s, policy"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("name", "port"), [("inference", 8000), ("inference-1", 0), ("inference.gpu7", 8000)]
)
def test_the_configured_port_is_that_of_the_first_engine_or_of_a_joined_one(name: str, port: int) -> None:
    assert wanted_port(name, 8000) == port
