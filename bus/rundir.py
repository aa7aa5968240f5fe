"""Files through which the processes of a run know each other: read whole or not at all, replaced in one step."""

import asyncio
import os
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError
from rolloutmq.schemas.layout import RunLayout

_T = TypeVar("_T")

FILE_POLL_S: Final = 0.05
"""How often a file of another process is looked for; it is one `open` that fails."""


def load_run(run_dir: Path) -> tuple[RunConfig, RunLayout]:
    """Read the resolved configuration of a run.

    Raises:
        MissingError: The directory holds no run.
        ConfigError: Its configuration is not valid, for example of another version.
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
        raise ConfigError(".".join(map(str, first["loc"])) or "config", first["msg"]) from None


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of a struct, a pydantic model or plain data.

    Readers see the old file or the new one, whole. Atomic against the death of this process, not
    against loss of power: nothing is synced to disk.
    """
    if isinstance(value, BaseModel):
        data = value.model_dump_json(indent=1).encode()
    else:
        data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    written.write_bytes(data + b"\n")
    written.replace(path)


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Read what `write_json` wrote, or None where there is nothing.

    Raises:
        msgspec.DecodeError: The file is not of this kind.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=kind)


async def wait_json(path: Path, kind: type[_T]) -> _T:
    """Wait for the file of another process, however late it starts. Cancellation is safe."""
    # The file is another process's: there is no event to wait for.
    while (found := read_json(path, kind)) is None:  # noqa: ASYNC110
        await asyncio.sleep(FILE_POLL_S)
    return found
