"""Options of a taskset: what can be wrong with them is refused by its key, before a rollout."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.services.worker.verifiers.support import ADDITIONS, PACKAGES, TASKSETS, load, missing_tasksets

from rolloutmq.launch.preflight.examination import Examination
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.services.worker.loader import check_abilities

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(bool(missing_tasksets()), reason=missing_tasksets()),
    pytest.mark.filterwarnings("ignore"),  # those of other software
]

HERE: dict[str, Any] = {"runtime": {"type": "subprocess"}}


@pytest.fixture(autouse=True)
def _harness_of_the_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")  # no login of this user
    before = [*sys.path]
    sys.path.append(str(ADDITIONS.parent))
    yield
    sys.path[:] = before


def additions(options: Any = None, **section: Any) -> Any:
    return load("additions", ADDITIONS.parent, options={"agent": HERE, **(options or {})}, **section)


def test_tasks_are_those_of_the_taskset_by_number() -> None:
    environment = additions({"taskset": {"rows": 20}, "eval_taskset": {"first": 50, "rows": 3}})
    assert environment.prompt(environment.task_at(12, None)) == [{"role": "user", "content": "2+1="}]
    assert environment.prompt(environment.eval_task_at(2, None)) == [{"role": "user", "content": "2+5="}]
    for call, number in ((environment.task_at, 20), (environment.eval_task_at, 3)):
        with pytest.raises(LookupError):
            call(number, None)


def test_without_tasks_of_its_own_the_evaluation_has_those_of_the_training() -> None:
    environment = additions()
    assert environment.eval_task_at(7, None).data == environment.task_at(7, None).data


def test_the_split_chooses_the_tasks() -> None:
    environment = additions({"eval_taskset": {"first": 50, "rows": 1}}, split="eval")
    assert environment.task_at(0, None).data.total == 5


def test_an_endless_taskset_needs_a_number_of_tasks() -> None:
    options = {"agent": HERE, "judge": HERE, "taskset": {"endless": True}}
    with pytest.raises(ConfigError, match="must be the number of tasks") as caught:
        load("mishaps4", TASKSETS, options=options)
    assert caught.value.path == "environment.mishaps4.task_count"
    environment = load("mishaps4", TASKSETS, options=options, task_count=30)
    assert [environment.task_at(number, None).data.way for number in range(30)].count("fine") == 2


def test_a_submitted_task_is_a_number_or_a_row() -> None:
    environment = additions()
    assert environment.submitted(3) is environment.task_at(3, None)
    assert environment.submitted({"prompt": "4+4=", "total": 8}).data.total == 8
    for wrong in ({"prompt": "4+4="}, {"total": 8}, "4+4=", -1):
        with pytest.raises(UsageError, match="payload: "):
            environment.submitted(wrong)


def test_it_has_what_every_section_needs() -> None:
    config = EnvironmentConfig(verifiers="additions", tasks="both", group_deadline_s=1.0)
    check_abilities("additions", config, additions())


def test_the_sampling_of_the_section_wins_over_that_of_an_agent() -> None:
    agent = {**HERE, "sampling": {"temperature": 0.5, "max_tokens": 64, "user": "a"}}
    environment = additions({"agent": agent}, sampling={"max_tokens": 8, "extra": {"cache_salt": "x"}})
    found = environment._theirs.config.agent.sampling.model_dump(exclude_none=True)
    assert found == {"temperature": 0.5, "top_p": 1.0, "max_tokens": 8, "user": "a", "cache_salt": "x"}


@pytest.mark.parametrize(
    ("package", "section", "key", "problem"),
    [
        ("mishap4", {}, "verifiers", "there is no module mishap4"),
        ("json", {}, "verifiers", "exports no Taskset subclass"),
        (
            "mishaps",
            {},
            "verifiers",
            "importing mishaps raised",
        ),
        (
            "mishaps4",
            {"taskset": {"fail": True}},
            "verifiers",
            "its tasks cannot be loaded: ValueError: no data",
        ),
        (
            "mishaps4",
            {"taskset": {"rows": 1}},
            "options.taskset.rows",
            r"Extra inputs are not permitted \(got 1\)",
        ),
        (
            "mishaps4",
            {"taskset": {"id": "json"}},
            "options.taskset",
            "without an `id`: the taskset is mishaps4",
        ),
        ("mishaps4", {"taskset": 3}, "options.taskset", "must be a table"),
        ("mishaps4", {"eval_taskset": "test"}, "options.eval_taskset", r"must be a table.*\(got 'test'\)"),
        (
            "mishaps4",
            {"eval_taskset": {"row": 1}},
            "options.eval_taskset.row",
            "Extra inputs are not permitted",
        ),
        (
            "mishaps4",
            {"eval_taskset": {"id": "json"}},
            "options.eval_taskset",
            "must be a table, without an `id`",
        ),
        (
            "mishaps4",
            {"agent": {**HERE, "harness": {"way": "fine"}}},
            "options.agent.harness.way",
            "; a harness without an `id` is bash: set agent.harness.id, for that of the package to 'mishaps4'",
        ),
        ("mishaps4", {"agnt": HERE}, "options.agnt", "Extra inputs are not permitted"),
        ("mishaps4", {"agent": {"max_turns": "x"}}, "options.agent.max_turns", "valid integer"),
        ("mishaps4", {"renderer": {"name": "no such"}}, "options.renderer", "no such"),
        ("mishaps4", {"agent": {}}, "options.agent.runtime", "one of Prime Intellect, without a key here"),
        (
            "mishaps4",
            {"agent": {**HERE, "sampling": {"top_p": 0.9}}},
            "options.agent.sampling.top_p",
            "top_p must not change",
        ),
        (
            "mishaps4",
            {"agent": {**HERE, "sampling": {"top_k": 9}}},
            "options.agent.sampling.top_k",
            "top_k must not change",
        ),
    ],
)
def test_every_mistake_names_its_key(package: str, section: dict[str, Any], key: str, problem: str) -> None:
    base_dir = PACKAGES if package == "mishaps" else TASKSETS
    with pytest.raises(ConfigError, match=problem) as caught:
        load(package, base_dir, options={"agent": HERE, "judge": HERE, **section})
    assert caught.value.path == f"environment.{package}.{key}"


def test_a_trial_names_no_place_inside_a_library() -> None:
    section = {"verifiers": "mishaps4", "options": {"agent": HERE, "judge": HERE, "taskset": {"rows": 1}}}
    config = validate({"environment": {"m": section}, "base_dir": str(TASKSETS)})
    (found,) = Examination(config, "m").verdict().problems
    assert found.path == "environment.m.options.taskset.rows"
    assert found.problem == "Extra inputs are not permitted (got 1)"


def test_a_bundled_program_needs_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"needs uv on PATH.*\(got null\)") as caught:
        additions({"agent": {**HERE, "harness": {"id": "null"}}})
    assert caught.value.path == "environment.additions.options.agent.harness"


def test_one_agent_at_least_is_the_policy() -> None:
    with pytest.raises(ConfigError, match="every agent has a client of its own") as caught:
        additions({"agent": {**HERE, "client": {"type": "eval", "base_url": "http://x"}}})
    assert caught.value.path == "environment.additions.options"


def test_a_package_for_an_earlier_version_is_told(tmp_path: Any) -> None:
    (tmp_path / "earlier_for_verifiers.py").write_text("def load_environment(): ...")
    with pytest.raises(ConfigError, match=r"it is for verifiers below 0\.4; install verifiers 0\.3\.1"):
        load("earlier-for-verifiers", tmp_path)
