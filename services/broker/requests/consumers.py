"""Requests of consumers: registration, pulls that wait, settle, commit, release, heartbeats.

A batch is delivered with its frames, or with the addresses of its groups in shared memory.
"""

import math
from typing import Final

from msgspec.structs import replace

from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import (
    Batch,
    ConsumerRegistered,
    ErrorReply,
    NoBatch,
    Ok,
    Settled,
    Wait,
)
from rolloutmq.schemas.wire.requests import (
    Commit,
    ConsumerBeat,
    Pull,
    RegisterConsumer,
    Release,
    Settle,
    SettleGroups,
)
from rolloutmq.services.broker.actions import Route
from rolloutmq.services.broker.batches.consumers import POLL_S, Consumer, WaitingPull
from rolloutmq.services.broker.batches.leases import EndedLease, Lease, RankShard
from rolloutmq.services.broker.batches.shards import mismatch
from rolloutmq.services.broker.broker_state import BrokerState, of_another_run, refuse, taken_over
from rolloutmq.services.broker.journal.format.events import GroupState, Joined, Pulled, Settles
from rolloutmq.services.broker.requests import windows
from rolloutmq.services.broker.requests.deliveries import deliveries
from rolloutmq.services.broker.requests.settlements import Settlements
from rolloutmq.services.broker.requests.windows import WindowRequests

MISMATCH_S: Final = 3.0
"""How long a rank pulls a step that another, living rank has settled before it is refused."""
STARVING: Final = frozenset({Wait.NO_BATCH, Wait.NO_EXACT_FIT, Wait.MIN_SHARE, Wait.TOO_FEW_GROUPS})
"""Waits that more groups would end."""


class ConsumerRequests:
    """Handles the requests of consumers."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._windows = WindowRequests(state, self._end)
        self.settlements = Settlements(state)

    def register(self, request: RegisterConsumer, now: float, wall: float) -> ConsumerRegistered | ErrorReply:
        """Register a new life of a consumer: the lease of its previous life is lost."""
        state = self._state
        if request.rank >= request.world_size:
            return refuse(
                ErrorCode.INVALID,
                f"rank: must be below world_size (got {request.rank} of {request.world_size})",
            )
        if not state.run.serves(request.info.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {state.run.name}")
        if (error := of_another_run(state, request.run_id)) is not None:
            return error
        if state.consumers.full(request.consumer):
            return refuse(ErrorCode.LIMIT, "consumer: the broker can register no further consumer")
        if state.consumers.goes_on(request):
            known = state.consumers.heard(request.consumer, now)
            return self._registered(request.group, known.generation if known else request.generation)
        self._dismiss(request.consumer, now)
        joined = Joined(
            request.consumer,
            request.group,
            request.rank,
            request.world_size,
            state.leases.next_generation(),
            request.info,
        )
        self.join(joined, now, request.key)
        holds = any(any(lease.held_by(request.consumer)) for lease in state.leases)
        deleted = self._deleted_steps(request.group, request.resume)
        if state.consumers.resumes(request, holds=holds) and request.resume is not None:
            state.transitions.rewind(request.group, request.resume, request.consumer, wall)
            # A trainer that starts tells its policy, too, and has no lines to void.
            if max(request.resume, state.run.present) > PolicyVersion():
                self.settlements.resumed(request.resume, wall)
            state.run.resumed(request.resume)
            state.consumers.settled(request.group, request.resume)
        self._release(request.consumer, wall, failed=True, why="registered again")
        self._void(request.consumer, wall)
        self._rebatch()
        self.serve(now, wall)
        return self._registered(joined.group, joined.generation, deleted)

    def _deleted_steps(self, group: str, resume: PolicyVersion | None) -> int:
        """Return how many steps after a checkpoint were settled and are no longer retained."""
        policy = self._state.consumers.settled_by(group)
        if resume is None or policy is None:
            return 0
        return max(0, policy.step - resume.step - self._state.rewind_buffer.steps_after(group, resume))

    def _registered(self, group: str, generation: int, deleted: int = 0) -> ConsumerRegistered:
        state = self._state
        stream = group, Split.TRAIN
        lease = state.leases.of(stream)
        # A rank that settled in vain may already have asked for the step behind it, whose policy will never be.
        known = (lease and lease.version, state.consumers.settled_by(group), state.leases.lost_policy(stream))
        policy = min((one for one in known if one), key=lambda one: one.step, default=state.run.present)
        return ConsumerRegistered(
            epoch=state.epoch,
            generation=generation,
            info=state.run.info,
            policy=policy,
            deleted_steps=deleted,
        )

    def join(self, joined: Joined, now: float, key: str = "") -> None:
        """Apply a registration."""
        state = self._state
        state.events.add(joined)
        state.leases.generation = max(state.leases.generation, joined.generation)
        state.leases.forget_void(joined.consumer)
        state.consumers.register(
            Consumer(
                name=joined.consumer,
                group=joined.group,
                rank=joined.rank,
                world_size=joined.world_size,
                generation=joined.generation,
                heard_at=now,
                key=key,
            )
        )
        state.run.registered(joined.consumer, joined.info)

    def _rebatch(self) -> None:
        self._state.permits.batch_sequences = self._state.run.batch_sequences
        self._state.permits.batch_tokens = self._state.run.batch_tokens
        self._state.permits_due = True

    def _dismiss(self, consumer: str, now: float) -> None:
        """End the waiting pull of a consumer that is gone or pulls anew."""
        waiting = self._state.consumers.stop_waiting(consumer)
        if waiting is not None:
            self._give_up(waiting, now)

    def pull(self, route: Route, pull: Pull, now: float, wall: float) -> None:
        """Answer a pull now, or let it wait."""
        state = self._state
        if (error := self._unpullable(pull, now)) is not None:
            state.outbox.reply(route, error)
            return
        if pull.split is Split.TRAIN and not pull.groups and state.run.pulled(pull.sequences, pull.tokens):
            self._rebatch()
        self._dismiss(pull.consumer, now)
        waiting = WaitingPull(route, pull, (pull.group, pull.split), now + pull.wait_s, now)
        poll = state.consumers.vain_poll(pull.consumer) if pull.split is Split.TRAIN else None
        served = self._answered(waiting, now, wall)
        if poll is not None:
            state.starved_s += poll.waited_s(now, in_vain=not served) / pull.world_size
        if served:
            return
        self._note_policy(waiting)
        if pull.wait_s > 0 and waiting.wait is not Wait.END_OF_REPLAY:
            if poll is not None:
                state.consumers.forget_poll(pull.consumer)  # from here on the pull that waits counts
            state.consumers.wait(waiting)
        else:
            self._give_up(waiting, now)

    def _note_policy(self, waiting: WaitingPull) -> None:
        """Adopt the policy of a trainer whose pull waits: producers sample from it before it gets a batch.

        While a step is leased, the policy after it is provisional. A pull that is refused or at another step than the
        other ranks' tells none: the policy it names may never be settled.
        """
        state, pull = self._state, waiting.pull
        if pull.split is not Split.TRAIN or waiting.wait is Wait.STEP_MISMATCH:
            return
        if state.leases.of(waiting.stream) is None and state.run.advanced(pull.version):
            self._rebatch()

    def _fenced(self, request: Pull | Release | ConsumerBeat) -> ErrorReply | None:
        """Refuse a process whose name another one has taken over: it must neither get nor release its batches."""
        if not self._state.consumers.fenced(request.consumer, request.generation):
            return None
        return taken_over(request.consumer)

    def _unpullable(self, pull: Pull, now: float) -> ErrorReply | None:
        state = self._state
        if (fenced := self._fenced(pull)) is not None:
            return fenced
        consumer = state.consumers.heard(pull.consumer, now)
        if consumer is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {pull.consumer} is not registered")
        consumer.trains = consumer.trains or pull.split is Split.TRAIN
        if not state.run.serves(pull.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {state.run.name}")
        registered = consumer.group, consumer.rank, consumer.world_size
        if (pull.group, pull.rank, pull.world_size) != registered:
            return refuse(
                ErrorCode.CONFLICT,
                "pull: group, rank and world_size must match the registration "
                f"(got {pull.group}, {pull.rank}, {pull.world_size}; registered {registered})",
            )
        if (unfit := windows.unfit(pull)) is not None:
            return unfit
        if not math.isfinite(pull.wait_s):
            return refuse(ErrorCode.INVALID, f"wait_s: must be a finite number (got {pull.wait_s})")
        if state.leases.ended_of(pull.consumer, pull.request_id):
            return refuse(ErrorCode.LEASE_LOST, f"request {pull.request_id} got a batch that is settled")
        lease = state.leases.of((pull.group, pull.split))
        if lease is not None and not pull.window and lease.step == pull.step and not lease.fits(pull):
            return refuse(ErrorCode.CONFLICT, f"step {pull.step} is leased with another size or world_size")
        return None

    def serve(self, now: float, wall: float) -> None:
        """Answer every waiting pull that has a batch now."""
        consumers = self._state.consumers
        for waiting in list(consumers.pulls.values()):
            if self._answered(waiting, now, wall):
                consumers.stop_waiting(waiting.pull.consumer)
            elif waiting.wait is Wait.END_OF_REPLAY:
                self._dismiss(waiting.pull.consumer, now)

    def _answered(self, waiting: WaitingPull, now: float, wall: float) -> bool:
        state, pull = self._state, waiting.pull
        if pull.world_size > 1 or state.leases.void:
            if (error := self._contradiction(waiting, now, wall)) is not None:
                self._count(waiting, now)
                state.outbox.reply(waiting.route, error)
                return True
            if waiting.wait is Wait.STEP_MISMATCH:
                return False
        last = state.leases.last_number
        lease = self._lease(waiting, now, wall)
        if isinstance(lease, Wait):
            self._hold(waiting, self._cap(lease, pull.split), now)
            return False
        if lease.number > last:  # made for this pull, of groups that were loaded just now
            self._hand_out(waiting, lease, lease.parts[pull.rank], now, wall)
            self._note_lease(lease)
            return True
        part = lease.parts[pull.rank] if lease.fits(pull) else None
        if part is None or part.settle is not None or part.consumer not in {"", pull.consumer}:
            self._hold(waiting, Wait.LEASED_ELSEWHERE, now)
            return False
        try:
            readable = self._readable(lease, part, wall)
        except JournalWaitsError:
            self._hold(waiting, Wait.JOURNAL_SLOW, now)
            return False
        if not readable:
            return self._answered(waiting, now, wall)
        self._hand_out(waiting, lease, part, now, wall)
        return True

    def _lease(self, waiting: WaitingPull, now: float, wall: float) -> Lease | Wait:
        """Return the lease that a pull is for, or a new one, or why there is none."""
        state, pull = self._state, waiting.pull
        if pull.groups:
            return self._windows.lease(waiting.stream, pull, now, wall)
        if state.leases.window_of(waiting.stream) is not None:
            return Wait.LEASED_ELSEWHERE
        found = state.leases.of(waiting.stream)
        return found or state.transitions.lease(waiting.stream, pull, now, wall)

    def _note_lease(self, lease: Lease) -> None:
        """Adopt the policy and the size of a new batch."""
        if lease.split is Split.TRAIN:
            self._state.run.leased(lease)
            if lease.tokens:
                self._rebatch()

    def _contradiction(self, waiting: WaitingPull, now: float, wall: float) -> ErrorReply | None:
        """Refuse a pull that cannot be of the same step as those of the other ranks.

        A rank whose settlement was lost goes back. A rank that pulls a step of the past waits first: the whole group
        may be starting over, and the other ranks register in a moment.
        """
        state, pull = self._state, waiting.pull
        consumer = state.consumers.find(pull.consumer)
        assert consumer is not None
        if (void := state.leases.void_for(pull, consumer.generation)) is not None:
            return refuse(
                ErrorCode.LEASE_LOST,
                f"lease {void.lease} of step {void.step} was lost after this rank had settled it and before all others "
                "had; its groups are queued again",
            )
        if pull.world_size == 1 or pull.split is not Split.TRAIN:
            return None
        ahead = state.consumers.ahead_of(pull, now - state.config.broker.silence_s) or self._moved_on_to(pull)
        missed = self._missed_lease(pull)
        if ahead is None and missed is None:
            consumer.mismatch_since = None
            waiting.wait = Wait.NO_BATCH if waiting.wait is Wait.STEP_MISMATCH else waiting.wait
            self._lose_unsettled_step(pull, wall)
            return self._unsettled_step(pull)
        return self._mismatched(waiting, consumer, ahead, missed, now)

    def _missed_lease(self, pull: Pull) -> Lease | None:
        """Return the open lease of an earlier step of which this rank has not pulled its shard: it never would."""
        lease = self._state.leases.of((pull.group, pull.split))
        if lease is None or lease.step >= pull.step or pull.rank >= len(lease.parts):
            return None
        return None if lease.parts[pull.rank].consumer else lease

    def _moved_on_to(self, pull: Pull) -> Consumer | None:
        """Return a rank that has pulled a later step, after all ranks had settled the pulled one."""
        state = self._state
        lease = state.leases.of((pull.group, pull.split))
        if lease is None or lease.step <= pull.step or not self._is_settled(pull.group, lease.version):
            return None
        if pull.rank < len(lease.parts) and lease.parts[pull.rank].consumer:
            return None
        return next((found for part in lease.parts if (found := state.consumers.find(part.consumer))), None)

    def _mismatched(
        self,
        waiting: WaitingPull,
        consumer: Consumer,
        ahead: Consumer | None,
        missed: Lease | None,
        now: float,
    ) -> ErrorReply | None:
        """Let the pull of a step of the past or of the future wait, and refuse it if it stays."""
        pull, first = waiting.pull, consumer.mismatch_since is None
        since = consumer.mismatch_since = now if consumer.mismatch_since is None else consumer.mismatch_since
        if ahead is None and first and missed is not None:
            return _unsettled(
                missed.step, "another rank"
            )  # a rank that has settled it provisionally goes back
        heard_at = now if ahead is None else ahead.heard_at
        if min(now, heard_at) - since < MISMATCH_S:
            self._hold(waiting, Wait.STEP_MISMATCH, now)
            return None
        policy = self._state.consumers.settled_by(pull.group)
        if ahead is not None:
            problem = (
                f"is settled, and {ahead.name} is past it, with {ahead.settled_step} as its last settled step"
            )
        else:
            assert missed is not None
            problem = f"follows step {missed.step}, which this rank has not pulled"
        return refuse(
            ErrorCode.CONFLICT,
            f"pull: step {pull.step} {problem}; continue at policy {policy}, as a registration says",
        )

    def _unsettled_step(self, pull: Pull) -> ErrorReply | None:
        """Refuse a rank ahead of the others: the broker forgot its last settlement before all ranks had settled."""
        state = self._state
        if state.leases.of((pull.group, pull.split)) is not None or self._is_settled(
            pull.group, pull.version
        ):
            return None
        waiting = (one.pull for one in state.consumers.waiting() if one.stream == (pull.group, pull.split))
        other = next((one for one in waiting if one.step < pull.step and one.consumer != pull.consumer), None)
        if other is None:
            return None
        return _unsettled(other.step, other.consumer)

    def _lose_unsettled_step(self, pull: Pull, wall: float) -> None:
        """Take back a step that was leased to a rank ahead of this one, which will never pull its shard of it."""
        state = self._state
        lease = state.leases.of((pull.group, pull.split))
        if lease is None or lease.step <= pull.step:
            return
        if pull.rank < len(lease.parts) and lease.parts[pull.rank].consumer:
            return
        if not self._is_settled(pull.group, lease.version):
            why = f"{pull.consumer} pulls step {pull.step}, which not every rank has settled"
            state.transitions.lose(lease, wall, failed=False, why=why)

    def _is_settled(self, group: str, policy: PolicyVersion) -> bool:
        """Return whether the policy is the last one of a consumer group, as far as this broker knows."""
        return self._state.consumers.settled_by(group) == policy

    def _readable(self, lease: Lease, part: RankShard, wall: float) -> bool:
        """Load a shard into memory; if groups are damaged, the lease is lost and they are dropped."""
        damaged = [group for group in part.groups if not group.body.load()]
        if damaged:
            self._state.transitions.lose(lease, wall, failed=False, why="damaged on disk")
            self._state.dropper.drop(damaged, GroupState.DEAD, "damaged", wall)
        return not damaged

    def _hold(self, waiting: WaitingPull, wait: Wait, now: float) -> None:
        self._count(waiting, now)
        waiting.wait, waiting.counted_at = wait, now

    def _count(self, waiting: WaitingPull, now: float) -> None:
        if waiting.pull.split is not Split.TRAIN:
            return
        seconds = now - waiting.counted_at
        self._state.trainer_waited(waiting.wait, seconds)
        if waiting.wait in STARVING:
            self._state.starved_s += seconds / waiting.pull.world_size

    def _cap(self, wait: Wait, split: Split) -> Wait:
        """Distinguish a batch that can never come from one that is not there yet."""
        state = self._state
        if wait is not Wait.NO_BATCH:
            return wait
        if state.permits.stalled:
            return Wait.JOURNAL_SLOW
        stuck = not len(state.leases) and state.credits.exhausted(split)
        return Wait.BATCH_EXCEEDS_CAP if stuck else wait

    def _hand_out(self, waiting: WaitingPull, lease: Lease, part: RankShard, now: float, wall: float) -> None:
        """Answer a pull with a shard; then count that it has gone."""
        pull = waiting.pull
        contents = deliveries(part.share.groups, in_place=pull.arenas)
        batch = Batch(
            lease=lease.number,
            generation=lease.generation,
            step=lease.step,
            groups=contents.groups,
            tables=contents.tables,
            arenas=contents.arenas,
            short=lease.short,
            rewound=lease.rewound,
            over=lease.over,
            moments=lease.moments,
        )
        # With a window, the trainer works on the groups that it holds.
        awaited = pull.split is Split.TRAIN and not pull.window
        self._state.outbox.reply(waiting.route, batch, contents.frames, durable=True, awaited=awaited)
        self._count(waiting, now)
        if (part.consumer, part.request_id) != (pull.consumer, pull.request_id):
            if not part.consumer and not lease.rewound:
                self._state.hops.handed_out(part.share, wall)
            part.handed_at = wall
            self._state.leases.hand_out(lease, pull.rank, pull.consumer, pull.request_id)
            self._state.events.add(Pulled(lease.number, pull.rank, pull.consumer, pull.request_id))
        part.progress_at = now
        if lease.window:
            self._state.leases.advanced(pull.consumer, now)
        self._state.consumers.served(pull.consumer, now)
        if self._state.ram is not None and self._state.ram.short:
            for group in part.groups:
                group.body.spare()

    def _give_up(self, waiting: WaitingPull, now: float) -> None:
        state = self._state
        self._count(waiting, now)
        if waiting.pull.split is Split.TRAIN:
            state.consumers.polled(waiting.pull, now)
        queued = state.lanes.queued_sequences(waiting.pull.split)
        expired = state.ledger.counts[GroupState.EXPIRED]
        reply = NoBatch(wait=waiting.wait, queued_sequences=queued, expired_groups=expired)
        state.outbox.reply(waiting.route, reply)

    def settle(self, settle: Settle, now: float, wall: float) -> Settled | ErrorReply:
        """Note the outcome of one rank's shard; the last rank ends the lease."""
        state = self._state
        state.consumers.heard(settle.consumer, now)
        lease = state.leases.find(settle.lease, settle.generation)
        if lease is None:
            state.leases.told(settle)
            return refuse(
                ErrorCode.LEASE_LOST, f"lease {settle.lease} was lost, and its groups are queued again"
            )
        if isinstance(lease, EndedLease):
            if settle in lease.settles:
                return self._settled(lease.step, provisional=False)
            return refuse(ErrorCode.CONFLICT, f"lease {settle.lease} was settled with another outcome")
        part = lease.parts[settle.rank] if settle.rank < len(lease.parts) else None
        if part is None or part.consumer != settle.consumer:
            return refuse(
                ErrorCode.INVALID,
                f"settle.rank: rank {settle.rank} of lease {settle.lease} was not pulled by {settle.consumer}",
            )
        if part.settle is None:
            if (skipped := _skips(lease, settle.version)) is not None:
                return skipped
            if not part.settled_by(settle):
                return refuse(ErrorCode.INVALID, mismatch(part.groups, settle))
            state.events.add(Settles(settle))
            state.hops.settled(part.share, wall - part.handed_at)
            if lease.settled:
                self._end(lease, now, wall)
        elif part.settle != settle:
            return refuse(ErrorCode.CONFLICT, f"rank {settle.rank} has settled with another outcome")
        return self._settled(lease.step, provisional=not lease.settled)

    def settle_groups(self, request: SettleGroups, now: float, wall: float) -> Settled | ErrorReply:
        """End groups of a consumer's window; see `WindowRequests`."""
        reply = self._windows.settle(request, now, wall)
        if isinstance(reply, ErrorReply):
            return reply
        return replace(reply, commit_wanted=self._settled(reply.step, provisional=False).commit_wanted)

    def _settled(self, step: int, *, provisional: bool) -> Settled:
        state = self._state
        wanted = state.rewind_buffer.nbytes > state.config.broker.retain_bytes
        return Settled(step=step, commit_wanted=wanted, provisional=provisional)

    def _end(self, lease: Lease, now: float, wall: float) -> None:
        self._state.transitions.settle(lease, now, wall)
        if lease.split is Split.TRAIN:
            self._state.settled_busy_s = now - self._state.starved_s
        self.moved_on(lease)
        self.settlements.ended(lease, wall)
        self._state.permits_due = True
        self.serve(now, wall)

    def moved_on(self, lease: Lease) -> None:
        """Note the policy after a settled lease."""
        state = self._state
        state.consumers.moved_on(lease.stream[0])
        if lease.split is Split.TRAIN:
            policy = lease.policy_after
            state.run.policy = policy
            state.consumers.settled(lease.stream[0], policy)
            for part in lease.parts:
                if (consumer := state.consumers.find(part.consumer)) is not None:
                    consumer.settled_step = lease.step

    def commit(self, request: Commit, now: float, wall: float) -> Ok | ErrorReply:
        """Forget the batches covered by a checkpoint."""
        if self._state.consumers.heard(request.consumer, now) is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {request.consumer} is not registered")
        if not self._state.run.serves(request.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {self._state.run.name}")
        for batch in self._state.transitions.commit(request.group, request.version):
            if batch.settled_at:
                for share in batch.shares:
                    self._state.hops.committed(share, wall - batch.settled_at)
        return Ok()

    def release(self, request: Release, now: float, wall: float) -> Ok | ErrorReply:
        """Queue the lease of a consumer again. The consumer stopped by itself, so it is no failure of a group."""
        if (fenced := self._fenced(request)) is not None:
            return fenced
        if (consumer := self._state.consumers.heard(request.consumer, now)) is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {request.consumer} is not registered")
        self._state.trainer_paused(consumer, request.waits_s, now)
        self._dismiss(request.consumer, now)
        self._state.consumers.forget_poll(request.consumer)
        if request.leaves:
            self._state.consumers.left(request.consumer)
        self._release(request.consumer, wall, failed=False, why=f"given back: {request.reason}")
        self.serve(now, wall)
        return Ok()

    def _void(self, consumer: str, wall: float) -> None:
        """Take back the steps that an earlier life of a consumer had settled and the other ranks have not.

        The new life knows nothing of that settlement and would pull the step again.
        """
        for lease in self._state.leases.steps():
            if any(part.consumer == consumer for part in lease.parts):
                self._state.transitions.lose(lease, wall, failed=False, why=f"{consumer} registered again")

    def _release(self, consumer: str, wall: float, *, failed: bool, why: str) -> None:
        leases = self._state.leases
        held = [[lease] for lease in leases.steps() if any(lease.held_by(consumer))]
        held += [list(one.leases.values()) for _, one in leases.windows() if one.consumer == consumer]
        for together in held:
            self._state.transitions.lose_together(together, wall, failed=failed, why=why)
            self._state.permits_due = True

    def beat(self, beat: ConsumerBeat, now: float) -> Ok | ErrorReply:
        """Note that a consumer lives, and whether it makes progress."""
        if (fenced := self._fenced(beat)) is not None:
            return fenced
        if (consumer := self._state.consumers.heard(beat.consumer, now)) is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {beat.consumer} is not registered")
        self._state.trainer_paused(consumer, beat.waits_s, now)
        if beat.progress > consumer.progress:
            consumer.progress = beat.progress
            self._state.leases.advanced(beat.consumer, now)
        return Ok()

    def tick(self, now: float, wall: float) -> None:
        """Expire the leases of dead and hung consumers, serve waiting pulls, and end those past their deadline."""
        consumers = self._state.consumers
        if self._state.leases:
            self._expire_steps(now, wall)
            self._windows.expire(now, wall)
        if consumers.any_polled:
            self._count_polls(now)
            consumers.forget_polls(now - POLL_S)
        if not consumers.pulls:
            return
        self.serve(now, wall)
        moment = now - self._state.config.broker.silence_s
        for waiting in self._state.consumers.waiting():
            name = waiting.pull.consumer
            if waiting.deadline <= now or self._state.consumers.silent_since(name, moment):
                self._dismiss(name, now)

    def _count_polls(self, now: float) -> None:
        """Count the waits of trainers that poll, which end soon after a batch is there."""
        queued = self._state.lanes.queued_sequences(Split.TRAIN)
        for poll in self._state.consumers.vain_polls():
            batch = 1 if poll.pull.groups else poll.pull.sequences or self._state.run.batch_sequences
            if now < poll.ready_at and queued >= batch:
                poll.ready_at = now
            self._state.starved_s += poll.waited_s(now) / poll.pull.world_size

    def _expire_steps(self, now: float, wall: float) -> None:
        state = self._state
        moment = now - state.config.broker.silence_s
        for lease in state.leases.steps():
            holders = {p.consumer for p in lease.parts if p.consumer and p.settle is None}
            gone = [name for name in holders if state.consumers.silent_since(name, moment)]
            if gone or lease.expires_at(state.config.broker.lease_s) <= now:
                missing = lease.missing(now, state.config.broker.lease_s)
                # The ranks that wait for a missing one show no progress either, and no group is to blame.
                failed = bool(gone) or missing is None
                late = "no progress" if failed else f"rank {missing} is missing"
                why = f"{gone[0]} fell silent" if gone else late
                state.transitions.lose(lease, wall, failed=failed, why=why)
                state.permits_due = True

    def sweep(self, now: float) -> None:
        """Forget consumers that left long ago."""
        moment = now - 2 * self._state.config.broker.silence_s
        self._state.consumers.sweep(moment, self._state.leases.holders())

    def next_deadline(self) -> float:
        """Return when `tick` has work to do."""
        state = self._state
        due = state.leases.expire_at(state.config.broker.lease_s)
        for waiting in state.consumers.waiting():
            due = min(due, waiting.deadline)
        return due

    def waits(self, now: float) -> str:
        """Update the counted waits and return why the trainer waits."""
        reason = ""
        for waiting in self._state.consumers.waiting():
            self._hold(waiting, waiting.wait, now)
            if waiting.pull.split is Split.TRAIN:
                reason = reason or waiting.wait.value
        return reason or self._state.reply_wait

    def reset(self) -> None:
        """End all waiting pulls; every consumer has to register again."""
        for waiting in self._state.consumers.waiting():
            self._state.outbox.reply(
                waiting.route, refuse(ErrorCode.UNKNOWN, "the run was reset: register again")
            )
        self._state.consumers.clear()


def _skips(lease: Lease, version: PolicyVersion) -> ErrorReply | None:
    """Refuse a policy that cannot follow a batch: one before the pull, or in training more than one step after it."""
    first, last = lease.version.step, max(lease.version.step + 1, lease.step)
    if version.step >= first and (version.step <= last or lease.split is not Split.TRAIN):
        return None
    return refuse(
        ErrorCode.INVALID,
        f"settle.version: the step after the batch must be {first} or {last}: a batch is at most one step "
        f"(got {version.step})",
    )


def _unsettled(step: int, by: str) -> ErrorReply:
    return refuse(
        ErrorCode.LEASE_LOST,
        f"step {step} is not settled by every rank, {by} pulls it; its groups are queued again",
    )
