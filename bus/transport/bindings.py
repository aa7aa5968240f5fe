"""Addresses that the broker binds, and the locks that keep a second broker away.

`ipc` sockets are in a directory of mode 0700 that belongs to this user: `sockets/` in the run directory, or, if that
path is too long for the kernel, a directory in the system's temporary one, named by a hash of the run directory. A
second bind silently takes over an ipc path. Therefore a broker of any transport first locks `sockets/lock` and holds
the lock until it ends. It locks the run directory and the journal's directory too, themselves and not a file in them:
whoever deletes the lock file makes no way for a second broker. `broker.listen` adds TCP to the same sockets, for
clients of other hosts.

Clients import `endpoint` instead, which loads faster.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rolloutmq.bus.files import decode_json, private_fd
from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.address import listen_of, port_of
from rolloutmq.schemas.printable import shell_word

SOCKETS: Final = ("ingest", "serve", "events", "publish")
"""Names of the broker's sockets, and of their files."""
LISTENING: Final = ("serve", "ingest", "events", "publish")
"""The sockets in the order of the ports of `broker.listen`, and of `Endpoints.listen`."""
IPC_PATH_LIMIT_BYTES: Final = 107
"""Longest path of a unix socket on Linux."""

_NO_DIRECTORY_LOCKS: Final = frozenset({errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK})


LAST_EPOCH: Final = (1 << 62) - 1
"""An epoch goes into messages as 64 bits, and must be able to grow. A larger one in a lock file is damage."""


class LockNote(msgspec.Struct, frozen=True):
    """Content of a lock file: the broker that holds it, or held it last."""

    pid: int
    epoch: Annotated[int, Meta(ge=0, le=LAST_EPOCH)]


@contextlib.contextmanager
def claim(layout: RunLayout) -> Iterator[int]:
    """Lock a run directory, its journal and its sockets for this process; yield the epoch of this broker.

    Epochs grow: an epoch is the wall clock in nanoseconds, or the previous epoch plus one if the clock went back.

    Raises:
        AddressInUseError: Another live broker holds the lock, or the directory belongs to another user.
    """
    directory = private_directory(layout.sockets)
    with contextlib.ExitStack() as stack:
        file = private_fd(directory / "lock", os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, file)
        note = _read_note(file)
        in_use = AddressInUseError(
            f"ipc://{directory}",
            f"the broker of process {note.pid}" if note.pid else "another broker",
            f"{_way_to_stop(layout, note.pid)}, or choose another run directory",
        )
        if not _locked(file):
            raise in_use
        for place in (layout.root, layout.journal):
            if place.is_dir():
                held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, held)
                if not _locked(held):
                    raise in_use
        epoch = max(time.time_ns(), note.epoch + 1)
        os.pwrite(file, msgspec.json.encode(LockNote(os.getpid(), epoch)).ljust(128), 0)
        yield epoch


def _way_to_stop(layout: RunLayout, pid: int) -> str:
    """Return how to stop the broker that holds a run directory: `down` ends only a run that a launcher owns."""
    if not pid or layout.owner.exists():
        return f"stop that run with `rolloutmq down {shell_word(layout.root)}`"
    if pid == os.getpid():
        return "stop that broker in this process, a LocalBroker with its `stop()`"
    return f"end that broker, which was started by hand, with `kill {pid}`"


def _locked(fd: int) -> bool:
    """Lock an open file or directory; False if another process has. Some network file systems lock no directory."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_LOCKS or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
    return True


@contextlib.contextmanager
def bindings(layout: RunLayout) -> Iterator[dict[str, str]]:
    """Yield the ipc address of each socket to bind; remove their files at the end.

    Only the holder of `claim` may call this.
    """
    directory, borrowed = _ipc_directory(layout)
    try:
        yield {name: f"ipc://{directory / name}" for name in SOCKETS}
    finally:
        for name in SOCKETS:
            (directory / name).unlink(missing_ok=True)
        if borrowed:
            shutil.rmtree(directory, ignore_errors=True)


def private_directory(path: Path) -> Path:
    """Create a directory of mode 0700, or check an existing one; return its resolved path."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise AddressInUseError(str(path), "a file that is no directory")
    if found.st_uid != os.geteuid():
        raise AddressInUseError(str(path), f"user {found.st_uid}")
    path.chmod(0o700)
    return path.resolve()


def _read_note(file: int) -> LockNote:
    try:
        return decode_json(os.pread(file, 128, 0).strip(), LockNote)
    except msgspec.MsgspecError:
        return LockNote(0, 0)


def _ipc_directory(layout: RunLayout) -> tuple[Path, bool]:
    """Return the directory of the ipc sockets, and whether it is outside the run directory."""
    directory = private_directory(layout.sockets)
    longest = max(len(os.fsencode(directory / name)) for name in SOCKETS)
    if longest <= IPC_PATH_LIMIT_BYTES:
        return directory, False
    import hashlib  # it loads OpenSSL; see ColumnTable

    digest = hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()
    return private_directory(Path(tempfile.gettempdir()) / f"rolloutmq-{digest}"), True


def listen_addresses(listen: str, previous: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """Return the name of each socket that `broker.listen` is for, in its order, with the addresses to try.

    Args:
        listen: A valid `broker.listen`.
        previous: Bound addresses of a killed broker. With port 0 they are tried first: its clients still try its
            ports, and with others they would look for the broker first.
    """
    parts = listen_of(listen)
    assert parts is not None, listen
    wanted: list[tuple[str, list[str]]] = []
    for index, name in enumerate(LISTENING):
        if parts.port:
            ports = [str(parts.port + index)]
        else:
            ports = [*(str(port_of(address)) for address in previous[index : index + 1]), "*"]
        wanted.append((name, [f"tcp://{parts.host}:{port}" for port in ports]))
    return wanted


def http_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL at which this machine reaches a server bound to `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"
