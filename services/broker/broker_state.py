"""The broker's state: the parts of the core, made once and shared by the request handlers."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from rolloutmq.schemas.config.live_settings import split
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Endpoints
from rolloutmq.schemas.wire.control import JournalStatus, Setting
from rolloutmq.schemas.wire.envelope import ErrorCode, Split
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.schemas.wire.replies import Durability, ErrorReply, Wait
from rolloutmq.schemas.wire.requests import TrainerPause
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.batches.builder import BatchBuilder
from rolloutmq.services.broker.batches.consumers import Consumer, Consumers
from rolloutmq.services.broker.batches.drop import GroupDropper
from rolloutmq.services.broker.batches.leases import Leases
from rolloutmq.services.broker.batches.rewind import RewindBuffer
from rolloutmq.services.broker.batches.run import RunState
from rolloutmq.services.broker.batches.staleness import StalenessRule
from rolloutmq.services.broker.batches.transitions import GroupTransitions
from rolloutmq.services.broker.flow.ack_schedule import AckSchedule
from rolloutmq.services.broker.flow.arenas import ArenaSlot, OpenArena, ProducerArenas
from rolloutmq.services.broker.flow.credits import ByteCredits, TrainerDemand
from rolloutmq.services.broker.flow.permits import RolloutPermits
from rolloutmq.services.broker.flow.sessions import ProducerSessions
from rolloutmq.services.broker.journal.event_buffer import EventBuffer
from rolloutmq.services.broker.journal.stored_group import BodyMemory, Frames, StoredGroup
from rolloutmq.services.broker.state.gpu_orders import GpuOrders
from rolloutmq.services.broker.state.group_hops import GroupHops
from rolloutmq.services.broker.state.groups import Groups
from rolloutmq.services.broker.state.ledger import Ledger
from rolloutmq.services.broker.state.queues import Lane, Lanes
from rolloutmq.services.broker.state.rates import Rate
from rolloutmq.services.broker.state.restart_orders import RestartOrders
from rolloutmq.services.broker.state.split_queue import GroupSums
from rolloutmq.services.broker.state.tasks import Tasks
from rolloutmq.services.broker.state.workers import Workers

LATE_S: Final = 0.25
"""Wait of a reply for the journal that is told as the trainer's present one; each wait counts."""


class BrokerState:
    """All parts, and the few numbers that belong to none of them."""

    def __init__(
        self,
        config: RunConfig,
        epoch: int,
        endpoints: Endpoints | None,
        ram: BodyMemory | None,
        open_arena: OpenArena | None = None,
        host: str = "",
    ) -> None:
        broker = config.broker
        self.ram = ram
        self.hops = GroupHops(host, enabled=config.telemetry.latencies)
        self.events = EventBuffer(recording=broker.durability is not Durability.MEMORY)
        self.groups = Groups(broker.remembered_groups)
        self.config = config
        self.epoch = epoch
        self.endpoints = endpoints
        self.outbox = Outbox()
        self.ledger = Ledger()
        self.run = RunState(config)
        last = max(1, broker.max_deliveries - 1)
        self.lanes = Lanes(config.environment, self.groups, last, config.unconfigured, config.evaluated)
        self.sessions = ProducerSessions(epoch)
        self.credits = ByteCredits(broker, self.lanes, self.sessions, self._trainer_demand)
        self.permits = RolloutPermits(self.lanes, self.credits, broker.silent_env_s, self.run.batch_sequences)
        self.rewind_buffer = RewindBuffer()
        self.dropper = GroupDropper(
            self.lanes, self.rewind_buffer, self.ledger, self.groups, self.outbox, self.events
        )
        self.staleness = StalenessRule(self.lanes, self.run.lineage, self.ledger)
        self.builder = BatchBuilder(broker, self.lanes, self.dropper, self.staleness)
        self.leases = Leases()
        self.transitions = GroupTransitions(
            self.lanes,
            self.builder,
            self.leases,
            self.rewind_buffer,
            self.ledger,
            self.groups,
            self.dropper,
            self.events,
            max_deliveries=broker.max_deliveries,
            retain_bytes=broker.retain_bytes,
        )
        self.consumers = Consumers()
        self.workers = Workers()
        self.tasks = Tasks(
            self.events, remembered=broker.remembered_tasks, max_deliveries=broker.max_deliveries
        )
        self.ack_schedule = AckSchedule(
            broker, epoch, self.sessions, lambda: self.run.present, lambda: self.credits.sessions
        )
        self.produced = Rate()
        """Sequences accepted for training."""
        self.trainer_waits_s: defaultdict[str, float] = defaultdict(float)
        self.replies_wait_s = 0.0
        """Seconds for which a reply to a trainer has waited for the journal by now."""
        self.producer_waits_s: defaultdict[str, float] = defaultdict(float)
        self.starved_s = 0.0
        """Seconds in which ranks could have trained and had no batch; each rank counts for its share."""
        self.settled_busy_s = 0.0
        """Monotonic seconds without `starved_s`, at the last settlement of a training batch."""
        self.rejected: Counter[str] = Counter()
        self.as_frames: Counter[str] = Counter()
        """Groups that arrived as frames instead of through shared memory, by reason."""
        self.newest: dict[str, tuple[StoredGroup, Frames]] = {}
        """Newest group of each environment, in any state."""
        self.arenas = ProducerArenas(broker.high_bytes, open_arena, self._leave_arena)
        self.changed_settings: dict[str, Setting] = {}
        """Settings changed while the run was live, by dotted key."""
        self.wanted: dict[str, int | None] = {}
        self.restart_orders = RestartOrders()
        self.gpu_orders = GpuOrders()
        self.journal = JournalStatus()
        """The journal's health, as the data plane last reported it."""
        self.network: NetworkStatus | None = None
        """Other hosts, as the data plane last reported them."""
        self.requeued: set[int] = set()
        """Orders of dead groups an earlier life of the broker queued again."""
        self.permits_due = False
        """Room may have come free: permits are granted again at the end of the round."""

    def adopt(self, config: RunConfig, now: float) -> None:
        """Apply another configuration to the state as it is."""
        broker = config.broker
        self.config = config
        fixed: defaultdict[str, set[str]] = defaultdict(set)
        for key in map(split, self.changed_settings):
            fixed[key.env].add(key.field)
        self.lanes.adopt(config.environment, fixed)
        self.builder.adopt(broker)
        self.transitions.adopt(broker)
        self.ack_schedule.adopt(broker)
        self.permits.adopt(broker.silent_env_s)
        self.credits.adopt(broker, now)
        self.permits.pace_all(now)
        if self.ram is not None:
            self.ram.budget_bytes = broker.ram_bytes
            for group in self.groups:
                group.body.spare()

    def _trainer_demand(self) -> TrainerDemand:
        if not any([lease.split is Split.TRAIN for lease in self.leases.steps()]):
            if self.consumers.any_unserved:
                return TrainerDemand.STARVED
            held = any([split is Split.TRAIN for (_, split), _ in self.leases.windows()])
            if not held and self.lanes.queued_sequences(Split.TRAIN) >= self.run.batch_sequences:
                return TrainerDemand.NONE
        return TrainerDemand.CONSUMING

    def _leave_arena(self, slot: ArenaSlot, frames: Frames) -> None:
        """Copy the newest group of an environment when its arena slot comes free."""
        newest = self.newest.get(slot.env)
        if newest is not None and newest[1] is frames:
            self.newest[slot.env] = newest[0], tuple(map(bytes, frames))

    def admit(self, groups: Sequence[StoredGroup], sums: GroupSums, lane: Lane, now: float) -> None:
        """Count new groups of a lane and queue them; `sums` are theirs. Either all of them were requeued, or none."""
        self.lanes.accept(lane, groups, sums, now)
        self.ledger.accept(sums.groups)
        if groups[0].requeued:
            return
        half_life = self.config.trainer.rewards.half_life_groups
        lane.rewards = lane.rewards.after_all(sums.headers, half_life)
        for group in groups:
            if group.header.task:
                self.tasks.answered(group)

    @property
    def reply_wait(self) -> str:
        """Why a trainer waits for a reply that has been given; empty if none waits for long."""
        return Wait.JOURNAL_SLOW.value if self.replies_wait_s >= LATE_S else ""

    def trainer_waited(self, wait: Wait, seconds: float) -> None:
        if wait is not Wait.NONE and seconds > 0:
            self.trainer_waits_s[wait.value] += seconds

    def trainer_paused(self, consumer: Consumer, waits_s: Mapping[TrainerPause, float], now: float) -> None:
        """Count what a trainer tells of its waits outside of pulls."""
        for reason, seconds in consumer.growth(waits_s, now):
            if seconds > 0:
                self.trainer_waits_s[reason.value] += seconds

    def producer_waited(self, wait: Wait, seconds: float) -> None:
        if wait is not Wait.NONE and seconds > 0:
            self.producer_waits_s[wait.value] += seconds


def of_another_run(state: "BrokerState", run_id: str) -> ErrorReply | None:
    """Refuse what belongs to an earlier run of the same name; None if it belongs to this one, or to none yet."""
    own = state.endpoints.run_id if state.endpoints is not None else ""
    return other_run(state.run.name, own, run_id)


def other_run(name: str, own: str, other: str) -> ErrorReply | None:
    """Refuse what belongs to the run of another id, if both are known."""
    if own in {"", other} or not other:
        return None
    return refuse(
        ErrorCode.INVALID,
        f"run_id: belongs to a run that is gone; this broker serves a fresh run of the name {name} "
        f"(got {other[:8]}, it has {own[:8]}); start the program again to take part in it",
    )


def refuse(code: ErrorCode, detail: str) -> ErrorReply:
    return ErrorReply(code=code, detail=detail)


def taken_over(consumer: str) -> ErrorReply:
    """Refuse a request of a process whose consumer name another one has taken over."""
    return refuse(ErrorCode.FENCED, f"consumer {consumer}: another process registered under this name")
