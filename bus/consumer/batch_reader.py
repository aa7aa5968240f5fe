"""The reader of batches whose groups are in shared memory or follow as frames.

It copies groups out of shared memory, so the trainer owns the arrays, and then checks the copy: a slot
reused after a lost lease fails the checksum. With `views` it checks the groups where they lie and copies nothing: they
are valid until the batch is settled or its lease is lost; then the producer writes other groups there. The memory
itself stays mapped as long as an array of it exists. An unreadable batch is requested again as frames. The same pull
gets the same batch, or another one if the lease was lost.
"""

import logging
from typing import Final

from rolloutmq.bus.consumer.batch import Copy, DecodedBatch, brought_near, decode_groups
from rolloutmq.bus.shm.arena import MappedArenas
from rolloutmq.bus.shm.buffer_pool import BufferPool
from rolloutmq.bus.transport.request_client import Frames
from rolloutmq.schemas.errors import ChecksumError, SegmentGoneError
from rolloutmq.schemas.wire import replies

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""Unreadable batches in a row after which all further ones are requested as frames."""


class BatchReader:
    """Reads the batches of one consumer; with `views` without copies."""

    def __init__(self, *, views: bool = False) -> None:
        self._arenas = MappedArenas()
        self._copy: Copy = brought_near if views else BufferPool().copy
        self._again = False
        self._failed = 0

    @property
    def in_place(self) -> bool:
        """Whether the next pull accepts groups in shared memory."""
        self._arenas.sweep()
        return not self._again and self._failed < ATTEMPTS

    def read(self, reply: replies.Batch, frames: Frames) -> DecodedBatch | None:
        """Decode a batch; None if its memory cannot be read, so the caller must repeat the pull."""
        try:
            arenas = self._arenas.open(reply.arenas)
            decoded = decode_groups(reply, frames, arenas, self._copy)
        except SegmentGoneError as error:
            self._failed += 1
            if self._failed in {1, ATTEMPTS}:
                logger.warning("shared memory of a batch unreadable, requesting frames error=%s", error)
            self._again = True
            return None
        except ChecksumError as error:
            logger.warning("shared memory of a batch reused, requesting frames error=%s", error)
            self._again = True
            return None
        self._again = False
        if reply.arenas:
            self._failed = 0
        for bad in decoded.rejected:
            logger.error("group undecodable group=%s reason=%s", bad.group_id, bad.reason)
        return decoded

    def close(self) -> None:
        """Unmap all shared memory."""
        self._arenas.close()
