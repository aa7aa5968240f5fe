"""Reaching a broker that may not be there yet, or not any more where it was, or that takes its time.

A run directory is read again for each attempt, because a broker that comes back may be bound elsewhere. Nothing here
gives up by itself: any service may be started before the broker, and a broker whose disk is full holds answers back
until there is room. It still says that it lives; so a late answer is waited for, while a broker that went is left.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rolloutmq.bus.client import BrokerClient, Frames
from rolloutmq.bus.endpoint import LOOK_INTERVAL_S, Where, is_address, read_endpoints
from rolloutmq.bus.sockets import Context
from rolloutmq.schemas.delivery import GetInfo, InfoReply, Reply, Request
from rolloutmq.schemas.errors import BrokerUnavailableError, MalformedError

logger = logging.getLogger(__name__)

ATTEMPT_S: Final = 2.0
"""How long one address may be silent before the run directory is read again."""
PROBE_S: Final = 1.0
"""A broker that lives answers the smallest question within that, whatever its disk does."""
SLOWEST_S: Final = 6.0
"""Longest pause before the same question is put to a slow broker again; within its `silence_s`, so that it hears it."""


async def serve_address(where: Where) -> str:
    """Return the address of `serve`; waits until the run directory names one. Cancellation is safe."""
    if is_address(where):
        return str(where)
    # The file is another process's: there is no event to wait for.
    while (found := read_endpoints(Path(where))) is None:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_INTERVAL_S)
    return found.serve


async def reach(where: Where, context: Context) -> tuple[BrokerClient, InfoReply]:
    """Connect to the broker and learn its other addresses; waits as long as it takes. The caller closes the client.

    Cancelled: nothing stays open.
    """
    waited_s = 0.0
    while True:
        client = BrokerClient(await serve_address(where), context)
        await client.__aenter__()
        try:
            reply = await client.request(GetInfo(), ATTEMPT_S)
            if not isinstance(reply, InfoReply):
                raise MalformedError(f"{client.address} answered GetInfo with {type(reply).__name__}")
        except BrokerUnavailableError:
            await client.close()
        except BaseException:
            await client.close()
            raise
        else:
            return client, reply
        if not waited_s:
            logger.info("waiting for the broker where=%s address=%s", where, client.address)
        waited_s += ATTEMPT_S


async def lives(client: BrokerClient, epoch: int, timeout_s: float) -> bool:
    """Return whether the broker answers in time that it is in this life."""
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
    """Ask until there is an answer, for as long as the broker lives on in this life.

    Args:
        client: Where to ask.
        message: The request.
        epoch: The broker's life.
        patience_s: When to look, for the first time, whether the broker lives; later in growing intervals.
        repeat_s: Pause after which the request is sent again before that look; after it, once in each interval.
        on_slow: Called after each look that found the broker alive.

    Raises:
        BrokerUnavailableError: The broker went, or is in another life.
        SessionFencedError, LeaseLostError, RefusedError, ClosedError: As `BrokerClient.request`.
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
        logger.warning("the broker takes long request=%s waited_s=%.0f", type(message).__name__, waited_s)
        patience_s = repeat_s = min(2 * patience_s, max(SLOWEST_S, patience_s))
