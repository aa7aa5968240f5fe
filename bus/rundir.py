"""Files that the processes of a run share: a writer replaces one atomically, so a reader sees it whole or not at
all."""

import asyncio
import os
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from rolloutmq.schemas.config.base import problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError
from rolloutmq.schemas.files import RunLayout

_T = TypeVar("_T")

FILE_POLL_S: Final = 0.05
"""Time between two looks for another process's file; each is one failed `open`."""


def load_run(run_dir: Path) -> tuple[RunConfig, RunLayout]:
    """Read the resolved configuration of a run.

    Raises:
        MissingError: The directory holds no run.
        ConfigError: Its configuration is invalid, for example because another version wrote it.
    """
    layout = RunLayout(run_dir)
    try:
        data = layout.config.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(str(layout.config), "start the run with `rolloutmq up`") from None
    try:
        return RunConfig.model_validate_json(data), layout
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(map(str, first["loc"])) or "config", problem_of(first)) from None


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with the JSON of a struct, a pydantic model or plain data.

    Readers see the old file or the new one, whole. That holds if this process dies, but not after a power cut: nothing
    is synced to disk.
    """
    if isinstance(value, BaseModel):
        data = value.model_dump_json(indent=1).encode()
    else:
        data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    written.write_bytes(data + b"\n")
    written.replace(path)


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Read a file of `write_json`; None if there is none.

    Raises:
        msgspec.DecodeError: The file does not decode as `kind`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=kind)


async def wait_json(path: Path, kind: type[_T]) -> _T:
    """Wait without a limit for the file of another process. Cancellation is safe."""
    # Another process writes the file: there is no event to wait for.
    while (found := read_json(path, kind)) is None:  # noqa: ASYNC110
        await asyncio.sleep(FILE_POLL_S)
    return found
