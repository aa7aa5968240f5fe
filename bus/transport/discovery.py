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
from rolloutmq.bus.transport.request_client import BrokerClient, Frames, unavailable
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
ATTEMPTS_BY_TCP: Final = 6
"""Attempts in vain on an established connection by TCP before it is replaced: the next one costs a handshake."""
ASKED_S: Final = 60.0
"""Time after which a search asks anew on the same connection; until then any answer counts, however late."""
PROBE_S: Final = 1.0
"""Time within which a live broker answers a probe, whatever its disk does."""
PROBE_PART: Final = 1 / 3
"""The same, as a part of the patience with a broker that has been slower."""
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
    where: Where, context: Context, search: Search | None = None, client: BrokerClient | None = None
) -> tuple[BrokerClient, InfoReply]:
    """Connect to the broker and get its other addresses; wait without a limit. The caller closes the client.

    A wait of some seconds is logged as a warning. Cancelled: nothing stays open.

    Args:
        where: Run directory, or address.
        context: Context of the client's socket.
        search: Told what is missing.
        client: A client with a lost connection, which may come back by itself; it is returned or closed.
    """
    search = search or Search(where)
    search.begin()
    way = _Way(context, client)
    try:
        while True:
            reply = await _answered(way, where, search)
            if reply is not None:
                return way.take(), reply
    finally:
        await way.leave()


async def _answered(way: "_Way", where: Where, search: Search) -> InfoReply | None:
    """Ask the broker once for its addresses; None if it is not reached yet."""
    client = await way.client_of(*await serve_address(where, search))
    silence = f"no answer from {client.address}; check that the broker's process is alive"
    search.problem = silence
    asked_at = time.monotonic()
    try:
        reply = info_of(client.address, await way.answer(client))
    except KeyRefusedError as error:
        search.lacks("refused", error.problem)
        await way.pause()
        return None
    except BrokerUnavailableError:
        await way.silent(time.monotonic() - asked_at)
        search.lacks("no answer", silence)
        return None
    if not (other := _other_run(where, reply)):
        return reply
    await way.leave()
    search.lacks("another run", other)
    await asyncio.sleep(LOOK_INTERVAL_S)
    return None


class _Way:
    """The client of one search: it is replaced when it is of no use, and not before.

    A new connection costs the broker a handshake. Of a fleet that comes back at once each client waits for its own; if
    clients gave up theirs after a time, the broker would make handshakes for nobody, for ever. So a handshake that
    lasts is left alone, and the silence after which an established connection is replaced doubles. One request waits
    through all attempts: a broker with more work than it can do may need longer than one of them.
    """

    def __init__(self, context: Context, client: BrokerClient | None) -> None:
        self._context = context
        self._client = client
        self._silent_s = 0.0
        self._patience_s = 0.0
        self._pause_s = FIRST_S
        self._asked: asyncio.Task[Reply] | None = None

    async def client_of(self, address: str, keys: CurveKeys | None) -> BrokerClient:
        """Return the open client of this address."""
        if self._client is not None and (self._client.address, self._client.keys) != (address, keys):
            await self.leave()
        if self._client is None:
            self._client = BrokerClient(address, self._context, keys)
            await self._client.__aenter__()
        return self._client

    async def answer(self, client: BrokerClient) -> Reply:
        """Return the answer of the client's broker, asked for now or by an earlier attempt.

        Raises:
            BrokerUnavailableError: There is none within this attempt; the request goes on.
            KeyRefusedError: The broker refuses the key, and the request goes on; or as for `BrokerClient.request`.
        """
        if self._asked is None:
            self._asked = asyncio.create_task(client.request(GetInfo(), ASKED_S, ATTEMPT_S), name="search")
        done, _ = await asyncio.wait({self._asked}, timeout=ATTEMPT_S)
        if not done:
            raise unavailable(client.address, ATTEMPT_S, client.problem)
        asked, self._asked = self._asked, None
        return asked.result()

    async def silent(self, seconds: float) -> None:
        """Note that the broker has not answered an attempt; the time beyond the attempt is this loop's own delay."""
        if self._client is None:
            return
        by_tcp = self._client.address.startswith("tcp://")
        if by_tcp and not self._client.is_connected:
            self._silent_s = 0.0
            return
        least_s = ATTEMPTS_BY_TCP * ATTEMPT_S if by_tcp else ATTEMPT_S
        self._silent_s += min(seconds, ATTEMPT_S)
        if self._silent_s >= max(least_s, self._patience_s):
            self._patience_s = min(2 * self._silent_s, LONGEST_S)
            await self.leave()

    async def pause(self) -> None:
        """Wait before a refused key tries again, ever longer."""
        await self.leave()
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, LONGEST_S)

    async def leave(self) -> None:
        """Close the client, if there is one."""
        client, self._client, self._silent_s = self._client, None, 0.0
        asked, self._asked = self._asked, None
        try:
            if asked is not None:
                asked.cancel()
                await asyncio.wait({asked})
                _ = asked.cancelled() or asked.exception()  # which nobody wants any more
        finally:
            if client is not None:
                await client.close()

    def take(self) -> BrokerClient:
        """Return the client, which the caller closes from now on."""
        client, self._client = self._client, None
        assert client is not None
        return client


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
        client: Client of the broker. If it had to wait before, the broker gets as long as `client.patience_s`.
        message: The request; it must be repeatable.
        epoch: Epoch of the broker.
        patience_s: Least time before the first liveness probe; later probes follow in growing intervals.
        repeat_s: First pause before the request is sent again ahead of the first probe; later once in each interval.
        on_slow: Called after each successful probe.

    Raises:
        BrokerUnavailableError: The broker does not answer, or has restarted.
        SessionFencedError, LeaseLostError, RefusedError, ClosedError: As for `BrokerClient.request`.
    """
    waited_s, least_s = 0.0, repeat_s
    patience_s = max(patience_s, client.patience_s)
    while True:
        try:
            return await client.request_frames(message, patience_s, repeat_s)
        except BrokerUnavailableError:
            if not await lives(client, epoch, max(PROBE_S, PROBE_PART * patience_s)):
                raise
        waited_s += patience_s
        on_slow()
        logger.warning("broker slow request=%s waited_s=%.0f", type(message).__name__, waited_s)
        patience_s = min(2 * patience_s, max(SLOWEST_S, patience_s))
        repeat_s = max(least_s, min(patience_s, SLOWEST_S))
