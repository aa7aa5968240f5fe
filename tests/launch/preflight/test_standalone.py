"""Rollouts without a broker are those that a worker would make."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from rolloutmq.launch.preflight.standalone import Plan, roll_out
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.group import Group
from rolloutmq.services.worker.environment import SingleTurn
from rolloutmq.services.worker.scripted import ScriptedPolicy


class Noting(SingleTurn[Any]):
    """Scores one, and notes its tasks."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def task(self, rng: Any) -> Any:
        return rng.random()

    def task_at(self, index: int, rng: Any) -> Any:  # noqa: ARG002
        return index

    def eval_task_at(self, index: int, rng: Any) -> Any:  # noqa: ARG002
        return -1 - index

    def prompt(self, task: Any) -> str:
        self.asked.append(task)
        return "?"

    def score(self, task: Any, completion: Any) -> float:  # noqa: ARG002
        return 1.0


class Failing(Noting):
    """Fails at every second answer."""

    def score(self, task: Any, completion: Any) -> float:  # noqa: ARG002
        if len(self.asked) % 2:
            raise ValueError("odd")
        return 1.0


class Entered(Noting):
    """Notes that it was entered and left."""

    async def __aenter__(self) -> None:
        self.asked.append("entered")

    async def __aexit__(self, *_: object) -> None:
        self.asked.append("left")


class Hanging(Noting):
    """Waits for ever."""

    async def score(self, task: Any, completion: Any) -> float:  # type: ignore[override]  # noqa: ARG002
        await asyncio.Event().wait()
        return 0.0


SECTION: Final = {"entry": "e.py:E", "group_size": 3}


def config(tmp_path: Path, section: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    environment = {"e": {**SECTION, **(section or {})}}
    return validate({"environment": environment, "base_dir": str(tmp_path), **sections})


def rolled_out(config: RunConfig, environment: Any, plan: Plan) -> tuple[list[Group], list[str]]:
    groups: list[Group] = []
    failures: list[str] = []
    asyncio.run(
        roll_out(
            "e",
            config,
            environment,
            ScriptedPolicy("42"),
            plan,
            on_group=groups.append,
            on_failure=lambda _error, why: failures.append(why),
        )
    )
    return groups, failures


def test_as_many_groups_as_asked_of_the_configured_size_or_another(tmp_path: Path) -> None:
    groups, failures = rolled_out(config(tmp_path), Noting(), Plan(4))
    assert [group.sequences for group in groups] == [3] * 4
    assert failures == []
    assert [group.sequences for group in rolled_out(config(tmp_path), Noting(), Plan(1, size=2))[0]] == [2]


def test_the_same_seed_draws_the_same_tasks(tmp_path: Path) -> None:
    first, again, other = Noting(), Noting(), Noting()
    for environment, seed in ((first, 1), (again, 1), (other, 2)):
        rolled_out(config(tmp_path), environment, Plan(3, seed=seed))
    assert first.asked == again.asked != other.asked
    assert len(set(first.asked)) == 3


def test_a_failed_rollout_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    groups, failures = rolled_out(config(tmp_path), Failing(), Plan(60))
    assert (len(groups), failures) == (30, ["ValueError: odd"] * 30)


def test_the_tasks_are_those_that_a_worker_would_get(tmp_path: Path) -> None:
    numbered, evaluated, given = Noting(), Noting(), Noting()
    curriculum = config(tmp_path, {"task_count": 5}, curriculum={"e": {}})
    rolled_out(curriculum, numbered, Plan(20))
    assert set(numbered.asked) == set(range(5))
    held_out = config(tmp_path, {"split": "eval"}, evaluation={"enabled": True, "tasks": 2})
    rolled_out(held_out, evaluated, Plan(3))
    assert evaluated.asked == [-1, -2, -1]
    rolled_out(config(tmp_path, {"tasks": "submitted"}), given, Plan(3, payloads=["a", "b"]))
    assert given.asked == ["a", "b", "a"]


def test_members_and_the_time_out_are_those_of_a_worker(tmp_path: Path) -> None:
    members = config(tmp_path, {"group_deadline_s": 60.0})
    (group,), _ = rolled_out(members, Noting(), Plan(1))
    assert "members" in group.columns
    assert rolled_out(config(tmp_path), Hanging(), Plan(1, timeout_s=0.01))[1] == [
        "took longer than rollout_timeout_s (0.01 s)"
    ]


def test_an_environment_is_entered_once(tmp_path: Path) -> None:
    environment = Entered()
    rolled_out(config(tmp_path), environment, Plan(2))
    assert (environment.asked[0], environment.asked[-1]) == ("entered", "left")
    assert len(environment.asked) == 4


def test_what_it_raises_there_is_raised(tmp_path: Path) -> None:
    class Unentered(Entered):
        async def __aenter__(self) -> None:
            raise OSError("no sandbox")

    with pytest.raises(OSError, match="no sandbox"):
        rolled_out(config(tmp_path), Unentered(), Plan(1))


def test_the_first_failure_may_be_the_last_rollout(tmp_path: Path) -> None:
    groups, failures = rolled_out(config(tmp_path), Failing(), Plan(60, ends_with_failure=True))
    assert (len(groups), failures) == (0, ["ValueError: odd"])
