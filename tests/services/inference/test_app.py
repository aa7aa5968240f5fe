"""Requirements of subclasses of `InferenceApp`."""

import pytest

from rolloutmq.services.inference.app import InferenceApp
from rolloutmq.services.inference.jobs import Job


def test_an_engine_that_lacks_something_cannot_be_made() -> None:
    class Half(InferenceApp):
        async def sample(self, job: Job) -> None:
            """Sample nothing."""

    with pytest.raises(TypeError, match=r"abstract.*busy_s, policy"):
        Half()  # type: ignore[abstract]
