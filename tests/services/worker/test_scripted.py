"""The scripted policy behaves like the real one."""

import asyncio

import pytest

from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.scripted import END, LOGPROB, ScriptedPolicy
from rolloutmq.services.worker.trajectory import Trajectory


def test_answers_come_from_the_script() -> None:
    version = PolicyVersion(1, 7)
    policy: Policy = ScriptedPolicy("ab", version)
    (answer,) = asyncio.run(policy.complete("q"))
    assert answer.text == "ab"
    assert answer.prompt_token_ids == [ord("q")]
    assert answer.token_ids == [ord("a"), ord("b"), END]
    assert answer.tokens == ["a", "b", "</s>"]
    assert answer.logprobs == [LOGPROB] * 3
    assert (answer.oldest, answer.newest, answer.finish_reason) == (version, version, "stop")


def test_an_answer_that_fills_its_tokens_has_no_end() -> None:
    (answer,) = asyncio.run(ScriptedPolicy("abc").complete("q", max_tokens=3))
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("abc", "length", 3)
    (answer,) = asyncio.run(ScriptedPolicy("abc").complete("q", max_tokens=2, stop="b"))
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_answers_in_turn_go_on_over_calls() -> None:
    policy = ScriptedPolicy(["a", "b", "c"])
    first = asyncio.run(policy.complete("q", n=2))
    second = asyncio.run(policy.chat([{"role": "user", "content": "q"}], n=2))
    assert [answer.text for answer in first + second] == ["a", "b", "c", "a"]


def test_a_script_has_no_server() -> None:
    policy: Policy = ScriptedPolicy("a")
    with pytest.raises(UsageError, match="no server"):
        policy.endpoint()


async def test_a_turn_continues_the_tokens_of_those_before() -> None:
    policy: Policy = (script := ScriptedPolicy(["ab", "c"]))
    (first,) = await policy.complete("q")
    sequence = Trajectory.of(first)
    (second,) = await policy.chat([{"role": "tool", "content": "7"}], after=sequence)
    assert script.prompts == ["q", "qab\n7"], "without the end of an answer"
    assert second.prompt_token_ids == [*map(ord, "qab"), END, *map(ord, "\n7")]
    (third,) = await policy.complete("!", after=sequence.then(second))
    assert script.prompts[-1] == "qab\n7c!"
    assert sequence.then(second).then(third).finish_reason == "stop"


async def test_the_turns_so_far_are_not_said_again() -> None:
    policy: Policy = ScriptedPolicy("ab")
    sequence = Trajectory.of((await policy.complete("q"))[0])
    said = [{"role": "assistant", "content": "ab"}, {"role": "tool", "content": "7"}]
    with pytest.raises(UsageError, match="must be only those since its last answer"):
        await policy.chat(said, after=sequence)
    assert await policy.chat(said)


async def test_the_tokenizer_of_a_script_knows_every_character() -> None:
    policy: Policy = ScriptedPolicy("a")
    assert await policy.detokenize(await policy.tokenize("q é")) == "q é"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert await policy.detokenize(await policy.render(messages, tools=[])) == "a\nb"
