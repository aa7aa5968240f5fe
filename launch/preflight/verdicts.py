"""What a trial finds out about an environment, as one process writes it and another reads it."""

import msgspec

from rolloutmq.launch.endings import UserCodeError
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.user_code.failures import UserFiles, failure_of


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong: the key to correct, why, and the report of an exception in the user's code, if any."""

    path: str
    problem: str
    report: str = ""

    @property
    def error(self) -> UserCodeError:
        """The problem as an error."""
        return UserCodeError(self.path, self.problem, self.report)

    @classmethod
    def of(cls, error: ConfigError, files: UserFiles) -> "Problem":
        """Return the problem of an environment that cannot be loaded; its cause is the exception of the user's code."""
        cause = error.__cause__
        failure = failure_of(cause, files) if cause is not None else None
        if failure is None or not failure.where:
            return cls(path=error.path, problem=error.problem)
        return cls(path=error.path, problem=f"{error.problem} ({failure.where})", report=failure.report)


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The environment under trial."""

    env: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """Result of the trial of one environment.

    Attributes:
        env: Its name.
        problems: Why a run with it is refused.
        failures: Exceptions and time-outs of its code that a run may survive.
        advice: What could not be tried, and what a reader may want to know. None of it refuses a run.
        tried: What was done, in a few words.
    """

    env: str
    problems: tuple[Problem, ...] = ()
    failures: tuple[Problem, ...] = ()
    advice: tuple[Problem, ...] = ()
    tried: str = ""
