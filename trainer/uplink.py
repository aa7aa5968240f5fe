"""The trainer's side of the broker: a consumer with its heartbeats in a thread, and a publisher of steps.

Waiting is interruptible: a signal handler that raises KeyboardInterrupt or a child of it ends a pull or a settlement in
order. What is said on the way out, to a broker that may be gone already, has a time limit.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from rolloutmq.bus.consumer import BlockingBatch, BlockingConsumer, Consumer
from rolloutmq.bus.endpoint import resolve_blocking
from rolloutmq.bus.events import Publisher
from rolloutmq.schemas.delivery import Rejected, RunInfo, Settled
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import BrokerUnavailableError
from rolloutmq.schemas.message import Message
from rolloutmq.schemas.training import TrainerConfig
from rolloutmq.schemas.trajectory import Group

T = TypeVar("T")

CONSUMER: Final = "trainer-{rank}"
LAST_WORD_S: Final = 2.0
"""A commit that nobody heard costs nothing: the next one covers it. Groups that were not settled come again, and are
known."""


class PulledBatch(Protocol):
    """What the loop needs of a batch; see `bus.consumer.Batch`."""

    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def rejected(self) -> Sequence[Rejected]: ...
    @property
    def short(self) -> bool: ...
    @property
    def rewound(self) -> bool: ...
    @property
    def lease(self) -> int: ...
    @property
    def generation(self) -> int: ...


class Uplink(Protocol):
    """What the loop says to the broker. Calls block until there is an answer.

    BrokerUnavailableError from any of them means that there was none in good time, and that the call may be repeated.
    """

    def pull(self, step: int, version: PolicyVersion) -> PulledBatch | None:
        """Ask for the batch of a step; None if there was none in the time of one pull."""

    def settle(
        self,
        batch: Any,
        *,
        version: PolicyVersion,
        trained: Sequence[str],
        filtered: Sequence[str],
        rejected: Sequence[Rejected],
        patience_s: float | None = None,
    ) -> bool:
        """End the lease; True if a checkpoint is wanted soon. LeaseLostError if there is no lease any more.

        `patience_s` bounds the wait for an answer. Doing it again with the same outcome is harmless.
        """

    def commit(self, version: PolicyVersion) -> None:
        """Say that a checkpoint covers the version."""

    def progress(self) -> None:
        """Show that the trainer advances, or a long step would lose its lease. Does not block."""

    def publish(self, topic: bytes, message: Message) -> None:
        """Publish an event, which may be lost. Does not block."""


class BrokerUplink:
    """The real one. For the main thread."""

    def __init__(self, consumer: "_TimedConsumer", events: Publisher, pull_wait_s: float) -> None:
        self._consumer = consumer
        self._events = events
        self._pull_wait_s = pull_wait_s

    def pull(self, step: int, version: PolicyVersion) -> BlockingBatch | None:
        """Ask for the batch of a step; None if there was none in the time of one pull."""
        return self._consumer.pull(step, version, self._pull_wait_s)

    def settle(
        self,
        batch: BlockingBatch,
        *,
        version: PolicyVersion,
        trained: Sequence[str],
        filtered: Sequence[str],
        rejected: Sequence[Rejected],
        patience_s: float | None = None,
    ) -> bool:
        """End the lease; True if a checkpoint is wanted soon."""
        outcome = {"version": version, "trained": trained, "filtered": filtered, "rejected": rejected}
        return self._consumer.settle_within(patience_s, batch, **outcome).commit_wanted

    def commit(self, version: PolicyVersion) -> None:
        """Say that a checkpoint covers the version; BrokerUnavailableError if nobody hears it in good time."""
        self._consumer.commit_within(LAST_WORD_S, version)

    def progress(self) -> None:
        """Show that the trainer advances."""
        self._consumer.progress()

    def publish(self, topic: bytes, message: Message) -> None:
        """Publish an event, which may be lost. Does not block."""
        self._events.publish(topic, message)


class _TimedConsumer(BlockingConsumer):
    """A blocking consumer whose words can fail."""

    def settle_within(self, patience_s: float | None, batch: BlockingBatch, **outcome: Any) -> Settled:
        return self._within(patience_s, self._object.settle(batch, **outcome))

    def commit_within(self, patience_s: float, version: PolicyVersion) -> None:
        self._within(patience_s, self._object.commit(version))

    def _within(self, patience_s: float | None, word: Coroutine[Any, Any, T]) -> T:
        try:
            return self._run(asyncio.wait_for(word, patience_s))
        except TimeoutError:
            raise BrokerUnavailableError("serve", patience_s or 0.0) from None


@contextmanager
def connect(
    run_dir: Path, info: RunInfo, resume: PolicyVersion, config: TrainerConfig, rank: int = 0
) -> Iterator[BrokerUplink]:
    """Join the broker of a run as its trainer, or one rank of it; waits for a broker as long as it takes.

    Args:
        run_dir: Run directory.
        info: What the run is.
        resume: The policy that the trainer has; batches of later steps come again.
        config: How large a step is, in sequences or in tokens, how long one pull waits, and how many ranks there are.
        rank: Which of them this is.
    """
    opening = partial(
        Consumer.open,
        run_dir,
        sequences=config.batch_sequences,
        tokens=config.batch_tokens,
        consumer=CONSUMER.format(rank=rank),
        rank=rank,
        world_size=config.ranks,
        info=info,
        resume=resume,
    )
    with (
        _TimedConsumer(opening, "rolloutmq consumer") as consumer,
        Publisher(resolve_blocking(run_dir).publish) as events,
    ):
        yield BrokerUplink(consumer, events, config.pull_wait_s)
