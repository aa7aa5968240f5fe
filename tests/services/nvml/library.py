"""The library of the scripted driver, compiled on first use and kept in the directory for temporary files.

Its name has a hash of all that goes into it, so that sessions and parallel workers share it, and a change of the source
makes another one. Functions named by `lacks` are absent, as in an older driver.
"""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("libnvidia-ml.c")
NAME: Final = "libnvidia-ml.so.1"
"""What the bindings load."""
COMPILER: Final = ("cc", "-std=gnu11", "-shared", "-fPIC", "-O1", "-pthread")
"""Without a soname: a process that has this library loaded would get it for a real one, too."""
COMPILE_S: Final = 120.0


def library(lacks: Collection[str] = ()) -> Path:
    """Return the library, in a folder of its own."""
    return _built(tuple(sorted(lacks)))


@cache
def _built(lacks: tuple[str, ...]) -> Path:
    command = [*COMPILER, *(f"-D{name}=lacks_{name}" for name in lacks)]
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(command).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rolloutmq-nvml-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder}: belongs to somebody else; remove it"
    found = folder / NAME
    if not found.exists():
        made = folder / f"{NAME}.{os.getpid()}"
        subprocess.run([*command, "-o", str(made), str(SOURCE)], check=True, timeout=COMPILE_S)
        made.replace(found)
    return found
