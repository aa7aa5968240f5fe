"""Arrival of a body: read with a limit in bytes, and with a deadline for its progress.

A client that stops in the middle of its body keeps what it has sent in the gateway's memory. So each further
`STEP_BYTES` have `gateway.silent_s`, or the request ends. Only the client's time counts: while the gateway waits for
room, the clock stands still.
"""

import asyncio
from typing import Final

from rolloutmq.services.gateway.web.http_io import Receive, Request, TooLargeError
from rolloutmq.services.gateway.web.in_hand import InHand

STEP_BYTES: Final = 64 << 10
"""Progress that renews the deadline."""


class SilentError(Exception):
    """The body of a request made no progress."""


class Progress:
    """Time that the client of one body has left. Pure.

    Args:
        limit_s: Time for each step.
    """

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s
        self._limit_s = limit_s
        self._step_bytes = 0

    def took(self, wait_s: float, nbytes: int, *, renews: bool = True) -> None:
        """Count the wait for some bytes; a whole step renews the time, if it may."""
        self.left_s -= wait_s
        self._step_bytes += nbytes
        if self._step_bytes >= STEP_BYTES and renews:
            self.left_s, self._step_bytes = self._limit_s, 0


async def body_of(
    request: Request, receive: Receive, in_hand: InHand, *, most: int, silent_s: float
) -> bytes:
    """Read a body. Waits while the client sends, and for room.

    Args:
        request: Its memory is counted while it grows.
        receive: The next part.
        in_hand: Memory of all requests.
        most: Limit in bytes.
        silent_s: Time for each step. A body ahead of others has this time for all of the rest.

    Raises:
        TooLargeError: The body exceeds its limit.
        SilentError: The client stopped sending.
    """
    if request.announced_bytes > most:
        raise TooLargeError(f"body larger than {most} bytes")
    parts: list[bytes] = []
    size, more = 0, True
    loop, progress = asyncio.get_running_loop(), Progress(silent_s)
    while more:
        if parts:  # the first part is in memory already
            await in_hand.room(request.held)
        began = loop.time()
        try:
            async with asyncio.timeout(max(0.0, progress.left_s)):
                message = await receive()
        except TimeoutError:
            raise SilentError(f"no {STEP_BYTES} bytes of the body in {silent_s:g} s") from None
        if message["type"] == "http.disconnect":
            request.gone.set()
            return b""
        part = message.get("body", b"")
        progress.took(loop.time() - began, len(part), renews=not request.held.ahead)
        parts.append(part)
        size += len(part)
        if size > most:
            raise TooLargeError(f"body larger than {most} bytes")
        in_hand.hold(request.held, size)
        more = message.get("more_body", False)
    in_hand.arrived(request.held)
    return parts[0] if len(parts) == 1 else b"".join(parts)
