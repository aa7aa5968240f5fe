"""RolloutMQ: the message bus for LLM reinforcement learning.

Each public name is loaded on first use, so that `import rolloutmq` costs nothing and never pulls in
torch, a socket or a service. Type checkers read the imports, and the names of `__all__`, which are written out.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolloutmq.bus.consumer.batch import Batch
    from rolloutmq.bus.consumer.client import BlockingBatch, BlockingConsumer, Consumer, LeasedBatch
    from rolloutmq.bus.consumer.groups import BlockingGroupConsumer, GroupConsumer, HeldGroup
    from rolloutmq.bus.evaluation.client import evaluate, evaluate_async
    from rolloutmq.bus.producer.client import BlockingProducer, Producer
    from rolloutmq.bus.producer.credit import Permit
    from rolloutmq.bus.tasks.client import BlockingTaskClient, Task, TaskClient
    from rolloutmq.bus.tasks.taker import TaskTaker
    from rolloutmq.bus.transport.remote import Remote, remote
    from rolloutmq.schemas.errors import (
        AddressInUseError,
        BrokerUnavailableError,
        ChecksumError,
        ClosedError,
        ConfigError,
        ConsumerFencedError,
        DamagedFileError,
        DamagedJournalError,
        DamagedRecordError,
        DrainingError,
        EndOfReplayError,
        EnvironmentFailedError,
        ForkedError,
        GivenUpError,
        GroupTooLargeError,
        InvalidGroupError,
        InvalidTaskError,
        JournalFailedError,
        JournalWaitsError,
        KeyRefusedError,
        LeaseLostError,
        LimitExceededError,
        MalformedError,
        MissingError,
        NothingToLearnError,
        NotPrivateError,
        OutputFailedError,
        PackageMissingError,
        PolicyRefusedError,
        PolicyUnavailableError,
        RatersMissingError,
        RecordVersionError,
        RefusedError,
        ResourceError,
        RetryableError,
        RolloutMQError,
        RunDirInUseError,
        SegmentGoneError,
        SegmentInUseError,
        SessionFencedError,
        TasksFullError,
        TeacherFailedError,
        TeacherRefusedError,
        TokenizerMismatchError,
        UnackedError,
        UnusablePathError,
        UsageError,
        VersionMismatchError,
        VocabularyMismatchError,
        WaitTimeoutError,
        WeightsBusyError,
        WeightsDamagedError,
        WeightsMismatchError,
        WeightsNotSentError,
        WeightsNotWrittenError,
        WeightsSilentError,
        WeightsTornError,
        WireError,
        WorkersFailedError,
    )
    from rolloutmq.schemas.group import Column, Group
    from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
    from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
    from rolloutmq.schemas.wire.replies import Durability, Rejected, RunInfo, Settled, Wait
    from rolloutmq.schemas.wire.requests import TrainerPause
    from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus
    from rolloutmq.services.monitor.status.run_status import RunStatus, run_status
    from rolloutmq.services.rewards.ensemble import Ensemble
    from rolloutmq.services.rewards.raters import Rater, Rating
    from rolloutmq.services.rewards.ratings import Ratings
    from rolloutmq.services.rewards.registry import register_rater
    from rolloutmq.services.worker.completion import Completion
    from rolloutmq.services.worker.environment import Environment, RowTurn, SingleTurn
    from rolloutmq.services.worker.openai.wire import Endpoint
    from rolloutmq.services.worker.policy import Policy
    from rolloutmq.services.worker.scripted import ScriptedPolicy, play
    from rolloutmq.services.worker.trajectory import Trajectory
    from rolloutmq.trainer.policy.own import run_policy, share_weights

    __version__: str

_HOME_OF: dict[str, str] = {}
__all__ = ["__version__"]


if not TYPE_CHECKING and sys.platform != "linux":  # a checker on another system still reads the names below
    raise ImportError(
        f"sys.platform: rolloutmq runs on Linux only (got {sys.platform}); use a Linux machine, a container or WSL 2",
        name=__name__,
    )


def _live_in(home: str) -> None:
    """Name the module that holds those names of `__all__` that were added since the last call."""
    for name in __all__:
        _HOME_OF.setdefault(name, home)


_live_in(__name__)
__all__ += ["Batch"]
_live_in("rolloutmq.bus.consumer.batch")
__all__ += ["BlockingProducer"]
_live_in("rolloutmq.bus.producer.client")
__all__ += ["BlockingBatch", "BlockingConsumer", "Consumer", "LeasedBatch"]
_live_in("rolloutmq.bus.consumer.client")
__all__ += ["BlockingGroupConsumer", "GroupConsumer", "HeldGroup"]
_live_in("rolloutmq.bus.consumer.groups")
__all__ += ["evaluate", "evaluate_async"]
_live_in("rolloutmq.bus.evaluation.client")
__all__ += ["Permit"]
_live_in("rolloutmq.bus.producer.credit")
__all__ += ["Producer"]
_live_in("rolloutmq.bus.producer.client")
__all__ += ["TaskTaker"]
_live_in("rolloutmq.bus.tasks.taker")
__all__ += ["BlockingTaskClient", "Task", "TaskClient"]
_live_in("rolloutmq.bus.tasks.client")
__all__ += ["Remote", "remote"]
_live_in("rolloutmq.bus.transport.remote")
__all__ += ["Durability", "Rejected", "RunInfo", "Settled", "Wait"]
_live_in("rolloutmq.schemas.wire.replies")
__all__ += ["TrainerPause"]
_live_in("rolloutmq.schemas.wire.requests")
__all__ += ["EnvironmentScores", "EvaluationDone"]
_live_in("rolloutmq.schemas.wire.evaluation")
__all__ += ["ErrorCode", "PolicyVersion", "Split"]
_live_in("rolloutmq.schemas.wire.envelope")
__all__ += [
    "AddressInUseError",
    "BrokerUnavailableError",
    "ChecksumError",
    "ClosedError",
    "ConfigError",
    "ConsumerFencedError",
    "DamagedFileError",
    "DamagedJournalError",
    "DamagedRecordError",
    "DrainingError",
    "EndOfReplayError",
    "EnvironmentFailedError",
    "ForkedError",
    "GivenUpError",
    "GroupTooLargeError",
    "InvalidGroupError",
    "InvalidTaskError",
    "JournalFailedError",
    "JournalWaitsError",
    "KeyRefusedError",
    "LeaseLostError",
    "LimitExceededError",
    "MalformedError",
    "MissingError",
    "NotPrivateError",
    "NothingToLearnError",
    "OutputFailedError",
    "PackageMissingError",
    "PolicyRefusedError",
    "PolicyUnavailableError",
    "RatersMissingError",
    "RecordVersionError",
    "RefusedError",
    "ResourceError",
    "RetryableError",
    "RolloutMQError",
    "RunDirInUseError",
    "SegmentGoneError",
    "SegmentInUseError",
    "SessionFencedError",
    "TasksFullError",
    "TeacherFailedError",
    "TeacherRefusedError",
    "TokenizerMismatchError",
    "UnackedError",
    "UnusablePathError",
    "UsageError",
    "VersionMismatchError",
    "VocabularyMismatchError",
    "WaitTimeoutError",
    "WeightsBusyError",
    "WeightsDamagedError",
    "WeightsMismatchError",
    "WeightsNotSentError",
    "WeightsNotWrittenError",
    "WeightsSilentError",
    "WeightsTornError",
    "WireError",
    "WorkersFailedError",
]
_live_in("rolloutmq.schemas.errors")
__all__ += ["TaskState", "TaskStatus"]
_live_in("rolloutmq.schemas.wire.tasks")
__all__ += ["Column", "Group"]
_live_in("rolloutmq.schemas.group")
__all__ += ["Endpoint"]
_live_in("rolloutmq.services.worker.openai.wire")
__all__ += ["Environment", "RowTurn", "SingleTurn"]
_live_in("rolloutmq.services.worker.environment")
__all__ += ["Completion"]
_live_in("rolloutmq.services.worker.completion")
__all__ += ["Policy"]
_live_in("rolloutmq.services.worker.policy")
__all__ += ["ScriptedPolicy", "play"]
_live_in("rolloutmq.services.worker.scripted")
__all__ += ["Trajectory"]
_live_in("rolloutmq.services.worker.trajectory")
__all__ += ["run_policy", "share_weights"]
_live_in("rolloutmq.trainer.policy.own")
__all__ += ["RunStatus", "run_status"]
_live_in("rolloutmq.services.monitor.status.run_status")
__all__ += ["Ensemble"]
_live_in("rolloutmq.services.rewards.ensemble")
__all__ += ["Rater", "Rating"]
_live_in("rolloutmq.services.rewards.raters")
__all__ += ["Ratings"]
_live_in("rolloutmq.services.rewards.ratings")
__all__ += ["register_rater"]
_live_in("rolloutmq.services.rewards.registry")


if not TYPE_CHECKING:  # seen by a type checker, it would stand for every misspelled name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version()
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'rolloutmq' has no attribute {name!r}")
        return getattr(import_module(home), name)


def _version() -> str:
    """Return the version that was installed; `0+unknown` for a checkout that is on the path alone."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
