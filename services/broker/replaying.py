"""Serving a recorded run again: a broker whose every batch is on the rewind queue, and that takes nothing new.

Batches come in the order, composition and shards of the record, whatever size the pulls name; a trainer with another
number of ranks gets each batch cut anew. A batch that is lost with its trainer comes again, as often as that takes.
After the last one the answer to a pull is `end_of_replay`. When all is settled and every consumer has left, the broker
ends by itself. It keeps nothing on disk: started again, it begins at the beginning.
"""

from typing import Final

from rolloutmq.schemas import delivery
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.control import Reset
from rolloutmq.schemas.delivery import Durability, ErrorReply, RegisterConsumer, RegisterProducer, Release
from rolloutmq.schemas.errors import DamagedJournalError, ErrorCode
from rolloutmq.schemas.records import Endpoints
from rolloutmq.schemas.tasks import SubmitTasks
from rolloutmq.services.broker.actions import Action, Route
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.recording import Recording
from rolloutmq.services.broker.state import refuse

UNBOUNDED: Final = 1 << 53
"""More than any replay reaches: no group dies of its trainers, and no checkpoint is asked for to make room."""


def replay_config(config: RunConfig) -> RunConfig:
    """Return how a broker is configured that serves what a run with `config` recorded."""
    broker = config.broker.model_copy(
        update={
            "durability": Durability.MEMORY,
            "replay": False,
            "max_deliveries": UNBOUNDED,
            "retain_bytes": UNBOUNDED,
        }
    )
    orchestrator = config.orchestrator.model_copy(update={"enabled": False})
    return config.model_copy(update={"broker": broker, "orchestrator": orchestrator})


class ReplayCore(BrokerCore):
    """The core of such a broker.

    Raises:
        DamagedJournalError: The record contradicts itself.
    """

    def __init__(
        self,
        config: RunConfig,
        recording: Recording,
        *,
        epoch: int,
        endpoints: Endpoints | None = None,
        now: float,
        wall: float,
    ) -> None:
        super().__init__(config, epoch=epoch, endpoints=endpoints)
        self._groups = sorted({batch.stream[0] for batch in recording.batches})
        self._left: set[str] = set()
        problems = self.restore(recording.items(), recording, now, wall)
        if problems:
            raise DamagedJournalError(problems[0])
        self._state.former.closed = True

    def request(self, route: Route, request: delivery.Request, now: float, wall: float) -> list[Action]:
        """See `BrokerCore.request`."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._state.outbox.reply(route, refusal)
            return self._state.outbox.take()
        if isinstance(request, RegisterConsumer):
            self._left.discard(request.consumer)
        elif isinstance(request, Release):
            self._left.add(request.consumer)
        return super().request(route, request, now, wall)

    def _refusal(self, request: delivery.Request) -> ErrorReply | None:
        if isinstance(request, RegisterProducer | SubmitTasks | Reset):
            return refuse(ErrorCode.INVALID, "this broker replays a recorded run: it takes nothing new")
        if isinstance(request, RegisterConsumer) and request.group not in self._groups:
            known = ", ".join(self._groups)
            return refuse(ErrorCode.INVALID, f"nothing is recorded for {request.group}, only for {known}")
        return None

    def tick(self, now: float, wall: float) -> list[Action]:
        """See `BrokerCore.tick`; ends the broker when nothing is left and nobody is there."""
        actions = super().tick(now, wall)
        self.shutdown = self.shutdown or self._over(now)
        return actions

    def _over(self, now: float) -> bool:
        state = self._state
        if len(state.leases) or any(state.retained.all_returning()):
            return False
        moment = now - state.config.broker.silence_s
        names = (consumer.name for consumer in state.consumers)
        return all(name in self._left or state.consumers.silent_since(name, moment) for name in names)
