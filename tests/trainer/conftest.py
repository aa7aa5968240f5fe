"""Torch and transformers bring a million objects that never go away: the collection after each test skips them."""

import gc
from collections.abc import Iterator

import pytest
import torch
import transformers  # noqa: F401 - loaded here, so that it is what is frozen
from tests.trainer.support.vllm_receiver import Server, receiving
from transformers import LlamaForCausalLM  # noqa: F401

import rolloutmq.trainer.loop  # noqa: F401

gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def numbers_as_they_were() -> Iterator[None]:
    """A trainer lets its process take subnormal numbers for zero; the tests after it need them."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def server() -> Iterator[Server]:
    """What stands in for a vLLM to which weights are sent."""
    with receiving() as made:
        yield made
