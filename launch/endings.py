"""End of a command: a RolloutMQ error is reported as one line and an exit code, without a traceback.

Exit codes: 0 done, 1 failed, 2 invalid configuration or command line, 4 the run directory is in use.
"""

import sys
from collections.abc import Callable
from typing import Final, NoReturn

from rolloutmq.bus.lifecycle import IN_USE
from rolloutmq.schemas.errors import (
    ConfigError,
    OutputFailedError,
    RolloutMQError,
    RunDirInUseError,
    UnusablePathError,
)

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2


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
