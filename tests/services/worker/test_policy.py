"""Policies around another one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import CountingPolicy, GreedyPolicy
from rolloutmq.services.worker.scripted import ScriptedPolicy

ANSWER = {
    "choices": [
        {
            "index": 0,
            "message": {"content": "ab"},
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "prompt_token_ids": [1],
            "logprobs": {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -1.0}]},
        }
    ]
}


class Served(ScriptedPolicy):
    """A scripted policy with an address."""

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:  # type: ignore[override]
        """Return an endpoint that nobody asks."""
        yield Endpoint("http://unused/v1", "m")


async def test_completions_and_their_tokens_are_counted_however_the_policy_is_asked() -> None:
    policy = CountingPolicy(Served("ab"))
    await policy.complete("q", n=2)
    assert (policy.completions, policy.tokens) == (2, 6), "with their end token"
    await policy.chat([{"role": "user", "content": "q"}], max_tokens=2)
    assert (policy.completions, policy.tokens) == (3, 8)
    async with GreedyPolicy(policy).endpoint() as endpoint:
        (completion,) = endpoint.completions(ANSWER)
    assert completion.text == "ab"
    assert (policy.completions, policy.tokens) == (4, 10)
