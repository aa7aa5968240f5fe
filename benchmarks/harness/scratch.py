"""Directories for measurements, at the default place of runs, so that both sides use the disk of a run."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUNS: Final = Path(__file__).parents[2] / "runs"


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Yield an empty directory; it is removed afterwards.

    Dirty pages of other work are written first, so that no side pays for them.
    """
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=RUNS) as path:
        os.sync()
        yield Path(path)


def free_bytes() -> int:
    """Return the free bytes of that disk."""
    return shutil.disk_usage(Path(__file__).parent).free
