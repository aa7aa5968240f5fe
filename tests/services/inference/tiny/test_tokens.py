"""The server's interface for tokens, over HTTP, with the trainer's side in this process."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.services.inference.tiny.test_server import Client, Trainer, V, serving

from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.trajectory import Trajectory

PATH = "/inference/v1/generate"
PROMPT = [1, 6, 4, 5, 13]  # <bos>, then `312=`


@pytest.fixture
def trainer(run_dir: Path) -> Any:
    made = Trainer(run_dir)
    yield made
    made.stop()


async def tokens(client: Client, prompt: list[int] = PROMPT, **sampling: Any) -> Any:
    body = {"model": "policy", "token_ids": prompt, "sampling_params": {"logprobs": 1, **sampling}}
    status, answer = await client.post(PATH, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice


async def test_tokens_are_sampled_from_the_shared_weights(trainer: Trainer) -> None:
    trainer.start(version=V(1, 7))
    async with serving(trainer) as client:
        choices = await asyncio.gather(*(tokens(client, max_tokens=8) for _ in range(8)))
    for choice in choices:
        row = torch.tensor([PROMPT + choice["token_ids"]])
        with torch.no_grad():
            logits = trainer.policy(input_ids=row, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, row[0, len(PROMPT) :, None]).squeeze(-1)
        content = choice["logprobs"]["content"]
        assert [one["token_id"] for one in content] == choice["token_ids"]
        assert [one["logprob"] for one in content] == pytest.approx(expected.tolist(), abs=1e-5)
        assert [one["version"] for one in choice["weight_versions"]] == [{"incarnation": 1, "step": 7}]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 4


async def test_it_samples_what_the_interface_for_text_does(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        choice = await tokens(client, max_tokens=6, temperature=0)
        text = (await client.complete(max_tokens=6, temperature=0))["choices"][0]
    assert choice["token_ids"] == text["token_ids"]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(
        text["logprobs"]["token_logprobs"], abs=1e-6
    )


async def test_an_answer_ends_at_a_stop_token_of_its_own_request_alone(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        free = await tokens(client, max_tokens=6, temperature=0)
        stop = free["token_ids"][0]
        stopped, other = await asyncio.gather(
            tokens(client, max_tokens=6, temperature=0, stop_token_ids=[30, stop]),
            tokens(client, max_tokens=6, temperature=0, stop_token_ids=[]),
        )
    assert (stopped["token_ids"], stopped["finish_reason"], stopped["stop_reason"]) == ([stop], "stop", stop)
    assert other["token_ids"] == free["token_ids"]


async def test_an_answer_fills_the_context_at_most(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        choice = await tokens(client, [5] * 126, max_tokens=50)
        status, answer = await client.post(PATH, {"token_ids": [5] * 128, "sampling_params": {}})
    assert len(choice["token_ids"]) <= 2
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_errors_are_those_of_the_other_paths(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        for body, status, says in [
            (b"{", 400, "invalid request"),
            ({"token_ids": [99], "sampling_params": {}}, 400, "token_ids: token ids must be from 0 to 31"),
            ({"token_ids": [1], "sampling_params": {}, "model": "other"}, 404, "does not exist"),
            ({"token_ids": [1], "sampling_params": {"n": 2}}, 400, "sampling_params.n: must be 1"),
            (b" " * ((4 << 20) + 1), 413, "4194304 bytes"),
        ]:
            found, answer = await client.post(PATH, body)
            assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
            assert says in answer["error"]["message"]
        status, answer = await client.get(PATH)
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


async def test_half_written_weights_are_never_sampled(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        with pytest.raises(InterruptedError):
            trainer.tear()
        status, answer = await client.post(PATH, {"token_ids": [1], "sampling_params": {}})
        assert status == 503
        assert "half-written since version 0.0" in answer["error"]["message"]
        with trainer.share.writing(V(1, 0), restoring=True):
            pass
        assert (await tokens(client, max_tokens=1))["weight_versions"][0]["version"]["incarnation"] == 1


async def test_turns_in_messages_and_text_carry_the_sampled_tokens(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        engines = Engines(lambda: [InferenceAddress(url=client.url, pid=0)], random.Random(0))
        async with OpenAIPolicy.opened(engines) as policy:
            assert await policy.render([{"role": "user", "content": "312="}]) == PROMPT
            assert await policy.tokenize("312=") == PROMPT[1:]
            assert await policy.detokenize(PROMPT) == "<bos>312="
            (first,) = await policy.chat([{"role": "user", "content": "312="}], max_tokens=4)
            sequence = Trajectory.of(first)
            tool = [{"role": "tool", "content": "7="}]
            (second,) = await policy.chat(tool, after=sequence, max_tokens=4)
            both = sequence.then(second)
            (third,) = await policy.complete("13=", after=both, max_tokens=4)
            (fourth,) = await policy.complete([5, 13], after=both.then(third), max_tokens=4)
    assert second.prompt_token_ids == [*sequence.token_ids, 10, 13]
    assert third.prompt_token_ids == [*both.token_ids, 4, 6, 13]
    whole = both.then(third).then(fourth)
    given = len(PROMPT) + 2 + 3 + 2
    assert sum(map(bool, whole.mask)) == len(whole.token_ids) - given


async def test_the_paths_for_text_name_what_they_refuse(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        status, answer = await client.post("/tokenize", {"prompt": "a"})
        assert (status, answer["error"]["message"][:34]) == (
            400,
            "prompt 'a': not in the vocabulary ('a'); "[:34],
        )
        status, answer = await client.post("/detokenize", {"tokens": [1, 99]})
        assert (status, answer["error"]["message"]) == (400, "tokens: must be from 0 to 31")
        assert (await client.get("/tokenize"))[0] == 405
