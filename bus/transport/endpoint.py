"""Endpoints: the addresses that the broker binds, and their discovery by clients.

`ipc` sockets are in a directory of mode 0700 that belongs to this user: `sockets/` in the run directory, or, if that
path is too long for the kernel, a directory in the system's temporary one, named by a hash of the run directory. A
second bind silently takes over an ipc path. Therefore a broker of any transport first locks `sockets/lock` and holds
the lock until it ends. Plain TCP on a non-loopback address needs `broker.insecure = true`.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import ipaddress
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.transport.request_client import BlockingClient, BrokerClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.errors import (
    AddressInUseError,
    BrokerUnavailableError,
    ConfigError,
    MalformedError,
)
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.replies import InfoReply, Reply
from rolloutmq.schemas.wire.requests import GetInfo

SOCKETS: Final = ("ingest", "serve", "events", "publish")
"""Names of the broker's sockets, and of their files."""
IPC_PATH_LIMIT_BYTES: Final = 107
"""Longest path of a unix socket on Linux."""
LOOK_INTERVAL_S: Final = 0.05
"""Time between two looks into a run directory for its broker."""
RESOLVE_TIMEOUT_S: Final = 30.0

Where = str | Path
"""A run directory, or the address of a broker's `serve` socket."""


class LockNote(msgspec.Struct, frozen=True):
    """Content of a lock file: the broker that holds it, or held it last."""

    pid: int
    epoch: int


@contextlib.contextmanager
def claim(layout: RunLayout) -> Iterator[int]:
    """Lock a run directory's sockets for this process; yield the epoch of this broker.

    Epochs grow: an epoch is the wall clock in nanoseconds, or the previous epoch plus one if the clock went back.

    Raises:
        AddressInUseError: Another live broker holds the lock, or the directory belongs to another user.
    """
    directory = private_directory(layout.sockets)
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        note = _read_note(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AddressInUseError(f"ipc://{directory}", f"the broker of process {note.pid}") from None
        epoch = max(time.time_ns(), note.epoch + 1)
        os.pwrite(file, msgspec.json.encode(LockNote(os.getpid(), epoch)).ljust(128), 0)
        yield epoch
    finally:
        os.close(file)


@contextlib.contextmanager
def bindings(config: BrokerConfig, layout: RunLayout) -> Iterator[dict[str, str]]:
    """Yield the address of each socket to bind; remove the files of ipc sockets at the end.

    For tcp the port is `*`: the system chooses. Only the holder of `claim` may call this.

    Raises:
        ConfigError: Other machines can reach the address, and the configuration does not allow that.
    """
    if config.transport == "tcp":
        host = bind_host(config)
        yield dict.fromkeys(SOCKETS, f"tcp://{host}:*")
        return
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


def connectable(bound: str) -> str:
    """Return the address to connect to for a bound address: a wildcard becomes this host's own address."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if bound.startswith(wildcard):
            return f"tcp://{_own_address()}:{bound.removeprefix(wildcard)}"
    return bound


async def resolve(where: Where, timeout_s: float = RESOLVE_TIMEOUT_S) -> Endpoints:
    """Return the sockets of a broker; wait for a broker that has not started.

    Args:
        where: Run directory with `endpoints.json`, or the address of a broker's `serve` socket.
        timeout_s: Longest wait, in seconds.

    Raises:
        BrokerUnavailableError: No broker was found in time.
    """
    if is_address(where):
        async with BrokerClient(str(where)) as client:
            return _endpoints(str(where), await client.request(GetInfo(), timeout_s))
    until = time.monotonic() + timeout_s
    while (found := read_endpoints(Path(where))) is None:
        if time.monotonic() > until:
            raise BrokerUnavailableError(str(where), timeout_s)
        await asyncio.sleep(LOOK_INTERVAL_S)
    return found


def resolve_blocking(where: Where, timeout_s: float = RESOLVE_TIMEOUT_S) -> Endpoints:
    """Return the sockets of a broker, from a thread without an event loop; see `resolve`."""
    if is_address(where):
        with BlockingClient(str(where)) as client:
            return _endpoints(str(where), client.request(GetInfo(), timeout_s))
    until = time.monotonic() + timeout_s
    while (found := read_endpoints(Path(where))) is None:
        if time.monotonic() > until:
            raise BrokerUnavailableError(str(where), timeout_s)
        time.sleep(LOOK_INTERVAL_S)
    return found


def is_address(where: Where) -> bool:
    """Return whether this is the address of a socket, not a run directory."""
    return isinstance(where, str) and "://" in where


def read_endpoints(run_dir: Path) -> Endpoints | None:
    """Read the endpoints of a run's broker, which may be dead; None if there are none."""
    try:
        text = RunLayout(run_dir).endpoints.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=Endpoints)
    except msgspec.MsgspecError as error:
        raise MalformedError(f"{RunLayout(run_dir).endpoints}: {error}") from None


def _endpoints(serve: str, reply: Reply) -> Endpoints:
    if not isinstance(reply, InfoReply):
        raise MalformedError(f"{serve}: wrong type of reply to GetInfo (got {type(reply).__name__})")
    return Endpoints(
        ingest=reply.ingest,
        serve=serve,
        events=reply.events,
        publish=reply.publish,
        pid=0,
        epoch=reply.epoch,
    )


def _read_note(file: int) -> LockNote:
    try:
        return msgspec.json.decode(os.pread(file, 128, 0).strip(), type=LockNote)
    except msgspec.MsgspecError:
        return LockNote(0, 0)


def _ipc_directory(layout: RunLayout) -> tuple[Path, bool]:
    """Return the directory of the ipc sockets, and whether it is outside the run directory."""
    directory = private_directory(layout.sockets)
    longest = max(len(os.fsencode(directory / name)) for name in SOCKETS)
    if longest <= IPC_PATH_LIMIT_BYTES:
        return directory, False
    digest = hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()
    return private_directory(Path(tempfile.gettempdir()) / f"rolloutmq-{digest}"), True


def bind_host(config: BrokerConfig) -> str:
    """Return the host to bind for tcp, in the form of an address; ConfigError if it is not allowed."""
    host = config.host
    if not config.insecure and not _is_loopback(host):
        raise ConfigError(
            "broker.host",
            f"other machines can reach this address, and plain TCP has neither encryption nor login (got {host}); "
            "use 127.0.0.1, or allow it with broker.insecure = true",
        )
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_address() -> str:
    # Connecting a datagram socket sends nothing; it only selects the source address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def http_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server bound to `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
