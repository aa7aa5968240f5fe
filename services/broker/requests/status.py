"""Status: the `Pressure` message, and the status reply around it."""

from collections import Counter
from collections.abc import Sequence

from rolloutmq.schemas.wire.control import LaneStatus, Pressure, StatusReply, TrainerStatus
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.services.broker.broker_state import BrokerState
from rolloutmq.services.broker.flow.arenas import ARENA_REFUSALS
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.requests.consumers import ConsumerRequests
from rolloutmq.services.broker.requests.live_settings import LiveSettings
from rolloutmq.services.broker.requests.vacancies import Vacancies
from rolloutmq.services.broker.state.queues import Lane

UNCOUNTED = frozenset({"duplicate", *ARENA_REFUSALS})
"""Refusals that refuse no message: a group that was resent to be safe, shared memory without which groups come as
frames."""


class StatusReporter:
    """Reads all state; changes only the clocks of the waits."""

    def __init__(
        self,
        state: BrokerState,
        consumers: ConsumerRequests,
        live_settings: LiveSettings,
        vacancies: Vacancies,
    ) -> None:
        self._state = state
        self._vacancies = vacancies
        self._consumers = consumers
        self._live_settings = live_settings
        self._started_at: float | None = None
        self._counted_at = 0.0
        self._number = 0

    def begin(self, now: float) -> None:
        """Start the clock of a life at its first request."""
        if self._started_at is None:
            self._started_at = self._counted_at = now

    def pressure(self, now: float, wall: float) -> Pressure:
        """Return the state of the queues against the trainer's demand."""
        state = self._state
        self.begin(now)
        trainer_wait, places = self._consumers.waits(now), self._state.endpoints
        self._count_waits(now)
        lanes = list(state.lanes)
        train = state.lanes.of_split(Split.TRAIN).lanes  # eval groups feed no trainer
        queued = sum(lane.queued.sequences + lane.rewinding.sequences for lane in train)
        again = [lease for lease in state.leases if lease.rewound and lease.split is Split.TRAIN]
        leased_again = sum(group.header.sequences for lease in again for group in lease.groups)
        queued -= leased_again
        batch = max(1, state.run.batch_sequences)
        self._number += 1
        leaders = self._leaders(now)
        silent = state.sessions.lost_of_silent() + state.sessions.lost_of_collapsed
        return Pressure(
            epoch=state.epoch,
            number=self._number,
            at=wall,
            rollout_pressure=queued / batch,
            queued_sequences=queued,
            batch_sequences=state.run.batch_sequences,
            queued_groups=state.ledger.counts[GroupState.QUEUED],
            queued_bytes=sum(lane.queued.nbytes for lane in lanes),
            leased_bytes=sum(lane.leased.nbytes for lane in lanes),
            high_bytes=state.config.broker.high_bytes,
            step=state.run.present.step,
            consumed_per_s=state.transitions.consumed.per_s(now),
            produced_per_s=state.produced.per_s(now),
            staleness_max=state.staleness.max_delivered,
            trainer_wait=trainer_wait,
            trainer_waits_s=dict(state.trainer_waits_s),
            producer_waits_s=dict(state.producer_waits_s),
            ledger=state.ledger.report(silent),
            lanes=tuple(self._lane(lane, now) for lane in lanes),
            workers=state.workers.statuses(now),
            wanted=dict(state.wanted),
            settings=self._live_settings.of_orchestrator(),
            restarts=state.restart_orders.current(now),
            gpu_orders=state.gpu_orders.current(),
            granted_bytes=state.credits.granted_bytes,
            reserved_bytes=state.credits.reserved,
            high_groups=state.config.broker.high_groups,
            silent_env_s=state.config.broker.silent_env_s,
            exact_wait_s=state.config.broker.exact_wait_s,
            tasks=state.tasks.counts(),
            late_members=dict(state.workers.late_members),
            trainers=state.consumers.trainers(now - state.config.broker.silence_s),
            leaders=leaders,
            untrained_s=self._untrained_s(leaders, now),
            starved_s=state.starved_s,
            settled_busy_s=state.settled_busy_s,
            blocked_s=dict(state.workers.blocked_s),
            completions=dict(state.workers.completions),
            completion_tokens=dict(state.workers.completion_tokens),
            free_environments=self._vacancies.free(),
            insecure=places.listen[0] if places is not None and places.insecure else "",
            unencrypted=state.config.unencrypted,
        )

    def report(self, now: float, wall: float) -> StatusReply:
        state = self._state
        rejected = state.rejected
        return StatusReply(
            pressure=self.pressure(now, wall),
            run=state.run.name,
            total_steps=state.run.info.total_steps,
            durability=state.config.broker.durability.value,
            journal=state.journal,
            uptime_s=now - (self._started_at or now),
            rejected_messages=sum(n for why, n in rejected.items() if why not in UNCOUNTED),
            rejected_by_reason=dict(rejected),
            changed=self._live_settings.differences(),
            as_frames=dict(state.as_frames),
            network=state.network,
        )

    def _count_waits(self, now: float) -> None:
        seconds = now - self._counted_at
        self._counted_at = now
        for session in self._state.sessions:
            if session.alive:
                self._state.producer_waited(session.wait, seconds)

    def _leaders(self, now: float) -> tuple[TrainerStatus, ...]:
        moment = now - self._state.config.broker.silence_s
        return tuple(
            TrainerStatus(
                consumer=one.name,
                group=one.group,
                step=max(0, one.settled_step),
                silent_s=max(0.0, now - one.heard_at),
                connected=not one.has_left and one.heard_at > moment,
                has_left=one.has_left,
            )
            for one in self._state.consumers.leaders(moment)
        )

    def _untrained_s(self, leaders: Sequence[TrainerStatus], now: float) -> float:
        """Return how long no trainer has been heard; 0 while one is connected."""
        if any(one.connected for one in leaders):
            return 0.0
        return min([now - (self._started_at or now), *(one.silent_s for one in leaders)])

    def _lane(self, lane: Lane, now: float) -> LaneStatus:
        producers = self._state.credits.producers(lane)
        oldest = lane.oldest()
        waits = [session.wait.value for session in producers if session.wait is not Wait.NONE]
        return LaneStatus(
            env=lane.env,
            split=lane.split,
            weight=lane.weight if lane.connected else 0.0,
            min_share=lane.min_share,
            producers=len(producers),
            queued_groups=lane.queued.groups,
            queued_sequences=lane.queued.sequences,
            queued_bytes=lane.queued.nbytes,
            leased_groups=lane.leased.groups,
            granted=lane.granted,
            accepted_groups=lane.accepted_groups,
            trained_groups=lane.trained_groups,
            oldest_age_s=max(0.0, now - oldest.accepted_at) if oldest else 0.0,
            accepted_per_s=lane.arrivals.per_s(now),
            wait=Counter(waits).most_common(1)[0][0] if waits else "",
            held_bytes=lane.held_bytes,
            high_bytes=lane.rule.high_bytes,
            max_staleness=lane.rule.max_staleness,
            waiting=len(waits),
            accepted_sequences=lane.accepted_sequences,
            settled_sequences=lane.settled_sequences,
            rollout_s=lane.rollout_s,
            reward_mean=lane.rewards.mean if lane.rewards.groups else None,
            reward_deviation=lane.rewards.deviation if lane.rewards.groups else None,
            reward_groups=lane.rewards.groups,
        )
