"""Discovery of the broker: it may start later, move, or answer slowly.

Each attempt reads the run directory again, because a restarted broker may have another address. Nothing gives up by
itself: any service may start before the broker, and a broker with a full disk delays its answers until it has room.
Such a broker still answers liveness probes, so clients wait for a late answer and leave only a dead broker.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rolloutmq.bus.files import decode_json, read_regular
from rolloutmq.bus.log_throttle import WaitLog
from rolloutmq.bus.transport.endpoint import (
    LOOK_INTERVAL_S,
    Where,
    info_of,
    is_address,
    keys_for,
    read_endpoints,
)
from rolloutmq.bus.transport.keys.bundle import CurveKeys, keys_of
from rolloutmq.bus.transport.keys.handshakes import FIRST_S, LONGEST_S
from rolloutmq.bus.transport.request_client import BrokerClient, Frames
from rolloutmq.bus.transport.sockets import Context
from rolloutmq.schemas.errors import BrokerUnavailableError, KeyRefusedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.printable import printable, shell_word
from rolloutmq.schemas.wire.replies import InfoReply, Reply
from rolloutmq.schemas.wire.requests import GetInfo, Request

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
ATTEMPT_S: Final = 2.0
"""Silence of an address after which the run directory is read again."""
PROBE_S: Final = 1.0
"""Time within which a live broker answers a probe, whatever its disk does."""
SLOWEST_S: Final = 6.0
"""Longest pause before a request to a slow broker is repeated; shorter than its `silence_s`."""


class Search:
    """What one client lacks while it looks for the broker; a lasting search is logged as a warning."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.problem = f"the broker of {where} was not asked yet"
        """What is missing, and where it was looked for."""
        self._log = WaitLog()

    def begin(self) -> None:
        """Begin another search."""
        self._log = WaitLog()
        self._log.begin(time.monotonic())

    def lacks(self, kind: str, problem: str) -> None:
        """Note what is missing. Each `kind` of problem is logged once it has lasted, and then at intervals."""
        self.problem = problem
        if self._log.is_due(kind, now := time.monotonic()):
            waited_s = self._log.waited_s(now)
            logger.warning("waiting for the broker of %s waited_s=%.0f: %s", self.where, waited_s, problem)


async def serve_address(where: Where, search: Search | None = None) -> tuple[str, CurveKeys | None]:
    """Return the address of `serve`, and the keys that it asks for.

    Waits without a limit until the run directory has one. Cancellation is safe.

    Raises:
        UsageError: `where` is a file.
        MissingError: This user may not read the run directory; or the file of the key is missing.
        NotPrivateError, ConfigError, UnusablePathError: The file of the key cannot be used.
    """
    if is_address(where):
        return str(where), keys_for(where)
    search = search or Search(where)
    run_dir = Path(str(where))
    # Another process writes the file: there is no event to wait for.
    while (found := read_endpoints(run_dir)) is None:
        search.lacks(*_no_broker(RunLayout(run_dir)))
        await asyncio.sleep(LOOK_INTERVAL_S)
    return found.serve, keys_of(found)


def _no_broker(layout: RunLayout) -> tuple[str, str]:
    """Return the kind of problem, and the problem: the run has ended, or no broker has been there."""
    lives = _read(layout.lives, list[Life])
    if lives and lives[-1].ended is not None:
        reason = (_read(layout.summary, dict[str, Any]) or {}).get("ended")
        why = f": {printable(reason)}" if isinstance(reason, str) else ""
        return "ended", (
            f"the run in {layout.root} has ended{why}; continue it with "
            f"`rolloutmq up CONFIG --run-dir {shell_word(layout.root)} --resume`"
        )
    return "no address", (
        f"{layout.endpoints} does not exist; start a broker with "
        f"`rolloutmq broker --run-dir {shell_word(layout.root)}`, or correct the path"
    )


def _read(path: Path, kind: type[Found]) -> Found | None:
    """Read a file of the launcher; None if it is missing or damaged."""
    try:
        return decode_json(read_regular(path), kind)
    except (msgspec.DecodeError, OSError):
        return None


async def reach(
    where: Where, context: Context, search: Search | None = None
) -> tuple[BrokerClient, InfoReply]:
    """Connect to the broker and get its other addresses; wait without a limit. The caller closes the client.

    A wait of some seconds is logged as a warning. Cancelled: nothing stays open.
    """
    search = search or Search(where)
    search.begin()
    pause_s = FIRST_S
    while True:
        address, keys = await serve_address(where, search)
        client = BrokerClient(address, context, keys)
        silence = f"no answer from {client.address}; check that the broker's process is alive"
        search.problem = silence
        await client.__aenter__()
        try:
            reply = info_of(client.address, await client.request(GetInfo(), ATTEMPT_S))
        except KeyRefusedError as error:
            await client.close()
            search.lacks("refused", error.problem)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_S)
            continue
        except BrokerUnavailableError:
            await client.close()
        except BaseException:
            await client.close()
            raise
        else:
            if not (other := _other_run(where, reply)):
                return client, reply
            await client.close()
            search.lacks("another run", other)
            await asyncio.sleep(LOOK_INTERVAL_S)
            continue
        search.lacks("no answer", silence)


def _other_run(where: Where, reply: InfoReply) -> str:
    """Return why a broker is not that of a run directory: its address belongs to a fresh run by now; empty if it is."""
    if is_address(where):
        return ""
    found = read_endpoints(Path(str(where)))
    if found is None or found.run_id in {"", reply.run_id} or not reply.run_id:
        return ""
    return f"the run in {where} is gone; {found.serve} serves a fresh run of the name {reply.info.run}"


async def lives(client: BrokerClient, epoch: int, timeout_s: float) -> bool:
    """Return whether the broker answers in time and has this epoch."""
    try:
        reply = await client.request(GetInfo(), timeout_s, timeout_s / 2)
    except BrokerUnavailableError:
        return False
    return isinstance(reply, InfoReply) and reply.epoch == epoch


async def insist(
    client: BrokerClient,
    message: Request,
    epoch: int,
    patience_s: float,
    repeat_s: float,
    on_slow: Callable[[], None] = lambda: None,
) -> tuple[Reply, Frames]:
    """Repeat a request until there is an answer, as long as the broker of this epoch is alive.

    Args:
        client: Client of the broker.
        message: The request; it must be repeatable.
        epoch: Epoch of the broker.
        patience_s: Time before the first liveness probe; later probes follow in growing intervals.
        repeat_s: Pause before the request is sent again ahead of the first probe; later once in each interval.
        on_slow: Called after each successful probe.

    Raises:
        BrokerUnavailableError: The broker does not answer, or has restarted.
        SessionFencedError, LeaseLostError, RefusedError, ClosedError: As for `BrokerClient.request`.
    """
    waited_s = 0.0
    while True:
        try:
            return await client.request_frames(message, patience_s, repeat_s)
        except BrokerUnavailableError:
            if not await lives(client, epoch, PROBE_S):
                raise
        waited_s += patience_s
        on_slow()
        logger.warning("broker slow request=%s waited_s=%.0f", type(message).__name__, waited_s)
        patience_s = repeat_s = min(2 * patience_s, max(SLOWEST_S, patience_s))
