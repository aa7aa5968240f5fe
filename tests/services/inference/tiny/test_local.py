"""A policy that this process serves to itself answers like that of a run, and leaves nothing."""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, PolicyRefusedError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.inference.tiny.local import serving
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines


def config(**model: Any) -> RunConfig:
    return validate({"model": model})


def sampled(run: RunConfig, seed: int, prompt: str = "123=") -> list[Completion]:
    async def ask(url: str) -> list[Completion]:
        engines = Engines(lambda: [InferenceAddress(url=url, pid=0)], random.Random(0))
        async with OpenAIPolicy.opened(engines, patience_s=60.0) as policy:
            return await policy.complete(prompt, n=3, max_tokens=5)

    with serving(run, seed) as server:
        found = asyncio.run(ask(server.url))
        assert server.text.shown(found[0].prompt_token_ids) == f"<bos>{prompt}"
        return found


def test_it_answers_by_its_seed_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, again, other = sampled(config(), 1), sampled(config(), 1), sampled(config(), 2)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert [one.logprobs for one in first] == [one.logprobs for one in again]
    assert [one.token_ids for one in first] != [one.token_ids for one in other]
    assert all(len(one.logprobs) == len(one.token_ids) for one in first)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_the_model_cannot_read_is_refused() -> None:
    with pytest.raises(PolicyRefusedError, match=r"not in the vocabulary \('\+'\)"):
        sampled(config(), 1, "1+2")


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* is not a directory with a config\.json"):
        sampled(validate({"model": {"path": str(tmp_path)}, "trainer": {"learning_rate": 1e-6}}), 1)
