"""Taking in batches whose groups lie in memory of this host, or follow as frames.

What lies in memory is copied out, so that the arrays are the trainer's own for ever, and is checked then: a slot that
was used again meanwhile, because the lease was lost, does not have the checksum of its group. Whatever cannot be read
is asked for once more, as frames: the same pull gets the same batch, or, if the lease is lost, another one.
"""

import logging
from typing import Final, NamedTuple

from rolloutmq.bus.arena import Arenas
from rolloutmq.bus.batch import decode_groups
from rolloutmq.bus.buffers import Buffers
from rolloutmq.bus.client import Frames
from rolloutmq.schemas import delivery as wire
from rolloutmq.schemas.delivery import Delivery, Rejected
from rolloutmq.schemas.errors import ChecksumError
from rolloutmq.schemas.sharing import SegmentGoneError
from rolloutmq.schemas.trajectory import Group

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""After so many batches in turn whose memory could not be read all others are asked for as frames."""


class Decoded(NamedTuple):
    """What a batch consists of."""

    groups: list[Group]
    deliveries: list[Delivery]
    rejected: list[Rejected]


class Reader:
    """Takes in the batches of one consumer."""

    def __init__(self) -> None:
        self._arenas = Arenas()
        self._buffers = Buffers()
        self._again = False
        self._failed = 0

    @property
    def in_place(self) -> bool:
        """Whether the next pull may be told where its groups lie."""
        self._arenas.sweep()
        return not self._again and self._failed < ATTEMPTS

    def read(self, reply: wire.Batch, frames: Frames) -> Decoded | None:
        """Decode a batch; None if its memory cannot be read, and the same pull is to be made again."""
        try:
            arenas = self._arenas.open(reply.arenas)
            decoded = Decoded(*decode_groups(reply, frames, arenas, self._buffers.copy))
        except SegmentGoneError as error:
            self._failed += 1
            if self._failed in {1, ATTEMPTS}:
                logger.warning("memory of a batch cannot be read, asking for frames error=%s", error)
            self._again = True
            return None
        except ChecksumError as error:
            logger.warning("memory of a batch was used again, asking for frames error=%s", error)
            self._again = True
            return None
        self._again = False
        if reply.arenas:
            self._failed = 0
        for bad in decoded.rejected:
            logger.error("group does not decode group=%s reason=%s", bad.group_id, bad.reason)
        return decoded

    def close(self) -> None:
        """Let go of all memory."""
        self._arenas.close()
