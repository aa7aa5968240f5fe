"""A guard of what a process has started: it kills that once the host of the process is gone, however it ended.

The kernel kills a process with its parent, but nothing that it has started itself. The guard reads a pipe that only its
host can write to, and that the kernel closes at the death of the host: `python -P -m ...guard MARKER SECRET [ENGINE]`.
It also removes the secret that the host has kept for them, and what an engine leaves: weights in shared memory.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from rolloutmq.schemas.process import python_command

LOOKS: Final = 10
"""Most looks for processes: one that is just being forked may miss the first."""
_MARKER: Final = "ROLLOUTMQ_PROCESS"
"""As in `services.process.identity`, which the guard loads only at the end."""


class Guard:
    """A guard of this process. It acts when this process ends, unless it was dismissed.

    Args:
        marker: Marker of the processes.
        secret: File to remove; it need not exist.
        engine: Directory of an engine, to be removed with its weights; None for another process.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, marker: str, secret: Path, engine: Path | None = None) -> None:
        more = () if engine is None else (str(engine),)
        self._process = subprocess.Popen(
            python_command(sys.executable, __name__, marker, str(secret), *more),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != _MARKER},
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the guard: its processes have ended. Takes no time."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def main(marker: str, secret: str, engine: str = "") -> None:
    """Wait for the end of the host, then remove the secret and kill what is left, with what it has left. Blocks."""
    while os.read(sys.stdin.fileno(), 1):
        continue
    with suppress(OSError):
        Path(secret).unlink()
    from rolloutmq.services.process.child import end_marked

    for _ in range(LOOKS):
        if not end_marked(marker):
            break
    if engine:
        from rolloutmq.services.orchestrator.cluster.host_engine import remove_directory

        remove_directory(Path(engine))


if __name__ == "__main__":
    main(*sys.argv[1:])
