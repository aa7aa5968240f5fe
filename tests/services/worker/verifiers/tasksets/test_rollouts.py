"""Real environments of verifiers 0.4 against real servers: every token as it was sampled.

`make test-verifiers` runs them, in an environment of its own.
"""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.services.worker.verifiers.support import (
    ADDITIONS,
    DEADLINE_S,
    TASKSETS,
    load,
    missing_tasksets,
    policy_of,
    rolled_out,
)

from rolloutmq import Group, InvalidGroupError, PolicyVersion
from rolloutmq.launch.settings import load as load_config
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.worker.policy import GreedyPolicy, Policy
from rolloutmq.services.worker.user_code.exits import contain_exits
from rolloutmq.services.worker.verifiers.trajectories import RolloutFailedError

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(bool(missing_tasksets()), reason=missing_tasksets()),
    pytest.mark.filterwarnings("ignore"),  # those of other software
]

EOS = 2
VERSION = PolicyVersion(1, 7)
HERE: dict[str, Any] = {"runtime": {"type": "subprocess"}}
WAYS = (
    "fine",
    "raises",
    "harness",
    "hangs",
    "rewards",
    "nan",
    "silent",
    "rewrites",
    "twice",
    "episode",
    "changes",
    "late",
    "exits",
    "judge exits",
    "nothing",
    "maps",
)


@pytest.fixture(autouse=True)
def _their_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Find the harness of the example; and forget the event loop of the test before, which their module remembers."""
    import renderers.client

    monkeypatch.setattr(renderers.client, "_max_prompt_len_lock", asyncio.Lock())
    before = [*sys.path]
    sys.path.append(str(ADDITIONS.parent))
    yield
    sys.path[:] = before


@pytest.fixture
def trainer(run_dir: Any) -> Any:
    from tests.services.inference.tiny.test_server import Trainer

    model = load_config(ADDITIONS, environ={}).model
    made = Trainer(run_dir, RunConfig.model_validate({"model": model.model_dump()}))
    made.start(version=VERSION)
    yield made
    made.stop()


@asynccontextmanager
async def served(trainer: Any, environment: Any) -> AsyncIterator[Policy]:
    """Serve the trainer's policy for the environment, which is entered."""
    from tests.services.inference.tiny.test_server import serving

    async with serving(trainer) as server, policy_of(server.url) as policy, environment:
        yield policy


def additions(**section: Any) -> Any:
    options = {"agent": HERE, **section.pop("options", {})}
    return load("additions", ADDITIONS.parent, options=options, sampling={"max_tokens": 4}, **section)


def mishaps(**section: Any) -> Any:
    options = {"agent": HERE, "judge": HERE, **section.pop("options", {})}
    return load("mishaps4", TASKSETS, options=options, sampling={"max_tokens": 2}, **section)


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


async def test_an_episode_of_the_example_loads_no_certificates(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its endpoint is plain HTTP, and loading them costs more CPU than the rest of an episode."""
    loaded: list[Any] = []
    environment = additions()
    async with served(trainer, environment) as policy:
        await rolled_out(environment, policy, 0, 2)  # what is loaded once
        load_certificates = ssl.SSLContext.load_verify_locations

        def counted(context: ssl.SSLContext, *args: Any, **named: Any) -> None:
            loaded.append(args)
            load_certificates(context, *args, **named)

        monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", counted)
        await rolled_out(environment, policy, 1, 4)
    assert not loaded


async def test_a_taskset_is_answered_with_the_tokens_of_the_server(trainer: Any) -> None:
    environment = additions(options={"eval_taskset": {"first": 50}})
    async with served(trainer, environment) as policy:
        groups = [await rolled_out(environment, policy, index, 8) for index in (0, 0, 5)]
        greedy = await rolled_out(environment, GreedyPolicy(policy), 0, 3)
        held_out = await environment.rollout_eval(policy, 1, 2, None)
    for group in (*groups, greedy):
        check_exact(group, trainer)
        assert (group.oldest, group.newest) == (VERSION, VERSION)
        assert group["raters"] == [{"near": 0.5, "right": 1.0}] * len(group.scores)
        np.testing.assert_allclose(np.stack(list(group["ratings"])) @ [0.5, 1.0], group.scores)
        said = [row[-1]["content"] for row in group["messages"]]
        assert list(group["metric_letters"]) == [len(one.strip()) for one in said]
        reasons = ["stop" if tokens[-1] == EOS else "length" for tokens in group["tokens"]]
        assert group["stop_reasons"] == reasons
    assert [group["instance_ids"][0] for group in groups] == [0, 0, 5]
    assert [group["messages"][0][0]["content"] for group in groups] == ["0+0=", "0+0=", "5+0="]
    assert len({tuple(row) for row in greedy["tokens"]}) == 1
    assert held_out[0].messages[0]["content"] == "1+5="


async def test_turns_are_one_sequence_of_what_was_sampled_and_what_the_environment_said(trainer: Any) -> None:
    environment = load(
        "dialogue4", TASKSETS, options={"player": HERE, "turns": 3}, sampling={"max_tokens": 2}
    )
    async with served(trainer, environment) as policy:
        for index in range(5):
            group = await rolled_out(environment, policy, index, 2)
            check_exact(group, trainer)
            for tokens, mask in zip(group["tokens"], group["mask"], strict=True):
                assert text_of(tokens[~mask], trainer.layout.model) == f"<bos>{index}=1=2="
            assert list(group.scores) == [1.5, 1.5]
            assert [len(row) for row in group["messages"]] == [6, 6]


async def test_turns_have_the_versions_that_sampled_them(trainer: Any) -> None:
    """The weights stay the same and get new versions during the rollout, so its log-probabilities do not change."""
    environment = load(
        "dialogue4", TASKSETS, options={"player": HERE, "turns": 6}, sampling={"max_tokens": 2}
    )
    async with served(trainer, environment) as policy:
        await rolled_out(environment, policy, 0, 1)  # the tokenizer is there
        first = trainer.share.version
        rolling = asyncio.create_task(rolled_out(environment, policy, 1, 2))
        while not rolling.done():
            with trainer.share.writing(PolicyVersion(1, trainer.share.version.step + 1)):
                pass
            await asyncio.sleep(0.005)
        group = await rolling
    check_exact(group, trainer)
    assert first <= group.oldest < group.newest <= trainer.share.version


def text_of(tokens: Any, model: Any) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return "".join(tokenizer.id_to_token(int(token)) or "" for token in tokens)


@pytest.mark.parametrize(
    ("way", "kind", "problem"),
    [
        ("raises", RolloutFailedError, "TaskError: task setup: KeyError: 'no such thing'"),
        ("harness", RolloutFailedError, "HarnessError: harness 'mishaps4' exited 3: no program"),
        ("rewards", RolloutFailedError, "TaskError: .* ZeroDivisionError: in the reward"),
        ("nan", InvalidGroupError, "must be finite"),
        ("silent", RolloutFailedError, "it has no turn"),
        ("rewrites", RolloutFailedError, "its conversation was rewritten: the trace has 2 branches"),
        ("twice", RolloutFailedError, r"one trained agent run \(got 2: agent, agent\)"),
        ("episode", RolloutFailedError, "EnvError: .* the episode broke"),
        ("exits", RuntimeError, "SystemExit: 0"),
        (
            "nothing",
            RolloutFailedError,
            "NoRatingError: the reward function reward must return a number, or a map",
        ),
        ("judge exits", RolloutFailedError, "TaskError: .* SystemExit: 3"),
        ("changes", InvalidGroupError, "turn 0 was not sampled by the policy, or was changed afterwards"),
    ],
)
async def test_what_cannot_be_trained_on_costs_the_rollout(
    trainer: Any, way: str, kind: type[Exception], problem: str
) -> None:
    environment = mishaps()
    contain_exits(asyncio.get_running_loop())  # as a worker does
    async with served(trainer, environment) as policy:
        with pytest.raises(kind, match=problem):
            await rolled_out(environment, policy, WAYS.index(way), 2)
        group = await rolled_out(environment, policy, 0, 2)  # the worker goes on
    assert list(group.scores) == [1.0, 1.0]


async def test_each_key_of_a_map_is_a_rater(trainer: Any) -> None:
    environment = mishaps()
    async with served(trainer, environment) as policy:
        group = await rolled_out(environment, policy, WAYS.index("maps"), 2)
    assert group["raters"] == [{"first": 2.0, "reward": 1.0, "second": 2.0}] * 2
    assert list(group.scores) == [4.0, 4.0]


async def test_an_agent_that_is_not_trained_adds_no_sequence(trainer: Any) -> None:
    environment = mishaps()
    async with served(trainer, environment) as policy:
        group = await rolled_out(environment, policy, 0, 3)
    check_exact(group, trainer)
    assert len(group.scores) == 3


async def test_a_scoring_that_takes_too_long_costs_the_rollout(trainer: Any) -> None:
    environment = mishaps(options={"agent": {**HERE, "timeout": {"scoring": 0.2}}})
    async with served(trainer, environment) as policy:
        with pytest.raises(RolloutFailedError, match="reward reward was not computed"):
            await rolled_out(environment, policy, WAYS.index("late"), 1)


async def test_a_hang_ends_with_the_rollout(trainer: Any) -> None:
    environment = mishaps()
    async with served(trainer, environment) as policy:
        await rolled_out(environment, policy)
        before = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await rolled_out(environment, policy, WAYS.index("hangs"))
        await until(lambda: asyncio.all_tasks() <= before)
        assert len((await rolled_out(environment, policy)).scores) == 4


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of the end of other tasks
            await asyncio.sleep(0.01)


async def test_a_submitted_row_is_rolled_out(trainer: Any) -> None:
    environment = additions()
    async with served(trainer, environment) as policy:
        (one, other) = await environment.rollout_task(policy, {"prompt": "4+4=", "total": 8}, 2, None)
        (third,) = await environment.rollout_task(policy, 7, 1, None)
    assert one.messages[0]["content"] == other.messages[0]["content"] == "4+4="
    assert (one.columns["instance_ids"], third.columns["instance_ids"]) == (0, 7)


async def test_a_server_that_does_not_name_the_directory_of_its_model_is_refused(
    server: "FakeServer",
) -> None:
    environment = additions()
    async with policy_of(server.url) as policy, environment:
        with pytest.raises(PolicyRefusedError, match="names no `root`, the directory of the model"):
            await rolled_out(environment, policy)


async def test_a_program_is_a_harness(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled `null` harness: uv installs its program, which talks to the endpoint of its rollout."""
    from pathlib import Path
    from shutil import which

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    if which("uv") is None:
        pytest.skip("needs uv beside this Python")
    environment = additions(options={"agent": {**HERE, "harness": {"id": "null"}}})
    async with served(trainer, environment) as policy:
        group = await rolled_out(environment, policy, 3, 2)
    check_exact(group, trainer)
    assert [row[0]["content"] for row in group["messages"]] == ["3+0=", "3+0="]
