"""Files that the processes of a run share: a writer replaces one atomically, so a reader sees it whole or not at
all."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from rolloutmq.bus.files import decode_json, read_regular, require_private, write_private
from rolloutmq.schemas.config.base import problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError, UnusablePathError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

OWN_CONFIG: Final = "ROLLOUTMQ_CONFIG_FILE"
"""Variable with the configuration of this process, in place of `config.json` beside it: commands that join a run from
one host share a directory, and what an engine listens on is not a relay's."""
FILE_POLL_S: Final = 0.05
"""Time between two looks for another process's file; each is one failed `open`."""


@contextmanager
def usable(root: Path) -> Iterator[None]:
    """Turn a refusal of the file system within the block into an error that names the run directory.

    Raises:
        UnusablePathError: A file or directory cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        raise UnusablePathError(f"run directory {root}", str(error)) from error


def load_run(run_dir: Path) -> tuple[RunConfig, RunLayout]:
    """Read the resolved configuration of a run, to take part in it or to change it.

    Raises:
        MissingError: The directory holds no run.
        NotPrivateError: Another user owns the directory or something in it, or may write in it.
        UnusablePathError: Its configuration cannot be read.
        ConfigError: Its configuration is invalid, for example because another version wrote it.
    """
    if run_dir.is_dir():
        with usable(run_dir):
            require_private(run_dir)
    return read_run(run_dir)


def read_run(run_dir: Path) -> tuple[RunConfig, RunLayout]:
    """Read the resolved configuration of a run, only to look at it; the run may be another user's.

    Raises:
        MissingError, UnusablePathError, ConfigError: As for `load_run`.
    """
    layout = RunLayout(run_dir)
    try:
        data = read_regular(_config_of(layout))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(str(layout.config), "start the run with `rolloutmq up`") from None
    except OSError as error:
        raise UnusablePathError(f"run directory {run_dir}", str(error)) from error
    try:
        return RunConfig.model_validate_json(data), layout
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(map(str, first["loc"])) or str(layout.config), problem_of(first)) from None


def _config_of(layout: RunLayout) -> Path:
    """Return the configuration of this process: `OWN_CONFIG`, if it is of this directory."""
    own = os.environ.get(OWN_CONFIG, "")
    return Path(own) if own and Path(own).parent == layout.root.absolute() else layout.config


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with the JSON of a struct, a pydantic model or plain data.

    Readers see the old file or the new one, whole. That holds if this process dies, but not after a power cut: nothing
    is synced to disk. Only this user may read it.

    Raises:
        OSError: It cannot be written, for example because the disk is full; the old file is as it was.
    """
    if isinstance(value, BaseModel):
        data = value.model_dump_json(indent=1).encode()
    else:
        data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write_private(written, data + b"\n")
        written.replace(path)
    except OSError:
        with suppress(OSError):  # on a full disk it would keep the last room
            written.unlink(missing_ok=True)
        raise


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Read a file of `write_json`; None if there is none.

    Raises:
        msgspec.DecodeError: The file does not decode as `kind`.
    """
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    return decode_json(data, kind)


def read_lives(layout: RunLayout) -> tuple[Life, ...]:
    """Return the lives of a run; none if no launcher started it, or if the file is damaged."""
    try:
        return tuple(read_json(layout.lives, list[Life]) or ())
    except msgspec.DecodeError as error:
        logger.warning("lives of the run unreadable path=%s error=%s", layout.lives, error)
        return ()


async def wait_json(path: Path, kind: type[_T]) -> _T:
    """Wait without a limit for the file of another process. Cancellation is safe."""
    # Another process writes the file: there is no event to wait for.
    while (found := read_json(path, kind)) is None:  # noqa: ASYNC110
        await asyncio.sleep(FILE_POLL_S)
    return found
