"""All that one broker holds: the parts of the core, made once and shared by those that serve requests."""

from collections import Counter, defaultdict
from weakref import WeakValueDictionary

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.control import JournalStatus, Setting
from rolloutmq.schemas.delivery import Durability, ErrorReply, Wait
from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.schemas.knobs import split
from rolloutmq.schemas.records import Endpoints
from rolloutmq.services.broker.acks import Acks
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.admission import Admission, Appetite
from rolloutmq.services.broker.arenas import Arenas, OpenArena, Slot
from rolloutmq.services.broker.consumers import Consumers
from rolloutmq.services.broker.dropping import Dropping
from rolloutmq.services.broker.forming import Former
from rolloutmq.services.broker.gpuorders import GpuOrders
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
from rolloutmq.services.broker.tasks import Tasks
from rolloutmq.services.broker.workers import Workers


class State:
    """The parts, and the few numbers that belong to none of them."""

    def __init__(
        self,
        config: RunConfig,
        epoch: int,
        endpoints: Endpoints | None,
        ram: Ram | None,
        open_arena: OpenArena | None = None,
    ) -> None:
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
        last = max(1, broker.max_deliveries - 1)
        self.lanes = Lanes(config.environment, self.groups, last, config.unconfigured)
        self.sessions = Sessions(epoch)
        self.admission = Admission(broker, self.lanes, self.sessions, self._appetite)
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
        self.tasks = Tasks(self.log, remembered=broker.remembered_tasks, max_deliveries=broker.max_deliveries)
        self.acks = Acks(broker, epoch, self.sessions, lambda: self.run.policy)
        self.produced = Rate()
        """Sequences that were accepted for training."""
        self.trainer_waits_s: defaultdict[str, float] = defaultdict(float)
        self.producer_waits_s: defaultdict[str, float] = defaultdict(float)
        self.starved_s = 0.0
        """Seconds in which trainers could have learned and had nothing, each rank for its part."""
        self.rejected: Counter[str] = Counter()
        self.as_frames: Counter[str] = Counter()
        """Groups that came as frames and not through shared memory, by reason."""
        self.newest: dict[str, tuple[StoredGroup, Frames]] = {}
        """Newest group of each environment, in any state."""
        self.arenas = Arenas(broker.high_bytes, open_arena, self._leave_arena)
        self.known: WeakValueDictionary[str, StoredGroup] = WeakValueDictionary()
        """Groups that still exist, by id: a group that is sent again under another session is known by it."""
        self.tuned: dict[str, Setting] = {}
        """Settings that were changed while the run went on, by dotted key."""
        self.wanted: dict[str, int | None] = {}
        self.gpu_orders = GpuOrders()
        self.journal = JournalStatus()
        """How the journal does, as the shell last said."""
        self.requeued: set[int] = set()
        """Former orders of dead groups that an earlier life queued again."""
        self.repace = False
        """Credit may have come free: rollouts are granted again at the end of the round."""

    def adopt(self, config: RunConfig, now: float) -> None:
        """Go on under another configuration, with what is held as it is."""
        broker = config.broker
        self.config = config
        fixed: defaultdict[str, set[str]] = defaultdict(set)
        for env, field in map(split, self.tuned):
            fixed[env].add(field)
        self.lanes.adopt(config.environment, fixed)
        self.former.adopt(broker)
        self.settlement.adopt(broker)
        self.acks.adopt(broker)
        self.pacing.adopt(broker.silent_env_s)
        self.admission.adopt(broker, now)
        self.pacing.pace_all(now)
        if self.ram is not None:
            self.ram.budget_bytes = broker.ram_bytes
            for group in self.groups:
                group.body.spare()

    def _appetite(self) -> Appetite:
        if not len(self.leases):
            if self.consumers.any_hungry:
                return Appetite.STARVED
            if self.lanes.queued_sequences(Split.TRAIN) >= self.run.batch_sequences:
                return Appetite.NONE
        return Appetite.EATS

    def _leave_arena(self, slot: Slot, frames: Frames) -> None:
        """Copy the newest group of an environment when its slot comes free."""
        newest = self.newest.get(slot.env)
        if newest is not None and newest[1] is frames:
            self.newest[slot.env] = newest[0], tuple(map(bytes, frames))

    def admit(self, group: StoredGroup, lane: Lane, now: float) -> None:
        """Count a new group in and queue it."""
        self.lanes.accept(lane, group, now)
        self.ledger.accept()
        self.known[group.header.group_id] = group
        if group.header.task and not group.requeued:
            self.tasks.answered(group)

    def trainer_waited(self, wait: Wait, seconds: float) -> None:
        """Count seconds that a trainer waited."""
        if wait is not Wait.NONE and seconds > 0:
            self.trainer_waits_s[wait.value] += seconds

    def producer_waited(self, wait: Wait, seconds: float) -> None:
        """Count seconds that a producer waited."""
        if wait is not Wait.NONE and seconds > 0:
            self.producer_waits_s[wait.value] += seconds


def refuse(code: ErrorCode, detail: str) -> ErrorReply:
    """Make an error reply."""
    return ErrorReply(code=code, detail=detail)
