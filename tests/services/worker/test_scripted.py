"""The scripted policy behaves like the real one."""

import asyncio
import math
import random
import re
from typing import Any

import numpy as np
import pytest

from rolloutmq.schemas.errors import PolicyRefusedError, UsageError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.environment import SingleTurn
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.scripted import END, LOGPROB, Answer, ScriptedPolicy, play
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


def test_the_first_regular_expression_in_the_prompt_answers() -> None:
    policy = ScriptedPolicy(
        {r"(\d)\+(\d)": lambda found: str(int(found[1]) + int(found[2])), "weather": "rain"}
    )
    answers = [asyncio.run(policy.complete(prompt))[0].text for prompt in ("is 2+3=", "the weather?")]
    assert answers == ["5", "rain"]
    with pytest.raises(UsageError, match=r"no regular expression is found in the prompt \(got 'else'\)"):
        asyncio.run(policy.complete("else"))


def test_exact_tokens_are_given_back_exactly() -> None:
    policy = ScriptedPolicy(Answer("hi", token_ids=[7, 5, 2], logprobs=[-0.1, -0.2, -0.3]))
    (answer,) = asyncio.run(policy.complete([1, 9], max_tokens=1))
    assert (answer.text, answer.prompt_token_ids, answer.token_ids) == ("hi", [1, 9], [7, 5, 2])
    assert (answer.logprobs, answer.finish_reason) == ([-0.1, -0.2, -0.3], "stop")
    (answer,) = asyncio.run(ScriptedPolicy(Answer(token_ids=[7, 5])).complete("q"))
    assert answer.logprobs == [LOGPROB] * 2


def test_a_truncated_answer_has_no_end() -> None:
    (answer,) = asyncio.run(ScriptedPolicy(Answer("ab", truncated=True)).complete("q"))
    assert (answer.token_ids, answer.finish_reason) == ([ord("a"), ord("b")], "length")


def test_a_scripted_error_is_raised_in_its_turn() -> None:
    policy = ScriptedPolicy(["a", PolicyRefusedError(400, "too long")])
    assert asyncio.run(policy.complete("q"))[0].text == "a"
    with pytest.raises(PolicyRefusedError, match="too long"):
        asyncio.run(policy.chat([{"role": "user", "content": "q"}]))
    assert asyncio.run(policy.complete("q"))[0].text == "a"


async def test_an_answer_may_be_late_or_never_come() -> None:
    policy = ScriptedPolicy([Answer("late", delay_s=0.01), Answer(delay_s=math.inf)])
    assert (await policy.complete("q"))[0].text == "late"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await policy.complete("q")


def test_calls_are_recorded_as_they_were_made() -> None:
    policy = ScriptedPolicy("a")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    asyncio.run(policy.chat(messages, n=2, max_tokens=3, temperature=0.5, stop="."))
    asyncio.run(policy.complete([4, 5]))
    chat, complete = policy.calls
    assert (chat.prompt, chat.messages, chat.n, chat.max_tokens) == ("s\nq", tuple(messages), 2, 3)
    assert (chat.temperature, chat.stop) == (0.5, (".",))
    assert (complete.token_ids, complete.messages) == ([4, 5], None)
    assert policy.prompts == [chat.prompt, complete.prompt]


async def test_a_rollout_runs_in_the_cell_of_a_notebook() -> None:
    class Echo(SingleTurn[str]):
        def task(self, rng: random.Random) -> str:  # noqa: ARG002
            return "q"

        def prompt(self, task: str) -> str:
            return task

        def score(self, task: str, completion: Completion) -> float:
            return float(task == completion.text)

    assert list(play(Echo(), ScriptedPolicy("q"), size=2).scores) == [1.0, 1.0]


def test_a_rollout_that_is_no_coroutine_is_named_as_by_a_worker() -> None:
    class Plain:
        def rollout(self, policy: Policy, size: int, rng: random.Random) -> list[Trajectory]:  # noqa: ARG002
            return []

    environment: Any = Plain()
    with pytest.raises(TypeError, match=r"^`rollout` must be `async def` \(it returned list\)$"):
        play(environment, ScriptedPolicy("q"))


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


@pytest.mark.parametrize("text", ["2+2=", "", ["2+2="], None])
async def test_a_text_begins_no_conversation(text: Any) -> None:
    policy = ScriptedPolicy("4")
    for ask in (policy.chat, policy.render):
        with pytest.raises(
            UsageError, match=r"^messages: must be a list of messages .*policy.complete\(text\)"
        ):
            await ask(text)


async def test_the_turns_so_far_are_not_said_again() -> None:
    policy: Policy = ScriptedPolicy("ab")
    sequence = Trajectory.of((await policy.complete("q"))[0])
    said = [{"role": "assistant", "content": "ab"}, {"role": "tool", "content": "7"}]
    with pytest.raises(UsageError, match="must be only those since its last answer"):
        await policy.chat(said, after=sequence)
    assert await policy.chat(said)


async def test_turns_are_continued_by_a_trajectory_alone() -> None:
    policy = ScriptedPolicy("ab")
    (call,) = await policy.complete("q")
    wrong: Any = call
    for asked in (
        policy.complete("7", after=wrong),
        policy.chat([{"role": "tool", "content": "7"}], after=wrong),
    ):
        with pytest.raises(
            UsageError, match=r"^after: must be a Trajectory \(got Completion\); pass Trajectory\.of"
        ):
            await asked
    assert policy.prompts == ["q"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
        ([], ""),
    ],
)
def test_the_parts_of_a_message_are_joined(content: Any, text: str) -> None:
    policy = ScriptedPolicy("")
    asyncio.run(policy.chat([{"role": "user", "content": content}, {"role": "assistant", "tool_calls": []}]))
    assert policy.prompts == [f"{text}\n"]


@pytest.mark.parametrize(
    ("message", "got"),
    [({}, "none"), ({"content": None}, "None"), ({"content": 5}, "5"), ({"content": [5]}, r"\[5\]")],
)
def test_a_message_without_content_is_refused(message: dict[str, Any], got: str) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "user", **message}]
    with pytest.raises(
        UsageError, match=rf"^messages\[1\]\.content: must be a text or a list of parts \(got {got}\)"
    ):
        asyncio.run(ScriptedPolicy("").chat(said))


@pytest.mark.parametrize("stop", ["", ["=", ""], "\ud800", 5])
def test_a_stop_that_servers_refuse_is_refused(stop: Any) -> None:
    policy = ScriptedPolicy("ab")
    with pytest.raises(
        UsageError, match=r"^stop: must be non-empty text in UTF-8, a list .* \(got .*\); pass None"
    ):
        asyncio.run(policy.complete("q", stop=stop))
    assert policy.prompts == []


async def test_the_tokenizer_of_a_script_knows_every_character() -> None:
    policy: Policy = ScriptedPolicy("a")
    assert await policy.detokenize(await policy.tokenize("q é")) == "q é"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert await policy.detokenize(await policy.render(messages, tools=[])) == "a\nb"


def test_a_rendered_conversation_is_not_continued_by_its_own_turns() -> None:
    policy, question = ScriptedPolicy("a"), [{"role": "user", "content": "q"}]
    (call,) = asyncio.run(policy.chat(question))
    turns = Trajectory.of(call)
    ids = asyncio.run(policy.render([{"role": "tool", "content": "r"}], after=turns))
    with pytest.raises(UsageError, match=r"^prompt: .*got all 3 tokens of `after` once more"):
        asyncio.run(policy.complete(ids, after=turns))
    (answer,) = asyncio.run(policy.complete(ids))
    assert answer.prompt_token_ids == ids
    (answer,) = asyncio.run(policy.complete(ids[3:], after=turns))
    assert answer.prompt_token_ids == ids


def test_a_text_may_repeat_the_turns() -> None:
    """It was refused, depending on the answer: that of a question cut by the limit has no end token."""
    policy = ScriptedPolicy("b")
    (cut,) = asyncio.run(policy.complete("a", max_tokens=1))
    (answer,) = asyncio.run(policy.complete("abc", after=Trajectory.of(cut)))
    assert answer.prompt_token_ids == [*map(ord, "ababc")]


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (42, r"^script: .*got 42"),
        (None, r"^script: .*got None"),
        ([], r"^script: must have at least one answer"),
        ({}, r"^script: must have at least one answer .*got an empty mapping"),
        (["a", 7], r"^script\[1\]: .*got 7"),
        ({"q": None}, r"^script\['q'\]: .*got None"),
    ],
)
def test_an_entry_that_is_no_answer_is_named(script: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ScriptedPolicy(script)


@pytest.mark.parametrize("returned", [7, None])
def test_a_function_that_returns_no_answer_is_named(returned: Any) -> None:
    with pytest.raises(UsageError, match=rf"^script: the function: .*got {returned}\); write str"):
        asyncio.run(ScriptedPolicy(lambda prompt: returned).complete("q"))  # noqa: ARG005
    with pytest.raises(UsageError, match=rf"^script: the function of 'q': .*got {returned}"):
        asyncio.run(ScriptedPolicy({"q": lambda found: returned}).complete("q"))  # noqa: ARG005


@pytest.mark.parametrize(
    ("prompt", "asked", "named"),
    [
        ("q", {"n": 0}, r"^n: .*got 0"),
        ("q", {"max_tokens": 0}, r"^max_tokens: .*got 0"),
        ("q", {"n": "2"}, r"^n: must be an integer .*got '2'"),
        ("q", {"max_tokens": 1.5}, r"^max_tokens: must be an integer .*got 1.5"),
        ([5, -1], {}, r"^token_ids: token 1 .*got -1"),
        ([0x110000], {}, r"^token_ids: token 0 .*got 1114112"),
        (["a"], {}, r"^token_ids: token 0 .*got 'a'"),
    ],
)
def test_a_call_that_no_server_could_answer_is_refused(prompt: Any, asked: Any, named: str) -> None:
    policy = ScriptedPolicy("a")
    with pytest.raises(UsageError, match=named):
        asyncio.run(policy.complete(prompt, **asked))
    assert policy.calls == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"delay_s": -1}, r"^Answer.delay_s: .*got -1"),
        ({"delay_s": math.nan}, r"^Answer.delay_s: .*got nan"),
        ({"delay_s": "1"}, r"^Answer.delay_s: must be 0 or more seconds .*got '1'"),
        ({"delay_s": None}, r"^Answer.delay_s: .*got None"),
        ({"text": 7}, r"^Answer.text: .*got 7"),
        ({"token_ids": [3, -2]}, r"^Answer.token_ids: token 1 .*got -2"),
    ],
)
def test_an_answer_that_cannot_be_given_is_refused(wrong: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Answer(**wrong)


async def test_a_text_is_no_conversation() -> None:
    (first,) = await ScriptedPolicy("4").complete("2+2=")
    with pytest.raises(UsageError, match="messages"):
        await ScriptedPolicy("4").chat("and?", after=Trajectory.of(first, 1.0))  # type: ignore[arg-type]


async def test_a_turn_needs_a_message_behind_the_last_answer() -> None:
    policy = ScriptedPolicy("4")
    (first,) = await policy.chat([{"role": "user", "content": "2+2="}])
    for ask in (policy.chat, policy.render):
        with pytest.raises(
            UsageError, match=r"messages: with `after`, must have at least one message .*got none"
        ):
            await ask([], after=Trajectory.of(first))


@pytest.mark.parametrize("pattern", ["(", "*", 7])
def test_a_key_that_is_no_regular_expression_is_named(pattern: Any) -> None:
    with pytest.raises(
        UsageError, match=f"^script: key {re.escape(repr(pattern))} must be a regular expression"
    ):
        ScriptedPolicy({"0": "1", pattern: "2"})


async def test_the_tokens_of_an_array_are_a_prompt() -> None:
    policy = ScriptedPolicy("4")
    (answer,) = await policy.complete(np.array([50, 61]))
    assert policy.prompts == ["2="]
    assert all(type(one) is int for one in answer.prompt_token_ids)
