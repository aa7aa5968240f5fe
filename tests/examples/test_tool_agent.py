"""The agent with a calculator: its loop by itself, without a client, and a whole run with OpenAI's own.

The run is `rolloutmq up` by an interpreter that has the client, against a scripted server that calls tools.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.examples.tool_server import END, LOST, SCORED, ToolServer, call, logprob, rendered, transcript

from benchmarks.queues import atropos
from rolloutmq import Completion, Consumer, Group
from rolloutmq.bus.transport.discovery import serve_address
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.launch.settings import load
from rolloutmq.schemas.errors import ConfigError, InvalidGroupError
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.trajectory import Trajectory, group_of

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tools" / "tool_agent.toml"
Message = Mapping[str, Any]


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    """The example's file as a module; it needs no client until an environment is made of it."""
    spec = importlib.util.spec_from_file_location("tool_agent", CONFIG.with_suffix(".py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(content: str = "", *calls: tuple[str, str]) -> dict[str, Any]:
    """Return a message of the policy."""
    made = [
        {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}


class Script:
    """Answers with one message after the other, the last one for ever."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.turns = 0

    async def __call__(self, messages: Sequence[Message]) -> tuple[Message, Completion]:
        self.turns += 1
        message = self.messages.pop(0) if len(self.messages) > 1 else self.messages[0]
        sampled = list(map(ord, rendered(message).removeprefix("[assistant]")))
        prompt = list(map(ord, transcript(messages) + "[assistant]"))
        return message, Completion("", prompt, sampled, list(map(logprob, sampled)))


def converse(agent: ModuleType, script: Script, turns: int = 4) -> Trajectory:
    converged = agent.converse(script, "What is (1 + 2) * 3?", "9", turns)
    trajectory: Trajectory = asyncio.run(converged)
    check_tokens(group_of("g", [trajectory]))
    return trajectory


def check_tokens(group: Group) -> None:
    """Check that trained is what the policy said, with the log-probabilities of the server, and nothing else is."""
    for tokens, mask, logprobs, messages in zip(
        group["tokens"], group["mask"], group["inference_logprobs"], group["messages"], strict=True
    ):
        assert "".join(map(chr, tokens)) == transcript(messages)[: len(tokens)]
        answers = [
            rendered(one).removeprefix("[assistant]") for one in messages if one["role"] == "assistant"
        ]
        assert "".join(map(chr, tokens[mask])) == "".join(answers)
        assert tokens[-1] == END
        assert np.array_equal(
            logprobs[mask], np.array([logprob(token) for token in tokens[mask]], np.float32)
        )
        assert not logprobs[~mask].any()


def contents(trajectory: Trajectory) -> list[str]:
    """Return what the tools said."""
    return [one["content"] for one in trajectory.messages or () if one["role"] == "tool"]


def test_calls_are_made_until_there_is_an_answer(agent: ModuleType) -> None:
    script = Script(said("", call("add", 1, 2)), said("", call("multiply", 3, 3)), said("9"))
    trajectory = converse(agent, script)
    assert (trajectory.score, trajectory.finish_reason, script.turns) == (1.0, "stop", 3)
    assert contents(trajectory) == ["3", "9"]
    assert trajectory.messages is not None
    assert [one["role"] for one in trajectory.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]


def test_calls_of_one_answer_are_told_in_their_order(agent: ModuleType) -> None:
    trajectory = converse(agent, Script(said("", call("add", 1, 2), call("divide", 1, 8)), said("9")))
    assert contents(trajectory) == ["3", "0.125"]
    assert trajectory.messages is not None
    assert [one["tool_call_id"] for one in trajectory.messages[2:4]] == ["call-0", "call-1"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("9", 1.0),
        ("It is 9.", 1.0),
        ("1 + 2 is 3, so 9", 1.0),
        ("8", 0.0),
        ("9.5", 0.0),
        ("-9", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_of_the_answer_counts(agent: ModuleType, answer: str, score: float) -> None:
    assert converse(agent, Script(said(answer))).score == score


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (call("divide", 1, 0), "error: ZeroDivisionError: float division by zero"),
        (("calculate", '{"operation": "power", "a": 1, "b": 2}'), "error: KeyError: 'power'"),
        (("calculate", '{"operation": "add", "a": 1}'), "error: TypeError: calculate() missing"),
        (("calculate", '{"operation": "add", "a": "x", "b": 2}'), "error: ValueError: could not convert"),
        (("calculate", ""), "error: TypeError: calculate() missing 3"),
        (("calculate", json.dumps({"operation": "add", "a": 10**400, "b": 1})), "error: OverflowError"),
        (("search", "{}"), "error: there is no tool 'search'"),
        (("x" * 10_000, "{}"), "error: there is no tool 'xxx"),
    ],
)
def test_a_call_that_fails_is_told_and_the_conversation_goes_on(
    agent: ModuleType, wrong: tuple[str, str], told: str
) -> None:
    trajectory = converse(agent, Script(said("", wrong), said("9")))
    assert (trajectory.score, trajectory.finish_reason) == (1.0, "stop")
    (content,) = contents(trajectory)
    assert content.startswith(told)
    assert len(content) <= agent.ERROR_CHARS + len("error: there is no tool ")


def test_a_tool_that_hangs_has_failed(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(**_: Any) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(agent, "TOOLS", {"calculate": hang})
    monkeypatch.setattr(agent, "TOOL_S", 0.01)
    trajectory = converse(agent, Script(said("", call("add", 1, 2)), said("9")))
    assert (contents(trajectory), trajectory.score) == (["error: TimeoutError: "], 1.0)


@pytest.mark.parametrize("arguments", ['{"a": ', "[1, 2]", "3", "null", "[" * 100_000, "9" * 5000, "\ud800"])
def test_arguments_that_are_no_json_object_end_it_worth_nothing(agent: ModuleType, arguments: str) -> None:
    script = Script(said("It is 9.", call("add", 1, 2), ("calculate", arguments)), said("9"))
    trajectory = converse(agent, script)
    assert (trajectory.score, trajectory.finish_reason, script.turns) == (0.0, "malformed call", 1)
    assert contents(trajectory) == []


def test_turns_are_limited(agent: ModuleType) -> None:
    script = Script(said("It is 9.", call("add", 1, 2)))
    trajectory = converse(agent, script, turns=3)
    assert (trajectory.score, trajectory.finish_reason, script.turns) == (0.0, "turn limit", 3)
    assert len(contents(trajectory)) == 3


def test_a_server_that_rewrites_what_was_said_costs_the_rollout(agent: ModuleType) -> None:
    class Rewriting(Script):
        async def __call__(self, messages: Sequence[Message]) -> tuple[Message, Completion]:
            return await super().__call__([messages[0], *messages[2:]])

    with pytest.raises(InvalidGroupError, match="does not begin with the turns before it"):
        converse(agent, Rewriting(said("", call("add", 1, 2)), said("9")))


def test_a_message_is_given_back_without_what_it_lacks(agent: ModuleType) -> None:
    told: Message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [],
        "reasoning": "hm",
    }
    assert agent.repeated(told) == {"role": "assistant", "content": "", "reasoning": "hm"}


def test_without_the_client_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    config = load(CONFIG, environ={})
    with pytest.raises(ConfigError, match=r"environment\.arithmetic\.entry: .*openai"):
        load_environment("arithmetic", config.environment["arithmetic"], config.base_dir)


def missing() -> str:
    """Why the run cannot be made; empty if it can."""
    has_client = any(atropos.RIVAL.glob("lib/*/site-packages/openai"))
    return atropos.missing() or (
        "" if has_client else f"{atropos.RIVAL.name} has no openai: make bench-rivals"
    )


SEQUENCES = 28
STEPS = 6
ENDS = {
    "calculates": "stop",
    "at once": "stop",
    "raises": "stop",
    "unknown": "stop",
    "malformed": "malformed call",
    "never ends": "turn limit",
    "flaky": "stop",
}
"""How the conversations about a question end, by what the server makes of it."""
REASONS = (
    "InternalServerError: Error code: 500 - this one fails",
    "no token ids in the response",
    "the turn's prompt does not begin with the turns before it",
)
"""Why the rollouts of the other questions come to nothing, as status tells."""
TOLD = {
    "raises": "error: ZeroDivisionError: float division by zero",
    "unknown": "error: there is no tool 'search'",
}


@pytest.mark.rival
@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_a_run_brings_what_the_policy_sampled_and_why_the_rest_was_abandoned(run_dir: Path) -> None:
    async with asyncio.timeout(120), ToolServer.listening() as server:
        settings = (
            f"inference.url={server.url}",
            f"trainer.batch_sequences={SEQUENCES}",
            "broker.durability=memory",
            "environment.arithmetic.group_size=4",
            "environment.arithmetic.options={turns=3,retries=1}",
        )
        up = await asyncio.create_subprocess_exec(
            *(atropos.RIVAL / "bin" / "python", "-m", "rolloutmq.launch.cli"),
            *("up", CONFIG, "--run-dir", run_dir),
            *(word for setting in settings for word in ("--set", setting)),
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.DEVNULL,
        )
        try:
            groups = await trained(run_dir)
            up.send_signal(signal.SIGINT)
            assert await up.wait() == 130
        finally:
            if up.returncode is None:
                up.terminate()
                await up.wait()
    assert {check(group, server) for group in groups} == set(SCORED)
    assert set(server.ways.values()) == set(SCORED + LOST)
    assert len({group.group_id for group in groups}) == len(groups)
    assert groups[-1].newest.step > 0


async def trained(run_dir: Path) -> list[Group]:
    """Be a trainer until there were some steps and each reason was told; return what it learned from."""
    groups: list[Group] = []
    untold = set(REASONS)
    async with (
        Consumer.open(run_dir, sequences=SEQUENCES) as consumer,
        BrokerClient((await serve_address(run_dir))[0]) as client,
    ):
        async for batch in consumer:
            groups += batch.groups
            await batch.ack()
            reply = await client.request(GetStatus())
            assert isinstance(reply, StatusReply)
            errors = [worker.error for worker in reply.pressure.workers]
            untold -= {reason for reason in untold if any(reason in error for error in errors)}
            if consumer.version.step >= STEPS and not untold:
                break
    return groups


def check(group: Group, server: ToolServer) -> str:
    """Check a group; return what the server made of its question."""
    assert group.sequences == 4
    check_tokens(group)
    (question,) = {str(messages[0]["content"]) for messages in group["messages"]}
    way = server.ways[question]
    assert set(group["stop_reasons"]) == {ENDS[way]}
    right = (0.0, 1.0) if ENDS[way] == "stop" else (0.0,)
    assert set(group.scores) <= set(right)
    for messages, score in zip(group["messages"], group.scores, strict=True):
        told = [one["content"] for one in messages if one["role"] == "tool"]
        assert all(one == TOLD[way] for one in told if way in TOLD)
        if way in {"calculates", "at once", "flaky"}:
            assert len(told) == 2
            assert score == float(messages[-1]["content"] == f"It is {told[-1]}.")
    return way
