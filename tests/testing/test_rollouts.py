"""Rollouts in a test are those of a worker, and failures reach the test as they were raised."""

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest

from rolloutmq import Completion, SingleTurn, WaitTimeoutError
from rolloutmq.schemas.errors import MissingError, UsageError
from rolloutmq.testing import (
    Answer,
    LocalBroker,
    ScriptedPolicy,
    assert_nothing_lost,
    read_ledger,
    roll_out,
    roll_out_async,
)


class Add(SingleTurn[tuple[int, int]]):
    """Sums of two digits."""

    def task(self, rng: random.Random) -> tuple[int, int]:
        return rng.randrange(10), rng.randrange(10)

    def prompt(self, task: tuple[int, int]) -> str:
        return f"{task[0]}+{task[1]}="

    def score(self, task: tuple[int, int], completion: Completion) -> float:
        return float(completion.text == str(sum(task)))


def right() -> ScriptedPolicy:
    return ScriptedPolicy({r"(\d)\+(\d)": lambda found: str(int(found[1]) + int(found[2]))})


def test_as_many_groups_as_asked() -> None:
    policy = right()
    groups = roll_out(Add(), policy, 5, size=3)
    assert [list(group.scores) for group in groups] == [[1.0] * 3] * 5
    assert len(policy.calls) == 5
    again, other = right(), right()
    roll_out(Add(), again, 5)
    roll_out(Add(), other, 5, seed=1)
    assert again.prompts == policy.prompts != other.prompts


def test_submitted_tasks_are_answered_in_turn() -> None:
    policy = right()
    roll_out(Add(), policy, 3, tasks=[[1, 2], [3, 4]])
    assert policy.prompts == ["1+2=", "3+4=", "1+2="]


async def test_a_broker_has_accepted_all_groups() -> None:
    async with LocalBroker() as broker:
        first = await roll_out_async(Add(), right(), 3, to=broker, env="add")
        then = roll_out(Add(), right(), 3, to=broker.run_dir, env="add")  # as in the cell of a notebook
        sent = [group.group_id for group in first + then]
        assert list(read_ledger(broker).states) == sent
        assert_nothing_lost(broker, sent)
        assert all(name.startswith("add-0/") for name in sent)


def test_another_receiver_than_a_broker_or_a_directory_is_refused() -> None:
    policy = right()
    with pytest.raises(UsageError, match=r"^to: must be a LocalBroker or a run directory \(got 3\)"):
        roll_out(Add(), policy, 1, to=3)  # type: ignore[arg-type]
    assert not policy.calls


def test_the_first_failure_is_raised_as_it_was() -> None:
    class Broken(Add):
        def score(self, task: Any, completion: Completion) -> float:  # noqa: ARG002
            raise ZeroDivisionError("mine")

    policy = right()
    with pytest.raises(ZeroDivisionError, match="mine"):
        roll_out(Broken(), policy, 5)
    assert len(policy.calls) == 1

    class Leaving(Add):
        def score(self, task: Any, completion: Completion) -> float:  # noqa: ARG002
            raise SystemExit(3)

    with pytest.raises(RuntimeError, match="the rollout failed: SystemExit"):
        roll_out(Leaving(), right(), 1)


def test_an_environment_that_cannot_be_left_does_not_hide_the_first_failure() -> None:
    class Leaving(Add):
        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            raise ValueError("leaving")

    class Broken(Leaving):
        def score(self, task: Any, completion: Completion) -> float:  # noqa: ARG002
            raise ZeroDivisionError("mine")

    with pytest.raises(ValueError, match=r"^leaving$"):
        roll_out(Leaving(), right(), 1)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        roll_out(Broken(), right(), 1)
    assert caught.value.__notes__ == ["closing failed, too: ValueError: leaving"]


async def test_calls_at_once_do_not_fence_each_other() -> None:
    async with LocalBroker() as broker:
        met = asyncio.Barrier(2)  # no rollout ends before both calls have begun

        class Meeting(Add):
            async def __aenter__(self) -> None:
                await met.wait()

            async def __aexit__(self, *_: object) -> None:
                pass

        made = await asyncio.gather(
            *(roll_out_async(Meeting(), right(), 3, to=broker, env="add") for _ in range(2))
        )
        assert_nothing_lost(broker, [group.group_id for groups in made for group in groups])


def test_a_broker_that_does_not_accept_a_group_ends_with_its_number() -> None:
    with LocalBroker() as broker:

        def away(_prompt: str) -> str:
            broker.stop()
            return "1"

        with pytest.raises(WaitTimeoutError, match=r"1.0 s: 1 groups are unacked"):
            roll_out(Add(), ScriptedPolicy(away), 1, size=1, to=broker, timeout_s=1.0)


def test_a_hanging_rollout_ends_with_what_is_missing() -> None:
    policy = ScriptedPolicy(["1", "1", Answer(delay_s=math.inf)])
    with pytest.raises(WaitTimeoutError, match=r"of 5 groups are there$"):
        roll_out(Add(), policy, 5, size=1, timeout_s=1.0)


def test_a_broker_without_credit_ends_with_the_reason() -> None:
    missing = r"of 9 groups are there, and credit is limited by \w+"
    with LocalBroker("broker.high_groups=1") as broker, pytest.raises(WaitTimeoutError, match=missing):
        roll_out(Add(), right(), 9, to=broker, timeout_s=5.0)


def test_a_missing_directory_and_no_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="nowhere is no directory: start a broker there"):
        roll_out(Add(), right(), 1, to=tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"^groups: must be at least 1 \(got -1\)"):
        roll_out(Add(), right(), -1)
    with pytest.raises(UsageError, match=r"^size: must be at least 1 \(got 0\)"):
        roll_out(Add(), right(), 1, size=0)
