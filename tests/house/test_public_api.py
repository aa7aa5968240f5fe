"""The public names and their kinds: a change of either affects every user, so it fails here."""

import inspect
import subprocess
import sys
import tomllib
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rolloutmq

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "AddressInUseError": "error",
    "Batch": "class",
    "BlockingBatch": "class",
    "BlockingConsumer": "class",
    "BlockingGroupConsumer": "class",
    "BlockingProducer": "class",
    "BlockingTaskClient": "class",
    "BrokerUnavailableError": "error",
    "ChecksumError": "error",
    "ClosedError": "error",
    "Column": "class",
    "Completion": "class",
    "ConfigError": "error",
    "ConsumerFencedError": "error",
    "Consumer": "class",
    "DamagedFileError": "error",
    "DamagedJournalError": "error",
    "DamagedRecordError": "error",
    "DrainingError": "error",
    "Durability": "enum",
    "EndOfReplayError": "error",
    "Endpoint": "class",
    "Ensemble": "class",
    "Environment": "protocol",
    "EnvironmentFailedError": "error",
    "EnvironmentScores": "class",
    "EvaluationDone": "class",
    "ForkedError": "error",
    "ErrorCode": "enum",
    "GivenUpError": "error",
    "Group": "class",
    "GroupConsumer": "class",
    "GroupTooLargeError": "error",
    "HeldGroup": "class",
    "InvalidGroupError": "error",
    "InvalidTaskError": "error",
    "JournalFailedError": "error",
    "JournalWaitsError": "error",
    "KeyRefusedError": "error",
    "LeaseLostError": "error",
    "LimitExceededError": "error",
    "MalformedError": "error",
    "MissingError": "error",
    "NothingToLearnError": "error",
    "NotPrivateError": "error",
    "Permit": "class",
    "Policy": "protocol",
    "PolicyRefusedError": "error",
    "OutputFailedError": "error",
    "PackageMissingError": "error",
    "PolicyUnavailableError": "error",
    "PolicyVersion": "class",
    "Producer": "class",
    "LeasedBatch": "class",
    "Rater": "protocol",
    "Rating": "class",
    "Ratings": "class",
    "RatersMissingError": "error",
    "RecordVersionError": "error",
    "RefusedError": "error",
    "Rejected": "class",
    "Remote": "class",
    "ResourceError": "error",
    "RetryableError": "error",
    "RolloutMQError": "error",
    "RunDirInUseError": "error",
    "RunInfo": "class",
    "RunStatus": "class",
    "ScriptedPolicy": "class",
    "SegmentGoneError": "error",
    "SegmentInUseError": "error",
    "SessionFencedError": "error",
    "Settled": "class",
    "RowTurn": "class",
    "SingleTurn": "class",
    "Split": "enum",
    "Task": "class",
    "TaskClient": "class",
    "TaskState": "enum",
    "TaskStatus": "class",
    "TaskTaker": "class",
    "TasksFullError": "error",
    "TeacherFailedError": "error",
    "TeacherRefusedError": "error",
    "TokenizerMismatchError": "error",
    "UnackedError": "error",
    "TrainerPause": "enum",
    "Trajectory": "class",
    "UsageError": "error",
    "VersionMismatchError": "error",
    "UnusablePathError": "error",
    "VocabularyMismatchError": "error",
    "WaitTimeoutError": "error",
    "Wait": "enum",
    "WeightsBusyError": "error",
    "WeightsDamagedError": "error",
    "WeightsMismatchError": "error",
    "WeightsNotSentError": "error",
    "WeightsNotWrittenError": "error",
    "WeightsSilentError": "error",
    "WeightsTornError": "error",
    "WireError": "error",
    "WorkersFailedError": "error",
    "__version__": "text",
    "evaluate": "function",
    "evaluate_async": "function",
    "play": "function",
    "register_rater": "function",
    "remote": "function",
    "run_policy": "function",
    "run_status": "function",
    "share_weights": "function",
}
ERROR_MODULES = ("errors",)
WIRE = {f"rolloutmq.schemas.wire{name}" for name in ("", ".distillation", ".envelope")}
"""What the errors name in their fields."""


def kind(thing: Any) -> str:
    if isinstance(thing, str):
        return "text"
    if not isinstance(thing, type):
        return "function" if inspect.isfunction(thing) else type(thing).__name__
    if issubclass(thing, rolloutmq.RolloutMQError):
        return "error"
    if issubclass(thing, Enum):
        return "enum"
    return "protocol" if getattr(thing, "_is_protocol", False) else "class"


def test_the_public_names_are_these_and_of_these_kinds() -> None:
    assert {name: kind(getattr(rolloutmq, name)) for name in rolloutmq.__all__} == PUBLIC
    assert len(rolloutmq.__all__) == len(PUBLIC)
    assert dir(rolloutmq) == sorted(PUBLIC)


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(rolloutmq, "no_such_name")  # noqa: B009 - as an attribute, the type checkers refuse it


@pytest.mark.parametrize("module", ERROR_MODULES)
def test_every_error_that_a_user_can_meet_is_public(module: str) -> None:
    home = import_module(f"rolloutmq.schemas.{module}")
    errors = {
        name: thing
        for name, thing in vars(home).items()
        if isinstance(thing, type)
        and issubclass(thing, rolloutmq.RolloutMQError)
        and thing.__module__ == home.__name__
    }
    assert errors
    for name, error in errors.items():
        assert getattr(rolloutmq, name) is error


def test_both_type_checkers_read_what_a_user_writes() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert (ROOT / "tests" / "typing" / "public_api.py").is_file()
    assert "tests" in tools["mypy"]["files"]
    assert tools["mypy"]["strict"]
    assert "tests/typing" in tools["pyright"]["include"]
    (environment,) = tools["pyright"]["executionEnvironments"]
    assert environment["root"] == "tests/typing"
    assert environment["reportUnnecessaryTypeIgnoreComment"] == "error"
    plan = subprocess.run(
        ["make", "--dry-run", "check"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "/mypy\n" in plan
    assert "/pyright " in plan


def test_a_public_name_loads_its_own_module_only() -> None:
    code = "import sys, rolloutmq; rolloutmq.LeaseLostError; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name for name in shown.split() if name.startswith("rolloutmq")}
    assert loaded == {"rolloutmq", "rolloutmq.schemas", "rolloutmq.schemas.errors", *WIRE}
