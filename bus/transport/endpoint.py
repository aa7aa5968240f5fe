"""Endpoints of a broker, and how a client finds them: by its run directory, or by the address of a socket."""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import decode_json, read_regular
from rolloutmq.bus.transport.request_client import BlockingClient, BrokerClient
from rolloutmq.schemas.errors import BrokerUnavailableError, MalformedError, MissingError, UsageError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.replies import InfoReply, Reply
from rolloutmq.schemas.wire.requests import GetInfo

LOOK_INTERVAL_S: Final = 0.05
"""Time between two looks into a run directory for its broker."""
RESOLVE_TIMEOUT_S: Final = 30.0

Where = str | Path
"""A run directory, or the address of a broker's `serve` socket."""


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
    """Return whether this is the address of a socket, not a run directory.

    Raises:
        UsageError: It can be neither.
    """
    if not isinstance(where, str | os.PathLike):
        raise UsageError(f"where: must be a run directory or the broker's address (got {where!r})")
    return isinstance(where, str) and "://" in where


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
