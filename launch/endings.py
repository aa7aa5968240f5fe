"""End of a command: a RolloutMQ error is reported as one line and an exit code, without a traceback.

Several problems of a configuration are reported at once, one line each. Of an exception in the user's code, the report
follows: the frames of his files, the task and the completion. A command that needs torch names the extra
of an installation without it.

Exit codes: 0 done, 1 failed, 2 invalid configuration or command line, 4 the run directory is in use.
"""

import sys
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Final, NoReturn

from rolloutmq.bus.lifecycle import IN_USE
from rolloutmq.schemas.errors import (
    ConfigError,
    MissingError,
    OutputFailedError,
    RolloutMQError,
    RunDirInUseError,
    UnusablePathError,
    install_remedy,
)

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
TRAINER_NEEDS: Final = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub")
"""Packages of the extra `trainer`, which the trainer and the tiny inference server import."""


class UserCodeError(ConfigError):
    """An environment's code raised; `report` has the frames of the user's files, the task and the completion."""

    def __init__(self, path: str, problem: str, report: str = "") -> None:
        super().__init__(path, problem)
        self.report = report

    def __str__(self) -> str:
        line = super().__str__()
        return f"{line}\n\n{indent(self.report, '    ')}\n" if self.report else line


class ProblemsError(ConfigError):
    """Several things are wrong with a configuration. `path` and `problem` are those of the first."""

    def __init__(self, problems: Sequence[RolloutMQError]) -> None:
        first = problems[0]
        if isinstance(first, ConfigError):
            super().__init__(first.path, first.problem)
        else:
            super().__init__("configuration", str(first))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join([f"the configuration has {len(self.problems)} errors", *map(str, self.problems)])


def raise_all(problems: Sequence[RolloutMQError]) -> None:
    """Raise the problem, or all of them as one error; return if there is none.

    Raises:
        ProblemsError: There are several.
    """
    if len(problems) > 1:
        raise ProblemsError(problems)
    if problems:
        raise problems[0]


def problems_of(error: RolloutMQError) -> tuple[RolloutMQError, ...]:
    """Return each problem that an error tells."""
    return error.problems if isinstance(error, ProblemsError) else (error,)


def guarded(run: Callable[[], int | str | None]) -> NoReturn:
    """Run a command and exit with its code; report a RolloutMQ error as one line."""
    from rolloutmq.services.monitor.text.exit_codes import fill_closed_streams, flush_output

    fill_closed_streams()
    try:
        code = _ended(run)
        flush_output()
    except ConfigError as error:
        code = _failed(error, EXIT_CONFIG)
    except RunDirInUseError as error:
        code = _failed(error, IN_USE)
    except RolloutMQError as error:
        code = _failed(error, EXIT_FAILED)
    raise SystemExit(code)


def _ended(run: Callable[[], int | str | None]) -> int | str | None:
    """Run the command and return its exit code."""
    try:
        return run()
    except SystemExit as ended:
        return ended.code
    except ModuleNotFoundError as error:
        if error.name not in TRAINER_NEEDS:
            raise
        raise MissingError(f"the package {error.name}", install_remedy("trainer")) from error
    except OSError as error:
        from rolloutmq.services.monitor.text.exit_codes import is_of_output, silence_output

        if error.filename is not None:
            raise UnusablePathError(str(error.filename), error.strerror or str(error)) from error
        if not is_of_output(error):
            raise
        silence_output()
        raise OutputFailedError(str(error)) from error


def _failed(error: RolloutMQError, code: int) -> int:
    sys.stderr.write(f"rolloutmq: {error}\n")
    return code
