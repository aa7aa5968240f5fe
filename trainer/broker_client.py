"""Broker client of the trainer: a consumer whose heartbeats run in a thread, and a publisher of step events.

Waits are interruptible: a signal handler that raises KeyboardInterrupt or a subclass ends a pull or a settlement in an
orderly way. Calls during shutdown have a time limit, because the broker may be gone.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from rolloutmq.bus.consumer.client import BlockingBatch, BlockingConsumer, Consumer
from rolloutmq.bus.transport.pubsub import RunPublisher
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import BrokerUnavailableError, LeaseLostError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import Message, PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected, RunInfo
from rolloutmq.schemas.wire.requests import TrainerPause

logger = logging.getLogger(__name__)

CONSUMER: Final = "trainer-{rank}"
LAST_WORD_S: Final = 2.0
"""Time limit of the last commit and settlement, in seconds. A lost commit is covered by the next; unsettled groups are
redelivered and recognized.
"""


class StepBatch(Protocol):
    """The part of a batch that the loop uses; see `bus.consumer.client.Batch`."""

    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def rejected(self) -> Sequence[Rejected]: ...
    @property
    def short(self) -> bool: ...
    @property
    def rewound(self) -> bool: ...
    @property
    def moments(self) -> Mapping[str, Moments]: ...
    @property
    def lease(self) -> int: ...
    @property
    def generation(self) -> int: ...


class BrokerClient(Protocol):
    """The calls of the loop to the broker. They block until there is an answer.

    BrokerUnavailableError means that there was no answer in time and that the call may be repeated.
    """

    def pull(self, step: int, version: PolicyVersion) -> StepBatch | None:
        """Pull the batch of a step; None if there was none within one pull."""

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
        """End the lease; return True if the broker wants a checkpoint soon. LeaseLostError if the lease is gone.

        `patience_s` bounds the wait for an answer. Repeating the call with the same outcome is harmless.
        """
        ...

    def commit(self, version: PolicyVersion) -> None:
        """Report that a checkpoint covers the version."""

    def progress(self) -> None:
        """Report progress, so that a long step keeps its lease. Does not block."""

    def waited(self, reason: TrainerPause, seconds: float) -> None:
        """Count seconds in which the trainer asked for no batch. Does not block."""

    def publish(self, topic: bytes, message: Message) -> None:
        """Publish an event, which may be lost. Does not block."""


class BusBrokerClient:
    """The client of a real broker. For the main thread."""

    def __init__(self, consumer: BlockingConsumer, events: RunPublisher, pull_wait_s: float) -> None:
        self._consumer = consumer
        self._events = events
        self._pull_wait_s = pull_wait_s

    def pull(self, step: int, version: PolicyVersion) -> BlockingBatch | None:
        """See `BrokerClient.pull`."""
        try:
            return self._consumer.pull(step, version, self._pull_wait_s)
        except LeaseLostError as error:
            # Another rank's settlement failed, so no rank counts the step as settled, and its groups are recognized.
            logger.warning("settled step lost with another rank step=%d error=%s", step, error)
            return None

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
        """See `BrokerClient.settle`."""
        with _unanswered():
            return self._consumer.settle(
                batch,
                version=version,
                trained=trained,
                filtered=filtered,
                rejected=rejected,
                timeout_s=patience_s,
            ).commit_wanted

    def commit(self, version: PolicyVersion) -> None:
        """Report that a checkpoint covers the version; BrokerUnavailableError after `LAST_WORD_S`."""
        with _unanswered():
            self._consumer.commit(version, timeout_s=LAST_WORD_S)

    def progress(self) -> None:
        """See `BrokerClient.progress`."""
        self._consumer.progress()

    def waited(self, reason: TrainerPause, seconds: float) -> None:
        """See `BrokerClient.waited`."""
        self._consumer.waited(reason, seconds)

    def publish(self, topic: bytes, message: Message) -> None:
        """See `BrokerClient.publish`."""
        self._events.publish(topic, message)


@contextmanager
def _unanswered() -> Iterator[None]:
    """Turn a time-out into the error that the loop handles."""
    try:
        yield
    except WaitTimeoutError as error:
        raise BrokerUnavailableError("serve", error.waited_s) from error


@contextmanager
def connect(
    run_dir: Path, info: RunInfo, resume: PolicyVersion, config: TrainerConfig, rank: int = 0
) -> Iterator[BusBrokerClient]:
    """Join the broker of a run as one rank of its trainer; waits for a broker without limit.

    Args:
        run_dir: Run directory.
        info: Description of the run.
        resume: Version of the trainer's policy; batches of later steps are delivered again.
        config: Batch size in sequences or tokens, time limit of a pull, number of ranks.
        rank: This rank.
    """
    joining = Consumer.blocking(
        run_dir,
        sequences=config.batch_sequences,
        tokens=config.batch_tokens,
        consumer=CONSUMER.format(rank=rank),
        rank=rank,
        world_size=config.ranks,
        info=info,
        resume=resume,
    )
    with joining as consumer, ExitStack() as stack:
        events = stack.enter_context(closing(RunPublisher(RunLayout(run_dir))))
        events.follow()  # or the event of the first step is lost
        yield BusBrokerClient(consumer, events, config.pull_wait_s)
