"""All that one broker holds: the parts of the core, made once and shared by those that serve requests."""

from collections import Counter, defaultdict
from weakref import WeakValueDictionary

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.control import JournalStatus
from rolloutmq.schemas.delivery import Durability, ErrorReply, Wait
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.schemas.records import Endpoints
from rolloutmq.services.broker.acks import Acks
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.admission import Admission
from rolloutmq.services.broker.consumers import Consumers
from rolloutmq.services.broker.dropping import Dropping
from rolloutmq.services.broker.forming import Former
from rolloutmq.services.broker.groups import Groups, StoredGroup
from rolloutmq.services.broker.journal.body import Frames, Ram
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.leases import Leases
from rolloutmq.services.broker.ledger import Ledger
from rolloutmq.services.broker.log import Log
from rolloutmq.services.broker.pacing import Pacing
from rolloutmq.services.broker.rates import Rate
from rolloutmq.services.broker.retained import Retained
from rolloutmq.services.broker.runs import Run
from rolloutmq.services.broker.sessions import Sessions
from rolloutmq.services.broker.settlement import Settlement
from rolloutmq.services.broker.workers import Workers


class State:
    """The parts, and the few numbers that belong to none of them."""

    def __init__(self, config: RunConfig, epoch: int, endpoints: Endpoints | None, ram: Ram | None) -> None:
        broker = config.broker
        self.ram = ram
        self.log = Log(recording=broker.durability is not Durability.MEMORY)
        self.groups = Groups()
        self.config = config
        self.epoch = epoch
        self.endpoints = endpoints
        self.outbox = Outbox()
        self.ledger = Ledger()
        self.run = Run(config)
        self.lanes = Lanes(config.environment, self.groups, max(1, broker.max_deliveries - 1))
        self.sessions = Sessions(epoch)
        self.admission = Admission(broker, self.lanes, self.sessions)
        self.pacing = Pacing(self.lanes, self.admission, broker.silent_env_s, self.run.batch_sequences)
        self.retained = Retained()
        self.dropping = Dropping(self.lanes, self.retained, self.ledger, self.groups, self.outbox, self.log)
        self.former = Former(broker, self.lanes, self.ledger, self.dropping, self.run.lineage)
        self.leases = Leases()
        self.settlement = Settlement(
            self.lanes,
            self.former,
            self.leases,
            self.retained,
            self.ledger,
            self.groups,
            self.dropping,
            self.log,
            max_deliveries=broker.max_deliveries,
            retain_bytes=broker.retain_bytes,
        )
        self.consumers = Consumers()
        self.workers = Workers()
        self.acks = Acks(broker, epoch, self.sessions, lambda: self.run.policy)
        self.produced = Rate()
        """Sequences that were accepted."""
        self.waits_s: defaultdict[str, float] = defaultdict(float)
        self.rejected: Counter[str] = Counter()
        self.newest: dict[str, tuple[StoredGroup, Frames]] = {}
        """Newest group of each environment, in any state."""
        self.known: WeakValueDictionary[str, StoredGroup] = WeakValueDictionary()
        """Groups that still exist, by id: a group that is sent again under another session is known by it."""
        self.wanted: dict[str, int | None] = {}
        self.journal = JournalStatus()
        """How the journal does, as the shell last said."""
        self.requeued: set[int] = set()
        """Former orders of dead groups that an earlier life queued again."""
        self.repace = False
        """Credit may have come free: rollouts are granted again at the end of the round."""

    def admit(self, group: StoredGroup, lane: Lane, now: float) -> None:
        """Count a new group in and queue it."""
        self.lanes.accept(lane, group, now)
        self.ledger.accept()
        self.known[group.header.group_id] = group

    def waited(self, wait: Wait, seconds: float) -> None:
        """Count seconds that somebody waited."""
        if wait is not Wait.NONE and seconds > 0:
            self.waits_s[wait.value] += seconds


def refuse(code: ErrorCode, detail: str) -> ErrorReply:
    """Make an error reply."""
    return ErrorReply(code=code, detail=detail)
