"""Addresses: where the broker binds, who may reach it, and how its peers find it.

`ipc` sockets lie in a directory of mode 0700 that belongs to this user: `sockets/` of the run directory, or, where its
path is too long for the kernel, a directory below the system's temporary one whose name is a hash of the run
directory. A second bind to an ipc path silently takes it over; hence a broker first locks `sockets/lock`, whatever its
transport, and keeps that lock for life. Plain TCP leaves the machine only if the configuration says so in words.
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

from rolloutmq.bus.client import BlockingClient, BrokerClient
from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import GetInfo, InfoReply, Reply
from rolloutmq.schemas.errors import (
    AddressInUseError,
    BrokerUnavailableError,
    ConfigError,
    MalformedError,
)
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import Endpoints

SOCKETS: Final = ("ingest", "serve", "events", "publish")
"""The sockets that a broker binds; also their file names."""
IPC_PATH_LIMIT_BYTES: Final = 107
"""Longest path of a unix socket on Linux."""
LOOK_INTERVAL_S: Final = 0.05
"""How often a run directory is looked at for its broker."""
RESOLVE_TIMEOUT_S: Final = 30.0

Where = str | Path
"""A run directory, or the address of a broker's `serve`."""


class LockNote(msgspec.Struct, frozen=True):
    """What a lock file says of the broker that holds, or last held, it."""

    pid: int
    epoch: int


@contextlib.contextmanager
def claim(layout: RunLayout) -> Iterator[int]:
    """Hold a run directory's sockets for this process; yields the epoch of this life of the broker.

    Epochs grow: the wall clock in nanoseconds, and more than that of the life before if the clock went back.

    Raises:
        AddressInUseError: Another live broker holds them, or the directory is another user's.
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
    """Choose the address of each socket to bind; what lies on disk for them is removed at the end.

    For tcp the port is `*`: the system chooses. Only the holder of the claim may call this.

    Raises:
        ConfigError: The address could be reached from other machines, and that was not allowed.
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
    """Make a directory that only this user may enter, or make sure that it is one; returns it resolved."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise AddressInUseError(str(path), "something that is no directory")
    if found.st_uid != os.geteuid():
        raise AddressInUseError(str(path), f"user {found.st_uid}")
    path.chmod(0o700)
    return path.resolve()


def connectable(bound: str) -> str:
    """Turn the address a socket is bound to into one to connect to: a wildcard becomes this host's own address."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if bound.startswith(wildcard):
            return f"tcp://{_own_address()}:{bound.removeprefix(wildcard)}"
    return bound


async def resolve(where: Where, timeout_s: float = RESOLVE_TIMEOUT_S) -> Endpoints:
    """Find a broker's sockets; waits for a broker that is not there yet.

    Args:
        where: Run directory, whose `endpoints.json` is waited for, or an address, which is asked.
        timeout_s: Longest time to wait.

    Raises:
        BrokerUnavailableError: There was none in time.
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
    """Find a broker's sockets from a thread without an event loop; see `resolve`."""
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
    """Whether this is an address of a socket and not a run directory."""
    return isinstance(where, str) and "://" in where


def read_endpoints(run_dir: Path) -> Endpoints | None:
    """Read where a run's broker is bound, if there is one; says nothing of whether it still lives."""
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
        raise MalformedError(f"{serve} answered GetInfo with {type(reply).__name__}")
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
    """Return where the ipc sockets lie, and whether that is outside the run directory."""
    directory = private_directory(layout.sockets)
    longest = max(len(os.fsencode(directory / name)) for name in SOCKETS)
    if longest <= IPC_PATH_LIMIT_BYTES:
        return directory, False
    digest = hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()
    return private_directory(Path(tempfile.gettempdir()) / f"rolloutmq-{digest}"), True


def bind_host(config: BrokerConfig) -> str:
    """Return the host to bind for tcp, as it stands in an address; ConfigError if that was not allowed."""
    host = config.host
    if not config.insecure and not _is_loopback(host):
        raise ConfigError(
            "broker.host",
            f"{host} can be reached from other machines, and plain TCP neither hides nor checks anything; "
            "use 127.0.0.1, or allow it with broker.insecure = true",
        )
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_address() -> str:
    # Connecting a datagram socket sends nothing; it only chooses the address that would be sent from.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def http_url(host: str, port: int) -> str:
    """Return where a server that is bound to `host` is reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
