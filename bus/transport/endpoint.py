"""Endpoints of a broker, and how a client finds them: by its run directory, by the address of a socket, or by that of
another host with a key."""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import decode_json, read_regular
from rolloutmq.bus.transport.keys.bundle import CurveKeys, load_keys
from rolloutmq.bus.transport.remote import Remote
from rolloutmq.bus.transport.request_client import BlockingClient, BrokerClient
from rolloutmq.schemas.errors import BrokerUnavailableError, MalformedError, MissingError, UsageError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.replies import InfoReply, Reply
from rolloutmq.schemas.wire.requests import GetInfo

LOOK_INTERVAL_S: Final = 0.05
"""Time between two looks into a run directory for its broker."""
RESOLVE_TIMEOUT_S: Final = 30.0

Where = str | Path | Remote
"""A run directory, the address of a broker's `serve` socket, or a broker of another host with a key."""


async def resolve(where: Where, timeout_s: float = RESOLVE_TIMEOUT_S) -> Endpoints:
    """Return the sockets of a broker; wait for a broker that has not started.

    Args:
        where: Run directory with `endpoints.json`, the address of a broker's `serve` socket, or a `Remote`.
        timeout_s: Longest wait, in seconds.

    Raises:
        BrokerUnavailableError: No broker was found in time.
    """
    if is_address(where):
        async with BrokerClient(str(where), keys=keys_for(where)) as client:
            return _endpoints(where, await client.request(GetInfo(), timeout_s))
    until = time.monotonic() + timeout_s
    while (found := read_endpoints(Path(str(where)))) is None:
        if time.monotonic() > until:
            raise BrokerUnavailableError(str(where), timeout_s)
        await asyncio.sleep(LOOK_INTERVAL_S)
    return found


def resolve_blocking(where: Where, timeout_s: float = RESOLVE_TIMEOUT_S) -> Endpoints:
    """Return the sockets of a broker, from a thread without an event loop; see `resolve`."""
    if is_address(where):
        with BlockingClient(str(where), keys=keys_for(where)) as client:
            return _endpoints(where, client.request(GetInfo(), timeout_s))
    until = time.monotonic() + timeout_s
    while (found := read_endpoints(Path(str(where)))) is None:
        if time.monotonic() > until:
            raise BrokerUnavailableError(str(where), timeout_s)
        time.sleep(LOOK_INTERVAL_S)
    return found


def is_address(where: Where) -> bool:
    """Return whether this is the address of a socket, not a run directory.

    Raises:
        UsageError: It can be neither.
    """
    if isinstance(where, Remote):
        return True
    if not isinstance(where, str | os.PathLike):
        raise UsageError(f"where: must be a run directory or the broker's address (got {where!r})")
    return isinstance(where, str) and "://" in where


def keys_for(where: Where) -> CurveKeys | None:
    """Return the keys that the broker asks for, None if it asks for none.

    Raises:
        MissingError, NotPrivateError, ConfigError, UnusablePathError: The file of the key cannot be used.
    """
    return load_keys(where.key) if isinstance(where, Remote) and where.key is not None else None


def read_endpoints(run_dir: Path) -> Endpoints | None:
    """Read the endpoints of a run's broker, which may be dead; None if there are none.

    Raises:
        UsageError: `run_dir` is a file.
        MissingError: This user may not read the run directory.
        MalformedError: The file does not decode.
    """
    try:
        data = read_regular(RunLayout(run_dir).endpoints)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UsageError(f"{run_dir}: must be a run directory (got a file); correct the path") from None
    except PermissionError as error:
        remedy = "give this user access to the run directory"
        raise MissingError(
            str(RunLayout(run_dir).endpoints), remedy, f"cannot be read ({error.strerror})"
        ) from None
    try:
        return decode_json(data, Endpoints)
    except msgspec.MsgspecError as error:
        raise MalformedError(f"{RunLayout(run_dir).endpoints}: {error}") from None


def info_of(address: str, reply: Reply) -> InfoReply:
    """Return the reply to `GetInfo` with the addresses that this client can reach.

    Raises:
        MalformedError: It is another reply, or has no ports for a client that came by TCP.
    """
    if not isinstance(reply, InfoReply):
        raise MalformedError(f"{address}: wrong type of reply to GetInfo (got {type(reply).__name__})")
    if not address.startswith("tcp://"):
        return reply
    if len(reply.ports) != len(("ingest", "events", "publish")):
        raise MalformedError(f"{address}: the reply to GetInfo must have 3 ports (got {len(reply.ports)})")
    # The broker knows itself by other names than its clients, behind a translation of addresses above all.
    host = address.rpartition(":")[0]
    ingest, events, publish = (f"{host}:{port}" for port in reply.ports)
    return msgspec.structs.replace(reply, ingest=ingest, events=events, publish=publish)


def _endpoints(where: Where, reply: Reply) -> Endpoints:
    info = info_of(str(where), reply)
    return Endpoints(
        ingest=info.ingest,
        serve=str(where),
        events=info.events,
        publish=info.publish,
        pid=0,
        epoch=info.epoch,
        key=str(where.key or "") if isinstance(where, Remote) else "",
    )
