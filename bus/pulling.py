"""How a consumer asks for a batch, and takes in what comes."""

import asyncio
import os
import time
from itertools import count
from typing import Final

from rolloutmq.bus.batch import Batch, StepSize
from rolloutmq.bus.downlink import Downlink
from rolloutmq.bus.reading import Decoded, Reader
from rolloutmq.schemas import delivery as wire
from rolloutmq.schemas.delivery import Pull, Wait
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.schemas.errors import EndOfReplayError, WireError

POLL_S: Final = 3.0
"""How long one pull waits at the broker before it is repeated: so soon is a broker that went missed."""
PAUSE_S: Final = 0.05
"""Least time between two pulls that got nothing."""


class Puller:
    """Pulls for one consumer.

    Attributes:
        wait: Why the last pull had to wait.
    """

    def __init__(self, link: Downlink, size: StepSize, split: Split) -> None:
        self.wait = Wait.NONE
        self._link = link
        self._size = size
        self._split = split
        self._reader = Reader()
        self._numbers = count(1)
        self._nonce = os.urandom(8).hex()

    async def pull(self, step: int, version: PolicyVersion, until: float) -> Batch | None:
        """Return the batch of a step; None if there was none in time.

        Args:
            step: The optimizer step that the batch is for.
            version: The policy that will learn from it.
            until: Monotonic time at which the broker is asked for the last time. It is asked at least once.

        Raises:
            RefusedError: The pull contradicts what other ranks asked.
            EndOfReplayError: The broker serves a recorded run, and this was all of it.
        """
        request_id = f"{self._nonce}-{next(self._numbers)}"
        self._link.progress += 1
        while True:
            began = time.monotonic()
            wait_s = min(POLL_S, max(0.0, until - began))
            pull = self._request(step, version, request_id, wait_s)
            reply, frames = await self._link.ask(pull, wait_s)
            if isinstance(reply, wire.Batch):
                self._link.progress += 1
                if (decoded := self._reader.read(reply, frames)) is None:
                    continue
                return self._batch(reply, decoded, version)
            if not isinstance(reply, wire.NoBatch):
                raise WireError(f"the broker answered {type(reply).__name__} to Pull")
            self.wait = reply.wait
            if reply.wait is Wait.END_OF_REPLAY:
                raise EndOfReplayError("the replay is at its end: every recorded batch was served")
            now = time.monotonic()
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
            request_id=request_id,
            wait_s=wait_s,
            split=self._split,
            arenas=self._reader.in_place,
        )

    def _batch(self, reply: wire.Batch, decoded: Decoded, version: PolicyVersion) -> Batch:
        return Batch(
            groups=tuple(decoded.groups),
            deliveries=tuple(decoded.deliveries),
            rejected=tuple(decoded.rejected),
            step=reply.step,
            version=version,
            lease=reply.lease,
            generation=reply.generation,
            life=self._link.life,
            short=reply.short,
            over=reply.over,
            rewound=reply.rewound,
        )

    def close(self) -> None:
        """Let go of the memory of others."""
        self._reader.close()
