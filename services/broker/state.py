"""All that one broker holds: the parts of the core, made once and shared by those that serve requests."""

from collections import Counter, defaultdict
from weakref import WeakValueDictionary

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.delivery import ErrorReply, Wait
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.schemas.records import Endpoints
from rolloutmq.services.broker.acks import Acks
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.admission import Admission
from rolloutmq.services.broker.consumers import Consumers
from rolloutmq.services.broker.forming import Former
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.lanes import Lanes
from rolloutmq.services.broker.leases import Leases
from rolloutmq.services.broker.ledger import Ledger
from rolloutmq.services.broker.pacing import Pacing
from rolloutmq.services.broker.rates import Rate
from rolloutmq.services.broker.retained import Retained
from rolloutmq.services.broker.runs import Run
from rolloutmq.services.broker.sessions import Sessions
from rolloutmq.services.broker.settlement import Settlement
from rolloutmq.services.broker.workers import Workers


class State:
    """The parts, and the few numbers that belong to none of them."""

    def __init__(self, config: RunConfig, epoch: int, endpoints: Endpoints | None) -> None:
        broker = config.broker
        self.config = config
        self.epoch = epoch
        self.endpoints = endpoints
        self.outbox = Outbox()
        self.ledger = Ledger()
        self.run = Run(config)
        self.lanes = Lanes(config.environment)
        self.sessions = Sessions(epoch)
        self.admission = Admission(broker, self.lanes, self.sessions)
        self.pacing = Pacing(self.lanes, self.admission, broker.silent_env_s, self.run.batch_sequences)
        self.former = Former(broker, self.lanes, self.ledger, self.outbox)
        self.leases = Leases()
        self.retained = Retained()
        self.settlement = Settlement(
            self.lanes,
            self.former,
            self.leases,
            self.retained,
            self.ledger,
            self.outbox,
            max_deliveries=broker.max_deliveries,
            retain_bytes=broker.retain_bytes,
        )
        self.consumers = Consumers()
        self.workers = Workers()
        self.acks = Acks(broker, epoch, self.sessions, lambda: self.run.step)
        self.produced = Rate()
        """Sequences that were accepted."""
        self.waits_s: defaultdict[str, float] = defaultdict(float)
        self.rejected: Counter[str] = Counter()
        self.newest: dict[str, StoredGroup] = {}
        """Newest group of each environment, in any state."""
        self.known: WeakValueDictionary[str, StoredGroup] = WeakValueDictionary()
        """Groups that still exist, by id: a group that is sent again under another session is known by it."""
        self.wanted: dict[str, int | None] = {}
        self.repace = False
        """Credit may have come free: rollouts are granted again at the end of the round."""

    def waited(self, wait: Wait, seconds: float) -> None:
        """Count seconds that somebody waited."""
        if wait is not Wait.NONE and seconds > 0:
            self.waits_s[wait.value] += seconds


def refuse(code: ErrorCode, detail: str) -> ErrorReply:
    """Make an error reply."""
    return ErrorReply(code=code, detail=detail)
