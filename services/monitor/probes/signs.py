"""Signs of life of the programs that a command started, read from their files: who works, and who is silent.

Only changes of a file count, so the clock of its file system does not matter, and only silence that was witnessed:
after a pause of the reader itself nobody has been silent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import Sign
from rolloutmq.schemas.wire.control import WorkerState

LOOK_S: Final = 1.0
"""Time between two looks, as between two signs."""
FRESH_S: Final = 5.0
"""Silence of a program from which it counts as no longer at work."""


@dataclass(frozen=True, slots=True)
class _Seen:
    sign: Sign
    mark: tuple[int, int]
    silent_s: float = 0.0


class Signs:
    """What programs say of themselves, by name.

    Args:
        paths: The file of each program.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._seen: dict[str, _Seen] = {}
        self._looked_at: float | None = None

    def look(self, pids: Mapping[str, int], now: float) -> None:
        """Read what has changed.

        Args:
            pids: Running programs, and their processes. What an earlier process of a program left does not count.
            now: Monotonic seconds.
        """
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now
        for name, path in self._paths.items():
            seen = self._look_at(path, self._seen.pop(name, None), passed_s)
            if seen is not None and seen.sign.pid == pids.get(name):
                self._seen[name] = seen

    def are_at_work(self) -> bool:
        """Return whether each program has shown within `FRESH_S` that it is ready, and that the broker hears it."""
        return all(_works(self._seen.get(name)) for name in self._paths)

    def silent_s(self, name: str) -> float:
        """Return for how long a program has shown nothing; 0 if its present process has not shown anything yet."""
        return self._seen[name].silent_s if name in self._seen else 0.0

    def _look_at(self, path: Path, before: _Seen | None, passed_s: float) -> _Seen | None:
        try:
            found = path.stat()
            mark = found.st_ino, found.st_mtime_ns
            if before is not None and before.mark == mark:
                return _Seen(before.sign, mark, before.silent_s + passed_s)
            sign = read_json(path, Sign)
        except (OSError, msgspec.MsgspecError):
            return None
        return None if sign is None else _Seen(sign, mark)


def _works(seen: _Seen | None) -> bool:
    if seen is None or seen.silent_s > FRESH_S:
        return False
    return seen.sign.state == WorkerState.READY and seen.sign.answered and not seen.sign.draining
