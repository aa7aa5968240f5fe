"""What an engine must have that derives from `Front`."""

import pytest

from rolloutmq.services.inference.front import Front
from rolloutmq.services.inference.generate import Job


def test_an_engine_that_lacks_something_cannot_be_made() -> None:
    class Half(Front):
        async def sample(self, job: Job) -> None:
            """Sample nothing."""

    with pytest.raises(TypeError, match=r"abstract.*busy_s, policy"):
        Half()  # type: ignore[abstract]
