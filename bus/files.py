"""Files of a run: private to their user, and on disk when they have to survive a power cut.

A run directory belongs to the user of its processes, and only that user may write in it: everybody else who may can put
a link where a file of the run is about to be written. So every process that takes part in a run checks the directory,
and opens the files in it without following a link. New files are readable and writable for their user alone.
"""

import errno
import grp
import os
import pwd
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, cast

import msgspec

from rolloutmq.schemas.errors import NotPrivateError

PRIVATE_DIRECTORY: Final = 0o700
PRIVATE_FILE: Final = 0o600
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_BLOCK_BYTES: Final = 1 << 20
_T = TypeVar("_T")


def require_private(directory: Path) -> None:
    """Require that a run directory and everything in it belong to this user, and that nobody else may write in it.

    The contents of its subdirectories are not checked: nobody else may write in these either.

    Raises:
        NotPrivateError: The first entry for which this does not hold.
        OSError: The directory does not exist, or cannot be read.
    """
    _require_own(directory, directory.lstat())
    _require_own(directory, directory.stat())
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a file of a live run comes and goes
                _require_own(Path(entry), entry.stat(follow_symlinks=False))


def _require_own(path: Path, found: os.stat_result) -> None:
    user = os.geteuid()
    if found.st_uid != user:
        raise NotPrivateError(
            str(path),
            f"belongs to user {found.st_uid} (this is user {user})",
            "use a run directory of your own",
        )
    shared = stat.S_IWOTH if _is_of_one(found.st_gid) else _OTHERS_WRITE
    if stat.S_ISDIR(found.st_mode) and found.st_mode & shared:
        raise NotPrivateError(
            str(path),
            f"other users may write in it (mode {stat.S_IMODE(found.st_mode):04o})",
            f"look for files of theirs, then take it from them: chmod go-w {path}",
        )


def _is_of_one(gid: int) -> bool:
    """Return whether a group is this user's alone, as systems make one for each user, with a umask of 002."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}


def private_file(path: Path, mode: str, buffering: int = -1) -> BinaryIO:
    """Open a binary file of a run like `open`, but follow no link, and create it for this user alone.

    Raises:
        OSError: As for `open`; also if the path is a symbolic link.
    """
    return cast(BinaryIO, open(path, mode, buffering, opener=private_fd))


def private_fd(path: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor of a file of a run, like `os.open`; the caller closes it. See `private_file`."""
    try:
        return regular_fd(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, "a symbolic link, which a run does not follow", os.fspath(path)
            ) from None
        raise


def regular_fd(path: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor of a regular file, like `os.open`; a pipe of that name is not waited for.

    A character device may be written: `/dev/null` is where a user sends what nobody reads.

    Raises:
        OSError: As for `os.open`; also if the path is a directory, a pipe, a socket or another device.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, PRIVATE_FILE)  # no regular file heeds the last
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and flags & os.O_ACCMODE != os.O_RDONLY):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. OSError: See `regular_fd`."""
    return open(path, "rb", buffering, opener=regular_fd)


def read_regular(path: Path) -> bytes:
    """Return the contents of a regular file. OSError: See `regular_fd`."""
    with open_regular(path) as file:
        return file.read()


def decode_json(data: bytes, kind: type[_T]) -> _T:
    """Decode JSON as `kind`.

    Raises:
        msgspec.DecodeError: It is no JSON, or not of that kind; also if its text is no UTF-8, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def write_private(path: Path, data: bytes) -> None:
    """Replace the contents of a file of a run. See `private_file`."""
    with private_file(path, "wb") as file:
        file.write(data)


def create_private(path: Path, data: bytes) -> bool:
    """Create a file of a run with its contents, unless there is one; return whether it was created. See `private_file`.

    A killed writer leaves no part of it: the file gets its name once it is whole.

    Raises:
        OSError: It cannot be written, for example because the disk is full; there is no such file.
    """
    written = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_private(written, data)
        force(written)  # or a power cut leaves the name without the contents
        os.link(written, path)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            written.unlink(missing_ok=True)
    return True


def append_whole(path: Path, data: bytes) -> None:
    """Append to a file of a run, all or nothing. See `private_file`. Only one process may append to it.

    Raises:
        OSError: The file cannot be written, for example because the disk is full. It is as before; if that fails too,
            it ends with a part of the data.
    """
    with private_file(path, "ab", buffering=0) as file:
        before, left = file.seek(0, os.SEEK_END), memoryview(data)
        try:
            while left:
                # On a full disk a raw write writes what fits, and only the next one raises.
                written = file.write(left)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
                left = left[written:]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def copy_private(source: Path, target: Path) -> None:
    """Copy the contents of a file to a file of a run. See `private_file`."""
    with source.open("rb") as read, private_file(target, "wb") as written:
        shutil.copyfileobj(read, written, _BLOCK_BYTES)


def make_private(path: Path) -> None:
    """Close a file that a library wrote to everybody else."""
    path.chmod(PRIVATE_FILE)


def force(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk. Blocks.

    Raises:
        OSError: The disk failed or is full, or `path` does not exist.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def force_tree(root: Path) -> None:
    """Sync a directory and everything in it to disk, and its own entry. Blocks.

    Raises:
        OSError: The disk failed or is full, or `root` does not exist.
    """
    for directory, _, files in os.walk(root):
        for name in files:
            force(Path(directory) / name)
        force(Path(directory))
    force(root.parent)


def sum_of(path: Path) -> int:
    """Return the CRC32C of a file. Blocks while it reads the file.

    Raises:
        OSError: The file cannot be read.
    """
    # Not at the top: vLLM's own environment, where its extension needs this module, has no such package.
    import google_crc32c

    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = google_crc32c.extend(crc, block)
    return int(crc)
