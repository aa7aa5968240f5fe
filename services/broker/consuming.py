"""Serving consumers: pulls that wait, leases, settlements, checkpoints, and those who fall silent."""

import math
from typing import Final

from rolloutmq.schemas.delivery import (
    Batch,
    Commit,
    ConsumerBeat,
    ConsumerRegistered,
    ErrorReply,
    NoBatch,
    Ok,
    Pull,
    RegisterConsumer,
    Release,
    Settle,
    Settled,
    Wait,
)
from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.errors import ErrorCode, JournalWaitsError
from rolloutmq.services.broker.actions import Route
from rolloutmq.services.broker.consumers import POLL_S, Consumer, Waiting
from rolloutmq.services.broker.deliveries import deliveries
from rolloutmq.services.broker.journal.facts import Joined, Pulled, Settles
from rolloutmq.services.broker.leases import Ended, Lease, Part
from rolloutmq.services.broker.ledger import State as Place
from rolloutmq.services.broker.settlement import fates
from rolloutmq.services.broker.state import State, refuse

STARVING: Final = frozenset({Wait.NO_BATCH, Wait.NO_EXACT_FIT, Wait.MIN_SHARE, Wait.TOO_FEW_GROUPS})
"""Waits that more groups would end."""


class Consuming:
    """What consumers ask."""

    def __init__(self, state: State) -> None:
        self._state = state

    def register(self, request: RegisterConsumer, now: float, wall: float) -> ConsumerRegistered | ErrorReply:
        """Note a new life of a consumer: what its former life held goes back."""
        state = self._state
        if request.rank >= request.world_size:
            return refuse(ErrorCode.INVALID, "rank must be below world_size")
        if not state.run.serves(request.info.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {state.run.name}")
        if state.consumers.full(request.consumer):
            return refuse(ErrorCode.LIMIT, "too many consumers")
        if state.consumers.goes_on(request):
            state.consumers.heard(request.consumer, now)
            return ConsumerRegistered(epoch=state.epoch, generation=request.generation, info=state.run.info)
        self._dismiss(request.consumer, now)
        joined = Joined(
            request.consumer,
            request.group,
            request.rank,
            request.world_size,
            state.leases.next_generation(),
            request.info,
        )
        self.join(joined, now)
        holds = any(any(lease.held_by(request.consumer)) for lease in state.leases)
        if state.consumers.resumes(request, holds=holds) and request.resume is not None:
            state.settlement.rewind(request.group, request.resume, request.consumer, wall)
            state.run.resumed(request.resume)
        self._release(request.consumer, wall, failed=True, why="registered again")
        self._rebatch()
        self.serve(now, wall)
        return ConsumerRegistered(epoch=state.epoch, generation=joined.generation, info=state.run.info)

    def join(self, joined: Joined, now: float) -> None:
        """Note a new life of a consumer."""
        state = self._state
        state.log.add(joined)
        state.leases.generation = max(state.leases.generation, joined.generation)
        state.consumers.register(
            Consumer(
                name=joined.consumer,
                group=joined.group,
                rank=joined.rank,
                world_size=joined.world_size,
                generation=joined.generation,
                heard_at=now,
            )
        )
        state.run.registered(joined.consumer, joined.info)

    def _rebatch(self) -> None:
        self._state.pacing.batch_sequences = self._state.run.batch_sequences
        self._state.pacing.batch_tokens = self._state.run.batch_tokens
        self._state.repace = True

    def _dismiss(self, consumer: str, now: float) -> None:
        """Answer a pull that waits for a consumer which is gone or asks anew."""
        waiting = self._state.consumers.stop_waiting(consumer)
        if waiting is not None:
            self._give_up(waiting, now)

    def pull(self, route: Route, pull: Pull, now: float, wall: float) -> None:
        """Answer a pull now, or let it wait."""
        state = self._state
        if (error := self._unpullable(pull, now)) is not None:
            state.outbox.reply(route, error)
            return
        if pull.split is Split.TRAIN and state.run.pulled(pull.sequences, pull.tokens):
            self._rebatch()
        self._dismiss(pull.consumer, now)
        waiting = Waiting(route, pull, (pull.group, pull.split), now + pull.wait_s, now)
        self._count_poll(pull, now)
        if self._answered(waiting, now, wall):
            return
        if pull.wait_s > 0 and waiting.wait is not Wait.END_OF_REPLAY:
            state.consumers.wait(waiting)
        else:
            self._give_up(waiting, now)

    def _count_poll(self, pull: Pull, now: float) -> None:
        """Count the time since a trainer that polls asked in vain."""
        since = self._state.consumers.hungry_since(pull.consumer)
        if since is not None and pull.split is Split.TRAIN:
            self._state.starved_s += (now - since) / pull.world_size

    def _unpullable(self, pull: Pull, now: float) -> ErrorReply | None:
        state = self._state
        consumer = state.consumers.heard(pull.consumer, now)
        if consumer is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {pull.consumer} is not registered")
        consumer.trains = consumer.trains or pull.split is Split.TRAIN
        if not state.run.serves(pull.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {state.run.name}")
        registered = consumer.group, consumer.rank, consumer.world_size
        if (pull.group, pull.rank, pull.world_size) != registered:
            return refuse(ErrorCode.CONFLICT, "group, rank and world_size must be those of the registration")
        if bool(pull.sequences) == bool(pull.tokens):
            return refuse(
                ErrorCode.INVALID, "a pull names a number of sequences or a budget of tokens, one of them"
            )
        if not math.isfinite(pull.wait_s):
            return refuse(ErrorCode.INVALID, "wait_s must be a finite number")
        if state.leases.over(pull.consumer, pull.request_id):
            return refuse(ErrorCode.LEASE_LOST, "the batch of this request is settled already")
        lease = state.leases.of((pull.group, pull.split))
        if lease is not None and lease.step == pull.step and not lease.fits(pull):
            return refuse(ErrorCode.CONFLICT, f"step {pull.step} is leased with other numbers")
        return None

    def serve(self, now: float, wall: float) -> None:
        """Answer every waiting pull that can be answered now."""
        consumers = self._state.consumers
        for waiting in consumers.waiting():
            if self._answered(waiting, now, wall):
                consumers.stop_waiting(waiting.pull.consumer)
            elif waiting.wait is Wait.END_OF_REPLAY:
                self._dismiss(waiting.pull.consumer, now)

    def _answered(self, waiting: Waiting, now: float, wall: float) -> bool:
        state, pull = self._state, waiting.pull
        lease = state.leases.of(waiting.stream)
        if lease is None:
            found = state.settlement.lease(waiting.stream, pull, now, wall)
            if isinstance(found, Wait):
                self._hold(waiting, self._cap(found, pull.split), now)
                return False
            lease = found
            if lease.split is Split.TRAIN:
                state.run.leased(lease)
                if lease.tokens:
                    self._rebatch()
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
        self._count(waiting, now)
        self._hand_out(waiting, lease, part, now)
        return True

    def _readable(self, lease: Lease, part: Part, wall: float) -> bool:
        """Bring a part into memory; if some of it is damaged, the step goes back without that."""
        damaged = [group for group in part.groups if not group.body.load()]
        if damaged:
            self._state.settlement.lose(lease, wall, failed=False, why="damaged on disk")
            self._state.dropping.drop(damaged, Place.DEAD, "damaged", wall)
        return not damaged

    def _hold(self, waiting: Waiting, wait: Wait, now: float) -> None:
        self._count(waiting, now)
        waiting.wait, waiting.counted_at = wait, now

    def _count(self, waiting: Waiting, now: float) -> None:
        seconds = now - waiting.counted_at
        self._state.trainer_waited(waiting.wait, seconds)
        if waiting.pull.split is Split.TRAIN and waiting.wait in STARVING:
            self._state.starved_s += seconds / waiting.pull.world_size

    def _cap(self, wait: Wait, split: Split) -> Wait:
        """Tell a batch that cannot come from one that is only not there yet."""
        state = self._state
        if wait is not Wait.NO_BATCH:
            return wait
        if state.pacing.stalled:
            return Wait.JOURNAL_SLOW
        stuck = not len(state.leases) and state.admission.exhausted(split)
        return Wait.BATCH_EXCEEDS_CAP if stuck else wait

    def _hand_out(self, waiting: Waiting, lease: Lease, part: Part, now: float) -> None:
        pull = waiting.pull
        if (part.consumer, part.request_id) != (pull.consumer, pull.request_id):
            part.consumer, part.request_id = pull.consumer, pull.request_id
            self._state.log.add(Pulled(lease.number, pull.rank, pull.consumer, pull.request_id))
        part.progress_at = now
        tables = {group.table.id: group.table for group in part.groups}
        told = deliveries(part.groups, in_place=pull.arenas)
        batch = Batch(
            lease=lease.number,
            generation=lease.generation,
            step=lease.step,
            groups=told.groups,
            tables=tuple(tables.values()),
            arenas=told.arenas,
            short=lease.short,
            rewound=lease.rewound,
            over=lease.over,
        )
        self._state.outbox.reply(waiting.route, batch, told.frames, binding=True)
        self._state.consumers.content(pull.consumer)
        for group in part.groups:
            group.body.spare()

    def _give_up(self, waiting: Waiting, now: float) -> None:
        state = self._state
        self._count(waiting, now)
        state.consumers.polled(waiting.pull.consumer, now)
        queued = state.lanes.queued_sequences(waiting.pull.split)
        state.outbox.reply(waiting.route, NoBatch(wait=waiting.wait, queued_sequences=queued))

    def settle(self, settle: Settle, now: float, wall: float) -> Settled | ErrorReply:
        """Note what became of one rank's part; the last rank ends the lease."""
        state = self._state
        state.consumers.heard(settle.consumer, now)
        lease = state.leases.find(settle.lease, settle.generation)
        if lease is None:
            return refuse(ErrorCode.LEASE_LOST, f"lease {settle.lease} went back to the queue")
        if isinstance(lease, Ended):
            if settle in lease.settles:
                return self._settled(lease.step)
            return refuse(ErrorCode.CONFLICT, "the lease was settled otherwise")
        part = lease.parts[settle.rank] if settle.rank < len(lease.parts) else None
        if part is None or part.consumer != settle.consumer:
            return refuse(ErrorCode.INVALID, f"rank {settle.rank} of the lease is not yours")
        if part.settle is None:
            if settle.version.step < lease.version.step:
                return refuse(ErrorCode.INVALID, "the version after the step is older than the one before it")
            if fates(part, settle) is None:
                return refuse(ErrorCode.INVALID, "each group of the part must be in exactly one list")
            part.settle = settle
            state.log.add(Settles(settle))
            if lease.settled:
                self._end(lease, now, wall)
        elif part.settle != settle:
            return refuse(ErrorCode.CONFLICT, "this rank has settled otherwise")
        return self._settled(lease.step)

    def _settled(self, step: int) -> Settled:
        state = self._state
        wanted = state.retained.nbytes > state.config.broker.retain_bytes
        return Settled(step=step, commit_wanted=wanted)

    def _end(self, lease: Lease, now: float, wall: float) -> None:
        self._state.settlement.settle(lease, now, wall)
        self.moved_on(lease)
        self._state.repace = True
        self.serve(now, wall)

    def moved_on(self, lease: Lease) -> None:
        """Note the policy that a settled lease led to."""
        state = self._state
        state.consumers.moved_on(lease.stream[0])
        if lease.split is Split.TRAIN:
            state.run.policy = max(part.settle.version for part in lease.parts if part.settle is not None)

    def commit(self, request: Commit, now: float) -> Ok | ErrorReply:
        """Let go of what a checkpoint covers."""
        if self._state.consumers.heard(request.consumer, now) is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {request.consumer} is not registered")
        if not self._state.run.serves(request.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {self._state.run.name}")
        self._state.settlement.commit(request.group, request.version)
        return Ok()

    def release(self, request: Release, now: float, wall: float) -> Ok | ErrorReply:
        """Take back what a consumer gives back; it stopped by itself, so no group is to blame."""
        if self._state.consumers.heard(request.consumer, now) is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {request.consumer} is not registered")
        self._dismiss(request.consumer, now)
        self._state.consumers.content(request.consumer)
        self._release(request.consumer, wall, failed=False, why=f"given back: {request.reason}")
        self.serve(now, wall)
        return Ok()

    def _release(self, consumer: str, wall: float, *, failed: bool, why: str) -> None:
        for lease in self._state.leases:
            if any(lease.held_by(consumer)):
                self._state.settlement.lose(lease, wall, failed=failed, why=why)
                self._state.repace = True

    def beat(self, beat: ConsumerBeat, now: float) -> Ok | ErrorReply:
        """Note that a consumer lives, and whether it gets on."""
        consumer = self._state.consumers.heard(beat.consumer, now)
        if consumer is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {beat.consumer} is not registered")
        if beat.progress > consumer.progress:
            consumer.progress = beat.progress
            for lease in self._state.leases:
                for part in lease.held_by(beat.consumer):
                    part.progress_at = now
        return Ok()

    def tick(self, now: float, wall: float) -> None:
        """Take back the leases of the dead and the hung, answer who waited long enough, and try the others."""
        self._expire(now, wall)
        self._state.consumers.forget_polls(now - POLL_S)
        self.serve(now, wall)
        moment = now - self._state.config.broker.silence_s
        for waiting in self._state.consumers.waiting():
            name = waiting.pull.consumer
            if waiting.deadline <= now or self._state.consumers.silent_since(name, moment):
                self._dismiss(name, now)

    def _expire(self, now: float, wall: float) -> None:
        state = self._state
        moment = now - state.config.broker.silence_s
        for lease in state.leases:
            holders = {p.consumer for p in lease.parts if p.consumer and p.settle is None}
            gone = [name for name in holders if state.consumers.silent_since(name, moment)]
            if gone or lease.expires_at(state.config.broker.lease_s) <= now:
                why = f"{gone[0]} fell silent" if gone else "no progress"
                state.settlement.lose(lease, wall, failed=True, why=why)
                state.repace = True

    def sweep(self, now: float) -> None:
        """Forget consumers that have long been gone."""
        holders = {part.consumer for lease in self._state.leases for part in lease.parts}
        moment = now - 2 * self._state.config.broker.silence_s
        self._state.consumers.sweep(moment, holders)

    def next_deadline(self) -> float:
        """Return when `tick` has something to do."""
        state = self._state
        broker = state.config.broker
        times = [waiting.deadline for waiting in state.consumers.waiting()]
        times += [lease.expires_at(broker.lease_s) for lease in state.leases]
        return min(times, default=math.inf)

    def waits(self, now: float) -> str:
        """Bring the counted waits up to date and say why the trainer waits."""
        reason = ""
        for waiting in self._state.consumers.waiting():
            self._hold(waiting, waiting.wait, now)
            if waiting.pull.split is Split.TRAIN:
                reason = reason or waiting.wait.value
        return reason

    def reset(self) -> None:
        """Send away who waits; everybody has to register again."""
        for waiting in self._state.consumers.waiting():
            self._state.outbox.reply(
                waiting.route, refuse(ErrorCode.UNKNOWN, "the run was reset: register again")
            )
        self._state.consumers.clear()
