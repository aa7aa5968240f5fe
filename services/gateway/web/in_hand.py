"""Memory of unanswered requests: bodies that arrive, and groups on their way to the broker. Pure but for its futures.

A body counts for the bytes that came, never for those it announces. At the limit the next bytes of every body wait. If
it is unfinished bodies that fill the memory, none of them could ever be answered; then the first that waits goes on
beyond the limit, to its end, and the others after it.
"""

import asyncio
from collections import deque
from typing import Final

CHUNK_BYTES: Final = 64 << 10
"""About what one read of a connection brings."""


class Held:
    """Counted memory of one request.

    Attributes:
        nbytes: Its size now.
        arrived: Whether its body is complete.
        ahead: Whether it may go on beyond the limit.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.arrived = False
        self.ahead = False


class InHand:
    """Memory of all unanswered requests of one loop, approximate.

    Args:
        most: Limit in bytes.
    """

    def __init__(self, most: int) -> None:
        self.nbytes = 0
        self._arrived_bytes = 0
        self._most = most
        self._ahead: Held | None = None
        self._waiting: deque[tuple[Held, asyncio.Future[None]]] = deque()

    async def room(self, held: Held) -> None:
        """Wait until this body may take more bytes."""
        while self.nbytes >= self._most and not held.ahead:
            entry = held, asyncio.get_running_loop().create_future()
            self._waiting.append(entry)
            self._advance()
            try:
                await entry[1]
            finally:
                if entry in self._waiting:
                    self._waiting.remove(entry)

    def hold(self, held: Held, nbytes: int) -> None:
        """Count a request with this many bytes."""
        self._arrived_bytes += (nbytes - held.nbytes) * held.arrived
        self.nbytes += nbytes - held.nbytes
        held.nbytes = nbytes
        self._advance()

    def arrived(self, held: Held) -> None:
        """Record that the body of a request is complete."""
        if not held.arrived:
            held.arrived = True
            self._arrived_bytes += held.nbytes
            self._end_ahead(held)

    def release(self, held: Held) -> None:
        """Forget a request."""
        self._end_ahead(held)
        self.hold(held, 0)

    def _end_ahead(self, held: Held) -> None:
        if held.ahead:
            held.ahead, self._ahead = False, None
            self._advance()

    def _advance(self) -> None:
        """Let the first of the waiting go on, as many as there is room for, or one that goes ahead."""
        room = self._most - self.nbytes
        while self._waiting and room > 0:
            self._let_go()
            room -= CHUNK_BYTES
        # Complete requests end by themselves, so bodies wait for them as long as they are the larger part.
        if self._waiting and self._ahead is None and 2 * self._arrived_bytes < self._most:
            self._ahead = self._waiting[0][0]
            self._ahead.ahead = True
            self._let_go()

    def _let_go(self) -> None:
        _, future = self._waiting.popleft()
        if not future.done():
            future.set_result(None)
