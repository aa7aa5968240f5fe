"""State of a transferred policy while vLLM does not answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.services.inference.vllm.support.lent import Lender

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.vllm.client import EngineFailedError, EngineSilentError
from rolloutmq.services.inference.vllm.policy import SentWeightsPolicy


class Client:
    """Says which version vLLM has, as a test wants."""

    def __init__(self, *said: str | Exception) -> None:
        self._said = list(said)

    async def sent_version(self) -> str:
        said = self._said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[SentWeightsPolicy]:
    lender = Lender(tmp_path / "run", "qwen2")
    yield SentWeightsPolicy(lender.layout, PolicyVersion(0, 3), 8)
    lender.close()


async def test_one_that_does_not_answer_in_time_is_not_given_up_for_that(policy: SentWeightsPolicy) -> None:
    """It may be stopped, or take in a large model; whether it stands still, its steps say."""
    silent = Client(EngineSilentError("sent_weights"), "0.4")
    assert await policy.followed(silent, 0.0) is policy  # type: ignore[arg-type]
    assert policy.version == PolicyVersion(0, 3)
    assert await policy.followed(silent, 1.0) is policy  # type: ignore[arg-type]
    assert policy.version == PolicyVersion(0, 4)


async def test_one_that_is_gone_is(policy: SentWeightsPolicy) -> None:
    with pytest.raises(EngineFailedError, match="is unavailable"):
        await policy.followed(Client(EngineFailedError("vLLM is unavailable")), 0.0)  # type: ignore[arg-type]
