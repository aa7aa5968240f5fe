"""The puller: asks the broker for batches until one comes, and decodes it."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from itertools import count
from typing import Final, Generic, TypeVar

from rolloutmq.bus.consumer.batch import Batch, DecodedBatch, StepSize
from rolloutmq.bus.consumer.batch_reader import BatchReader
from rolloutmq.bus.consumer.connection import ConsumerConnection
from rolloutmq.bus.log_throttle import WaitLog
from rolloutmq.schemas.errors import EndOfReplayError, WireError
from rolloutmq.schemas.wire import replies
from rolloutmq.schemas.wire import requests as wire
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import Pull

logger = logging.getLogger(__name__)

POLL_S: Final = 3.0
"""Wait of one pull at the broker before its repetition; within it a dead broker is noticed."""

PAUSE_S: Final = 0.05
"""Least time between two pulls without a batch."""


def wrong_reply(reply: replies.Reply, request: wire.Request) -> WireError:
    """Return the error of a reply that does not belong to the request."""
    return WireError(f"broker: wrong type of reply to {type(request).__name__} (got {type(reply).__name__})")


B = TypeVar("B", bound=Batch)


class BatchPuller(Generic[B]):
    """Pulls batches for one consumer.

    Attributes:
        wait: Reason of the last pull's waiting.

    Args:
        link: Connection of the consumer.
        size: Size of a step, or of a lease of the window.
        split: Split of the groups.
        make: Makes a batch of its attributes, in their order.
        window: Of a consumer that pulls groups as they come, see `Pull.window`; 0 for steps.
        views: Groups in shared memory are not copied.
    """

    def __init__(
        self,
        link: ConsumerConnection,
        size: StepSize,
        split: Split,
        make: Callable[..., B],
        window: int = 0,
        *,
        views: bool = False,
    ) -> None:
        self.wait = Wait.NONE
        self._make = make
        self._window = window
        self._unanswered = ""
        """Request of a cancelled pull of a window: its lease is found by this id alone."""
        self._link = link
        self._size = size
        self._split = split
        self._reader = BatchReader(views=views)
        self._numbers = count(1)
        self._nonce = os.urandom(8).hex()
        self._wait_log = WaitLog()

    async def pull(self, step: int, version: PolicyVersion, until: float) -> B | None:
        """Return the batch of a step; None if there was none in time.

        Args:
            step: Optimizer step of the batch.
            version: Learning policy.
            until: Monotonic time of the last request. The broker is asked at least once.

        Raises:
            RefusedError: The pull contradicts that of another rank.
            EndOfReplayError: Every batch of the replayed run was delivered.
        """
        request_id = self._unanswered or f"{self._nonce}-{next(self._numbers)}"
        self._unanswered = request_id if self._window else ""
        self._link.progress += 1
        while True:
            began = time.monotonic()
            self._wait_log.begin(began)
            wait_s = min(POLL_S, max(0.0, until - began))
            pull = self._request(step, version, request_id, wait_s)
            reply, frames = await self._link.ask(pull, wait_s)
            if isinstance(reply, replies.Batch):
                self._link.progress += 1
                self._wait_log.over()
                if (decoded := self._reader.read(reply, frames)) is None:
                    continue
                self._unanswered = ""
                return self._batch(reply, decoded, version)
            if not isinstance(reply, replies.NoBatch):
                raise wrong_reply(reply, pull)
            self.wait = reply.wait
            if reply.wait is Wait.END_OF_REPLAY:
                raise EndOfReplayError("replay: every recorded batch was delivered; no further batch follows")
            now = time.monotonic()
            if self._wait_log.is_due(reply.wait.value, now):
                logger.warning(
                    "waiting for a batch consumer=%s step=%d reason=%s queued_sequences=%d of=%s "
                    "expired_groups=%d waited_s=%.0f",
                    pull.consumer, step, reply.wait.value, reply.queued_sequences,
                    self._size.text, reply.expired_groups, self._wait_log.waited_s(now),
                )  # fmt: skip
            if now >= until:
                return None
            await asyncio.sleep(max(0.0, PAUSE_S - (now - began)))

    def _request(self, step: int, version: PolicyVersion, request_id: str, wait_s: float) -> Pull:
        about = self._link.register
        return Pull(
            consumer=about.consumer,
            group=about.group,
            run=about.info.run,
            rank=about.rank,
            world_size=about.world_size,
            step=step,
            version=version,
            sequences=self._size.sequences,
            tokens=self._size.tokens,
            groups=self._size.groups,
            window=self._window,
            request_id=request_id,
            wait_s=wait_s,
            split=self._split,
            arenas=self._reader.in_place,
        )

    def _batch(self, reply: replies.Batch, decoded: DecodedBatch, version: PolicyVersion) -> B:
        return self._make(
            tuple(decoded.groups),
            tuple(decoded.deliveries),
            tuple(decoded.rejected),
            reply.step,
            version,
            reply.lease,
            reply.generation,
            self._link.life,
            reply.short,
            reply.over,
            reply.rewound,
            reply.moments,
        )

    def close(self) -> None:
        """Unmap the arenas."""
        self._reader.close()
