"""Real environments of verifiers against real servers: every token as it was sampled.

`make test-verifiers` runs them, in an environment of its own.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.services.worker.verifiers.support import DEADLINE_S, SUMS, load, missing, policy_of, rolled_out

from rolloutmq import Group, InvalidGroupError, PolicyVersion
from rolloutmq.launch.settings import load as load_config
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.services.worker.policy import GreedyPolicy
from rolloutmq.services.worker.user_code.exits import contain_exits
from rolloutmq.services.worker.verifiers.trajectories import RolloutFailedError

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.filterwarnings("ignore"),  # those of other software
]

EOS = 2
VERSION = PolicyVersion(1, 7)


@pytest.fixture
def trainer(run_dir: Any) -> Any:
    from tests.services.inference.tiny.test_server import Trainer

    model = load_config(SUMS, environ={}).model
    made = Trainer(run_dir, RunConfig.model_validate({"model": model.model_dump()}))
    made.start(version=VERSION)
    yield made
    made.stop()


def check_exact(group: Group, trainer: Any) -> None:
    """Check that masked tokens have the log-probability of the shared weights, and all others 0."""
    import torch

    for tokens, mask, logprobs in zip(
        group["tokens"], group["mask"], group["inference_logprobs"], strict=True
    ):
        ids = torch.tensor(np.array(tokens), dtype=torch.long)[None]
        with torch.no_grad():
            logits = trainer.policy(input_ids=ids, use_cache=False).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()
        assert not mask[0]
        np.testing.assert_allclose(logprobs[1:][mask[1:]], expected[mask[1:]], atol=1e-5)
        assert not logprobs[~mask].any()


async def test_a_gym_is_answered_with_the_tokens_of_the_server(trainer: Any) -> None:
    from tests.services.inference.tiny.test_server import serving

    environment = load("sums", SUMS.parent, sampling={"max_tokens": 4})
    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        groups = [await rolled_out(environment, policy, index, 8) for index in (0, 0, 5)]
        greedy = await rolled_out(environment, GreedyPolicy(policy), 0, 3)
        held_out = await environment.rollout_eval(policy, 1, 2, None)
    for group in (*groups, greedy):
        check_exact(group, trainer)
        assert (group.oldest, group.newest) == (VERSION, VERSION)
        assert set(group["metric_format_reward_func"]) <= {0.0, 1.0}
        assert group["raters"] == [{"check_answer_reward_func": 1.0, "near": 0.5}] * len(group.scores)
        np.testing.assert_allclose(np.stack(list(group["ratings"])) @ [1.0, 0.5], group.scores)
        reasons = ["stop" if tokens[-1] == EOS else "length" for tokens in group["tokens"]]
        assert group["stop_reasons"] == reasons
    prompts = [
        [tuple(row[~mask]) for row, mask in zip(one["tokens"], one["mask"], strict=True)] for one in groups
    ]
    assert prompts[0] == prompts[1]
    assert set(prompts[0]).isdisjoint(prompts[2])
    assert [group["instance_ids"][0] for group in groups] == [0, 0, 5]
    assert len({tuple(row) for row in greedy["tokens"]}) == 1
    assert held_out[0].messages[0] == environment.eval_task_at(1, None)["prompt"][0]


async def test_turns_are_one_sequence_of_what_was_sampled_and_what_the_environment_said(trainer: Any) -> None:
    """A random policy also samples tokens without text, after which no prompt continues what it said: refused."""
    from tests.services.inference.tiny.test_server import serving

    environment = load("dialogue", options={"turns": 3}, sampling={"max_tokens": 2})
    text = trainer.layout.model
    outcomes: Counter[str] = Counter()
    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        for index in range(10):
            group = None
            with suppress(InvalidGroupError):
                group = await rolled_out(environment, policy, index, 1)
            outcomes["refused" if group is None else "exact"] += 1
            if group is None:
                continue
            check_exact(group, trainer)
            assert said_by_the_environment(group, text) in {
                f"<bos>{index}={first}1={second}2=" for first in ("", "<eos>") for second in ("", "<eos>")
            } | {f"<bos>{index}=1=2="}
            assert list(group["metric_num_turns"]) == [3.0]
            assert list(group.scores) == [1.5]
            assert group["stop_reasons"][0] in {"max_turns_reached", "length"}
    assert outcomes["exact"] >= 2


def said_by_the_environment(group: Group, model: Any) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    given = group["tokens"][0][~group["mask"][0]]
    return "".join(tokenizer.id_to_token(int(token)) or "" for token in given)


@pytest.mark.parametrize("way", ["calculates", "at once", "raises", "unknown", "malformed", "never ends"])
async def test_tool_calls_are_trained_and_the_answers_of_tools_are_not(way: str) -> None:
    from tests.examples.test_tool_agent import check_tokens
    from tests.examples.tool_server import ToolServer

    environment = load("calculator")
    question = environment.task_at(1, None)["question"]
    async with (
        ToolServer.listening() as server,
        policy_of(server.url.removesuffix("/v1")) as policy,
        environment,
    ):
        server.ways[question] = way
        group = await rolled_out(environment, policy, 1, 4)
    check_tokens(group)
    turns = {"calculates": 3, "never ends": 4}.get(way, 2)
    assert list(group["metric_num_turns"]) == [turns] * 4
    assert list(group["metric_total_tool_calls"]) == [{"at once": 2, "never ends": 4}.get(way, turns - 1)] * 4
    reason = "max_turns_reached" if way == "never ends" else "no_tools_called"
    assert group["stop_reasons"] == [reason] * 4
    if way in {"calculates", "at once"}:
        assert set(group.scores) <= {0.0, 1.0}
    tools = [message for message in group["messages"][0] if message["role"] == "tool"]
    assert len(tools) == group["metric_total_tool_calls"][0] - (
        way == "never ends"
    )  # its last call is not made


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ("fails", "this one fails"),
        ("no tokens", "no token ids in the response"),
        ("rewrites", "does not begin with the turns before it"),
    ],
)
async def test_what_cannot_be_trained_on_costs_the_rollout(way: str, problem: str) -> None:
    from tests.examples.tool_server import ToolServer

    environment = load("calculator")
    question = environment.task_at(1, None)["question"]
    async with (
        ToolServer.listening() as server,
        policy_of(server.url.removesuffix("/v1")) as policy,
        environment,
    ):
        server.ways[question] = way
        with pytest.raises((RolloutFailedError, InvalidGroupError), match=problem):
            await rolled_out(environment, policy, 1, 2)
        server.ways[question] = "calculates"
        assert len(await environment.rollout_at(policy, 1, 2, None)) == 2


@pytest.mark.parametrize(
    ("row", "kind", "problem"),
    [
        (1, KeyError, "no such thing"),
        (2, RolloutFailedError, "no sandbox"),
        (4, RolloutFailedError, "a reward function raised ZeroDivisionError"),
        (5, RolloutFailedError, "a reward function raised ConnectionError"),
        (6, InvalidGroupError, "must be finite"),
        (7, RolloutFailedError, r"the reward function reward must return a number \(got None\)"),
        (9, RuntimeError, "SystemExit: 0"),
        (10, RuntimeError, "SystemExit: 3"),
    ],
)
async def test_an_exception_of_the_package_costs_the_rollout(
    trainer: Any, row: int, kind: type[Exception], problem: str
) -> None:
    from tests.services.inference.tiny.test_server import serving

    environment = load("mishaps", sampling={"max_tokens": 2})
    contain_exits(asyncio.get_running_loop())  # as a worker does
    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        with pytest.raises(kind, match=problem):
            await rolled_out(environment, policy, row)
        group = await rolled_out(environment, policy)
    assert list(group.scores) == [1.0, 1.5, 2.0, 2.5]  # rewards of a whole group tell its sequences apart
    assert group["raters"][0] == {"reward": 1.0, "judges": 0.5}


async def test_functions_of_one_name_and_those_added_by_a_rollout_have_ratings(trainer: Any) -> None:
    from tests.services.inference.tiny.test_server import serving

    environment = load("namesakes", sampling={"max_tokens": 2})
    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        group = await rolled_out(environment, policy)
        with pytest.raises(RolloutFailedError, match="a reward function raised ConnectionError"):
            await rolled_out(environment, policy, 1)
    weights = {"grade": 1.0, "grade_3": 2.0, "grade_2": 0.25, "num_turns": 0.5}
    assert list(group["raters"][0].items()) == list(weights.items())
    assert [list(row) for row in group["ratings"]] == [[1.0, 3.0, 2.0, 4.0]] * 4
    assert list(group.scores) == [1.0 + 3.0 * 2.0 + 2.0 * 0.25 + 4.0 * 0.5] * 4
    assert list(group["metric_num_turns_2"]) == [1.0] * 4


async def test_a_hang_ends_with_the_rollout(trainer: Any) -> None:
    from tests.services.inference.tiny.test_server import serving

    environment = load("mishaps", sampling={"max_tokens": 2})
    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        before = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await rolled_out(environment, policy, 3)
        await until(lambda: asyncio.all_tasks() <= before)
        assert len((await rolled_out(environment, policy)).scores) == 4


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of the end of other tasks
            await asyncio.sleep(0.01)


async def test_rows_of_a_group_of_environments_go_to_their_own(trainer: Any) -> None:
    from tests.services.inference.tiny.test_server import serving

    environment = load("both", sampling={"max_tokens": 1})
    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        mishap = await rolled_out(environment, policy, 10)
        with pytest.raises(RolloutFailedError, match="a reward function raised ZeroDivisionError"):
            await rolled_out(environment, policy, 14)
    check_exact(mishap, trainer)
    assert list(mishap.scores) == [1.0, 1.5, 2.0, 2.5]
    assert mishap["raters"][0] == {"reward": 1.0, "judges": 0.5}


@pytest.mark.parametrize("prompt", ["4=", [{"role": "user", "content": "4="}]])
async def test_a_submitted_row_is_rolled_out(trainer: Any, prompt: Any) -> None:
    from tests.services.inference.tiny.test_server import serving

    environment = load("mishaps", sampling={"max_tokens": 2})
    row = {"prompt": prompt, "answer": "fine"}
    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        (one, other) = await environment.rollout_task(policy, row, 2, None)
    assert (one.score, other.score) == (1.0, 1.5)
    assert one.messages[0] == {"role": "user", "content": "4="}
