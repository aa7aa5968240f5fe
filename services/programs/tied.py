"""Start of a program of somebody else's that dies with its parent: `python -P -m ...tied PROGRAM [ARGUMENT ...]`.

The kernel keeps the death signal over an exec. So the program is this very process, with its pid and its descriptors.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from rolloutmq.services.process.ending import die_with_parent

NO_PROGRAM: Final = 127
"""Exit code without a program, as of a shell."""


def run(argv: Sequence[str]) -> int:
    """Become the program; return an exit code only if there is none of this name."""
    die_with_parent()
    _reset_signals()
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        sys.stderr.write(
            f"environment.NAME.command: there is no program to run on {os.uname().nodename} (got {argv[0]!r}: "
            f"{error.strerror}); install it there, or name one by a path in the directory of the configuration\n"
        )
    return NO_PROGRAM


def _reset_signals() -> None:
    """Give the program the signals of a fresh process: an exec keeps what is ignored and what is blocked.

    Python ignores SIGPIPE, and the processes of a cluster may block SIGTERM.
    """
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
