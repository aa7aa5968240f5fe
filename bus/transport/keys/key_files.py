"""Files with secrets of a run on a network: written for their user alone, and refused if anybody else may read them."""

import codecs
import os
import stat
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from rolloutmq.bus.files import PRIVATE_FILE, decode_json, regular_fd
from rolloutmq.schemas.errors import ConfigError, MissingError, NotPrivateError, UnusablePathError

_T = TypeVar("_T")

FILE_LIMIT_BYTES: Final = 8 << 20
"""Largest key file: 10,000 keys take about 3 MB."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_secret(path: Path, kind: type[_T], remedy: str) -> _T:
    """Read a file with a secret.

    Args:
        path: The file.
        kind: Structure of its contents.
        remedy: What to do if it is missing or damaged.

    Raises:
        MissingError: There is no such file.
        NotPrivateError: Another user owns it, or may read it.
        ConfigError: It does not decode.
        UnusablePathError: It cannot be read.
    """
    try:
        with open(path, "rb", opener=regular_fd) as file:
            require_secret(path, os.fstat(file.fileno()))
            data = file.read(FILE_LIMIT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(str(path), remedy) from None
    except OSError as error:
        raise UnusablePathError(str(path), error.strerror or str(error)) from error
    if len(data) > FILE_LIMIT_BYTES:
        raise ConfigError(str(path), f"is larger than {FILE_LIMIT_BYTES >> 20} MiB; {remedy}")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(str(path), f"is UTF-16, as some editors save it; save it as UTF-8, or {remedy}")
    try:
        return decode_json(data.removeprefix(codecs.BOM_UTF8), kind)
    except msgspec.DecodeError as error:
        raise ConfigError(str(path), f"is damaged, or no key file: {error}; {remedy}") from None


def require_secret(path: Path, found: os.stat_result) -> None:
    """Require that a file or directory belongs to this user, and that nobody else may use it.

    Raises:
        NotPrivateError: It does not hold.
    """
    user = os.geteuid()
    if found.st_uid != user:
        raise NotPrivateError(
            str(path), f"belongs to user {found.st_uid} (this is user {user})", "use a key of your own"
        )
    if found.st_mode & _OTHERS:
        raise NotPrivateError(
            str(path),
            f"other users may use it, and it holds a secret (mode {stat.S_IMODE(found.st_mode):04o})",
            f"close it to them, chmod go= {path}, and make a new key if somebody may have read it",
        )


def write_secret(path: Path, value: msgspec.Struct, *, new: bool = False) -> None:
    """Replace a file with the JSON of a struct, durably; a reader sees it whole or not at all.

    Args:
        path: The file.
        value: Its contents.
        new: The file must not exist yet.

    Raises:
        FileExistsError: It exists, and `new`.
        OSError: It cannot be written; an old file is as it was.
    """
    data = msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(written, flags, PRIVATE_FILE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(written, path)
        else:
            written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
