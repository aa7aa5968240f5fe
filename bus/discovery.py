"""Reaching a broker that may not be there yet, or not any more where it was.

A run directory is read again for each attempt, because a broker that comes back may be bound elsewhere. Nothing here
gives up by itself: any service may be started before the broker.
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

from rolloutmq.bus.client import BrokerClient
from rolloutmq.bus.endpoint import LOOK_INTERVAL_S, Where, is_address, read_endpoints
from rolloutmq.bus.sockets import Context
from rolloutmq.schemas.delivery import GetInfo, InfoReply
from rolloutmq.schemas.errors import BrokerUnavailableError, MalformedError

logger = logging.getLogger(__name__)

ATTEMPT_S: Final = 2.0
"""How long one address may be silent before the run directory is read again."""


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
