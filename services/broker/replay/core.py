"""The replay core: a broker with every batch of a recording on its rewind queue. It accepts no groups.

Batches keep the order, composition, shards and moments of the recording, whatever size the pulls name; for another
number of ranks each batch is sharded anew. A lost batch is redelivered as often as it takes. After the last one, pulls
get `end_of_replay`. When all batches are settled and every consumer has left, the broker ends. It keeps nothing on
disk: a restart begins at the first batch.
"""

from typing import Final

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import DamagedJournalError
from rolloutmq.schemas.files import Endpoints
from rolloutmq.schemas.wire import requests
from rolloutmq.schemas.wire.control import Reset
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import Durability, ErrorReply
from rolloutmq.schemas.wire.requests import RegisterConsumer, RegisterProducer, Release
from rolloutmq.schemas.wire.tasks import SubmitTasks
from rolloutmq.services.broker.actions import Action, Route
from rolloutmq.services.broker.broker_state import refuse
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.replay.recording import Recording

UNBOUNDED: Final = 1 << 53
"""More than any replay reaches: no group dies of failed deliveries, and no commit is requested to free memory."""


def replay_config(config: RunConfig) -> RunConfig:
    """Return the configuration of a replaying broker for a run recorded with `config`."""
    broker = config.broker.model_copy(
        update={
            "durability": Durability.MEMORY,
            "replay": False,
            "max_deliveries": UNBOUNDED,
            "retain_bytes": UNBOUNDED,
        }
    )
    orchestrator = config.orchestrator.model_copy(update={"enabled": False})
    evaluation = config.evaluation.model_copy(update={"enabled": False})  # no worker would answer
    update = {"broker": broker, "orchestrator": orchestrator, "evaluation": evaluation}
    return config.model_copy(update=update)


class ReplayCore(BrokerCore):
    """The core of a replaying broker.

    Raises:
        DamagedJournalError: The recording contradicts itself.
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
        self._state.builder.closed = True

    def request(self, route: Route, request: requests.Request, now: float, wall: float) -> list[Action]:
        refusal = self._refusal(request)
        if refusal is not None:
            self._state.outbox.reply(route, refusal)
            return self._state.outbox.take()
        if isinstance(request, RegisterConsumer):
            self._left.discard(request.consumer)
        elif isinstance(request, Release):
            self._left.add(request.consumer)
        return super().request(route, request, now, wall)

    def _refusal(self, request: requests.Request) -> ErrorReply | None:
        if isinstance(request, RegisterProducer | SubmitTasks | Reset):
            return refuse(ErrorCode.INVALID, "this broker replays a recorded run and takes nothing new")
        if isinstance(request, RegisterConsumer) and request.group not in self._groups:
            known = ", ".join(self._groups)
            return refuse(
                ErrorCode.INVALID, f"group: the recording has no batch of {request.group}; it has {known}"
            )
        return None

    def tick(self, now: float, wall: float) -> list[Action]:
        """Tick; ends the broker when no batch is left and every consumer has left."""
        actions = super().tick(now, wall)
        self.shutdown = self.shutdown or self._over(now)
        return actions

    def _over(self, now: float) -> bool:
        state = self._state
        if len(state.leases) or any(state.rewind_buffer.all_queued()):
            return False
        moment = now - state.config.broker.silence_s
        names = (consumer.name for consumer in state.consumers)
        return all(name in self._left or state.consumers.silent_since(name, moment) for name in names)
