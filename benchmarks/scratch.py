"""Directories to measure in. They lie where runs lie by default, so that both sides use the disk that a run would."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUNS: Final = Path(__file__).parent.parent / "runs"


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Yield an empty directory; it and all in it are gone afterwards.

    What other work left to be written is written before, so that nobody's clock pays for another's pages.
    """
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=RUNS) as path:
        os.sync()
        yield Path(path)


def free_bytes() -> int:
    """Bytes that fit on that disk."""
    return shutil.disk_usage(Path(__file__).parent).free
