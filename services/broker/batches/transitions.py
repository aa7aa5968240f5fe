"""Group transitions: between queue, lease, settled and rewound.

Every transition after acceptance is here or in `drop`. Each has its event, its line in the ledger, and its bytes in
the right account: a new batch counts against the high-water mark until it is settled, a rewound one against
`retain_bytes` until a checkpoint covers it.

Deciding and changing are separate methods, so a restart applies the events of an earlier life with the same
code: `lease` decides and `apply_lease` changes, likewise `settle` and `apply_settle`, `lose` and `apply_loss`,
`rewind` and `apply_rewind`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import Pull
from rolloutmq.services.broker.batches.blame import certain, losses
from rolloutmq.services.broker.batches.builder import BatchBuilder
from rolloutmq.services.broker.batches.drop import GroupDropper
from rolloutmq.services.broker.batches.leases import Lease, Leases, RankShard
from rolloutmq.services.broker.batches.rewind import RetainedBatch, RewindBuffer, RewoundBatch
from rolloutmq.services.broker.batches.shards import shard
from rolloutmq.services.broker.journal.event_buffer import EventBuffer
from rolloutmq.services.broker.journal.format.events import (
    Carved,
    Committed,
    Forgot,
    GroupState,
    Leased,
    Lost,
    Rewound,
)
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.groups import Groups, Stream
from rolloutmq.services.broker.state.ledger import Ledger
from rolloutmq.services.broker.state.queues import Lanes
from rolloutmq.services.broker.state.rates import Rate


class GroupTransitions:
    """Moves groups; owns none of the containers."""

    def __init__(
        self,
        lanes: Lanes,
        builder: BatchBuilder,
        leases: Leases,
        rewind_buffer: RewindBuffer,
        ledger: Ledger,
        groups: Groups,
        dropper: GroupDropper,
        events: EventBuffer,
        *,
        max_deliveries: int,
        retain_bytes: int,
    ) -> None:
        self._lanes = lanes
        self._builder = builder
        self._leases = leases
        self._rewind_buffer = rewind_buffer
        self._ledger = ledger
        self._groups = groups
        self._dropper = dropper
        self._events = events
        self._max_deliveries = max_deliveries
        self._retain_bytes = retain_bytes
        self.consumed = Rate()
        """Sequences settled by trainers."""

    def adopt(self, config: BrokerConfig) -> None:
        """Apply another limit of retained bytes."""
        self._retain_bytes = config.retain_bytes

    def lease(self, stream: Stream, pull: Pull, now: float, wall: float) -> Lease | Wait:
        """Lease the next batch: the head of the rewind queue if there is one, otherwise a new batch.

        In a window an accused group comes before both.
        """
        again: RewoundBatch | Wait | None = None
        if self._rewind_buffer.has_next(stream) and not self._is_accused_first(stream, pull):
            again = self._next_rewound(stream, wall)
        if isinstance(again, Wait):
            return again
        if again is not None:
            shards, short, moments = again.shards, again.short, again.moments
            if len(shards) != pull.world_size:
                shards = shard(again.groups, pull.world_size)
            shares = [BatchShare(groups) for groups in shards]
        else:
            plan = self._builder.build(stream, pull, now, wall)
            if isinstance(plan, Wait):
                return plan
            shares, short, moments = [plan.share], plan.short, {}
            for totals in plan.share.lanes:
                moments[totals.first.env] = self._lanes.of(totals.first).rewards
            if pull.world_size > 1:
                shares = [BatchShare(groups) for groups in shard(plan.groups, pull.world_size)]
        lease = Lease(
            number=self._leases.last_number + 1,
            generation=self._leases.next_generation(),
            stream=stream,
            step=pull.step,
            version=pull.version,
            sequences=pull.sequences,
            tokens=pull.tokens,
            window=pull.window,
            parts=[RankShard(share, now) for share in shares],
            short=short,
            rewound=again is not None,
            moments=moments,
        )
        if self._events.recording:
            self._events.add(_leased(lease))
        self.apply_lease(lease)
        return lease

    def _next_rewound(self, stream: Stream, wall: float) -> RewoundBatch | Wait | None:
        """Take the head of the rewind queue, without groups that cannot be read back."""
        while (again := self._rewind_buffer.pop_next(stream)) is not None:
            try:
                damaged = [group for group in again.groups if not group.body.load()]
            except JournalWaitsError:
                self._requeue_rewound(stream, [again])
                return Wait.JOURNAL_SLOW
            if not damaged:
                return again
            self._requeue_rewound(stream, [again])
            self._dropper.drop(damaged, GroupState.DEAD, "damaged", wall)
        return None

    def _is_accused_first(self, stream: Stream, pull: Pull) -> bool:
        """Return whether an accused group of a lane comes before the rewind queue."""
        suspect = self._lanes.suspect(pull.split) if pull.window else None
        if suspect is None or not self._lanes.of(suspect).accused(suspect):
            return False
        if self._builder.is_too_stale(suspect, pull.version):
            return False
        head = self._rewind_buffer.head(stream)
        return head is None or not self._is_accused(head) or head.groups[0].failures < suspect.failures

    def _is_accused(self, batch: RewoundBatch) -> bool:
        """Return whether a rewound batch was split off for one accused group."""
        groups = batch.groups
        return batch.short and len(groups) == 1 and self._lanes.of(groups[0]).accused(groups[0])

    def take_leased(self, event: Leased) -> list[list[StoredGroup]] | None:
        """Take the groups of a `Leased` event out of the queue or the rewind queue; None if that has no such batch."""
        shards = [list(filter(None, map(self._groups.find, orders))) for orders in event.shards]
        if event.again:
            stream, orders = (event.group, event.split), sorted(chain(*event.shards))
            found = self._rewind_buffer.take(stream, orders, window=event.window > 0)
            return None if found is None else shards
        shards = [[group for group in groups if self._lanes.of(group).holds(group)] for groups in shards]
        for group in (group for groups in shards for group in groups):
            self._lanes.of(group).remove(group)
        return shards

    def apply_lease(self, lease: Lease) -> None:
        """Count the groups of a new lease, which were taken from their queues, as leased."""
        for part in lease.parts:
            groups = part.share.groups
            for group in groups:
                group.deliveries += 1
            if not lease.rewound:
                for totals in part.share.lanes:
                    self._lanes.of(totals.first).leased.count(totals)
            self._ledger.move(GroupState.QUEUED, GroupState.LEASED, len(groups))
        self._leases.open(lease)

    def carve(self, share: BatchShare, sources: Collection[int], consumer: str, request_id: str) -> Lease:
        """Make groups of a consumer's window a lease of their own; all of them are rewound, or none.

        Args:
            share: The groups.
            sources: Numbers of the leases that hold them.
            consumer: The consumer.
            request_id: Its request.
        """
        orders_ = tuple([group.order for group in share.groups])
        event = Carved(
            self._leases.next_number(), self._leases.next_generation(), consumer, request_id, orders_
        )
        self._events.add(event)
        return self.apply_carve(event, share, sources)

    def apply_carve(self, event: Carved, share: BatchShare, sources: Collection[int]) -> Lease:
        """Take groups out of the leases that hold them."""
        lease = self._leases.carve(event.number, event.generation, share, sources)
        self._leases.hand_out(lease, 0, event.consumer, event.request_id)
        return lease

    def settle(self, lease: Lease, now: float, wall: float) -> None:
        """End a lease after all its ranks have settled."""
        consumer_group = lease.stream[0]
        batch = self.apply_settle(lease, wall)
        batch.settled_at = wall
        if lease.split is Split.TRAIN:
            for share in batch.shares:
                self.consumed.add(share.sequences, now)
        surplus = self._rewind_buffer.surplus(consumer_group, self._retain_bytes)
        if surplus:
            self._events.add(Forgot(consumer_group, surplus))
            self.forget_oldest(consumer_group, surplus)
        for share in batch.shares:
            for group in share.groups:
                # A batch may be retained for long, and its producer needs the arena.
                if group.body.slot is not None:
                    group.body.leave_arena()

    def apply_settle(self, lease: Lease, wall: float) -> RetainedBatch:
        """Move the groups of a settled lease to their outcomes, and retain the batch for its checkpoint."""
        self._leases.end(lease)
        shares, states = [], []
        for part in lease.parts:
            share, kept = self._settle_share(lease, part, wall)
            shares.append(share)
            states.append(kept)
        batch = RetainedBatch(
            version=lease.policy_after,
            stepped=any([GroupState.TRAINED in kept for kept in states]),
            split=lease.split,
            shares=tuple(shares),
            states=states,
            short=lease.short,
            moments=lease.moments,
        )
        if any(states):
            self._rewind_buffer.retain(lease.stream[0], batch)
        return batch

    def _settle_share(
        self, lease: Lease, part: RankShard, wall: float
    ) -> tuple[BatchShare, list[GroupState]]:
        """Count a shard out of its lease; return the groups that are retained, and their states."""
        share, states = part.share, [state for state, _ in part.outcomes]
        trained = states.count(GroupState.TRAINED)
        all_trained = trained == len(states)
        for totals in share.lanes:
            lane = self._lanes.of(totals.first)
            lane.settled_sequences += totals.sequences
            lane.trained_groups += totals.groups if all_trained else 0
            if lease.rewound:
                lane.rewinding.count(totals, -1)
            else:
                lane.leased.count(totals, -1)
                self._lanes.let_go(lane, totals)
        if not all_trained:
            share, states = self._settle_apart(lease, part, wall)
        self._ledger.move(GroupState.LEASED, GroupState.TRAINED, trained)
        self._ledger.move(GroupState.LEASED, GroupState.FILTERED, len(states) - trained)
        if not lease.rewound:
            self._rewind_buffer.charge(share.nbytes)
        for group in share.groups:
            group.body.shown = False
            if group.body.place is not None:
                group.body.shed()
        return share, states

    def _settle_apart(
        self, lease: Lease, part: RankShard, wall: float
    ) -> tuple[BatchShare, list[GroupState]]:
        """End the groups that the trainer could not use; return the others, and their states."""
        kept: list[StoredGroup] = []
        states: list[GroupState] = []
        for group, (state, reason) in zip(part.groups, part.outcomes, strict=True):
            if state is not GroupState.DEAD:
                self._lanes.of(group).trained_groups += state is GroupState.TRAINED
                kept.append(group)
                states.append(state)
                continue
            if lease.rewound:
                self._rewind_buffer.charge(-group.header.nbytes)
            self._ledger.move(GroupState.LEASED, state, reason="rejected")
            self._dropper.end(group, state, f"rejected: {reason}", wall)
        return part.share if len(kept) == len(part.groups) else BatchShare(kept), states

    def _count_out(self, share: BatchShare) -> None:
        """Count a shard out of its lease, which is not of a rewound batch."""
        for totals in share.lanes:
            self._lanes.of(totals.first).leased.count(totals, -1)

    def lose(self, lease: Lease, wall: float, *, failed: bool, why: str) -> None:
        """Take one lease back; see `lose_together`."""
        self.lose_together([lease], wall, failed=failed, why=why)

    def lose_together(self, leases: Sequence[Lease], wall: float, *, failed: bool, why: str) -> None:
        """Take back what a trainer held: its groups are queued again; groups that failed too often are dead.

        Args:
            leases: A leased step, or open leases of a window, oldest first.
            wall: Wall-clock seconds, for the records.
            failed: Whether the trainer was lost, rather than giving them back.
            why: For people.
        """
        dead = self._take_back(leases, failed=failed, why=why)
        self._bury(dead, wall)

    def _take_back(
        self, leases: Sequence[Lease], *, failed: bool, why: str, recalled: bool = False
    ) -> list[StoredGroup]:
        """Lose leases; return the groups that have failed too often."""
        for lease, counts in losses(leases, self._is_suspected, failed=failed):
            split_up = self._needs_split(lease, failed=counts)
            self._events.add(Lost(lease.number, counts, why, recalled=recalled, apart=split_up))
            if recalled:
                self.apply_recall(lease, failed=counts, split_up=split_up)
            else:
                self.apply_loss(lease, failed=counts, split_up=split_up)
        if not failed or not certain(leases):
            return []
        return [group for lease in leases for group in lease.groups if group.failures >= self._max_deliveries]

    def _is_suspected(self, group: StoredGroup) -> bool:
        return self._lanes.of(group).suspected(group)

    def _needs_split(self, lease: Lease, *, failed: bool) -> bool:
        """Return whether losing the lease leaves one of its groups with a single delivery: it may be poison."""
        return any(self._lanes.of(group).would_be_suspected(group, failed) for group in lease.groups)

    def apply_loss(self, lease: Lease, *, failed: bool, split_up: bool = False) -> None:
        """Queue the groups of a lease again; a rewound batch returns whole, or split into single groups."""
        groups = self._unlease(lease, failed=failed)
        if lease.rewound:
            self._requeue_rewound(lease.stream, _rewound_batches(lease, split_up=split_up))
            return
        for part in lease.parts:
            self._count_out(part.share)
        self._lanes.put_back(groups)

    def _unlease(self, lease: Lease, *, failed: bool) -> list[StoredGroup]:
        self._leases.lose(lease)
        groups = list(lease.groups)
        for group in groups:
            group.failures += failed
            group.body.shown = False
        self._ledger.move(GroupState.LEASED, GroupState.QUEUED, len(groups))
        return groups

    def _bury(self, dead: Iterable[StoredGroup], wall: float) -> None:
        for group in dead:
            self._dropper.drop(
                [group], GroupState.DEAD, "deliveries", wall, f"lost with {group.failures} leases"
            )

    def _requeue_rewound(self, stream: Stream, batches: Iterable[RewoundBatch]) -> None:
        self._rewind_buffer.push_front(stream, [batch for batch in batches if batch.groups])

    def commit(self, consumer_group: str, version: PolicyVersion) -> list[RetainedBatch]:
        """Forget the batches covered by a durable checkpoint; return them."""
        self._events.add(Committed(consumer_group, version))
        covered = self._rewind_buffer.pop_covered(consumer_group, version)
        self._commit(covered)
        return covered

    def _commit(self, covered: Iterable[RetainedBatch]) -> None:
        for batch in covered:
            self._rewind_buffer.charge(-batch.nbytes)
            self._ledger.move(GroupState.TRAINED, GroupState.COMMITTED, batch.trained)
            for share in batch.shares:
                self._groups.gone(share)

    def forget_oldest(self, consumer_group: str, count: int) -> None:
        """Forget retained batches without a checkpoint; their groups stay counted as they are."""
        for batch in self._rewind_buffer.pop_oldest(consumer_group, count):
            self._rewind_buffer.charge(-batch.nbytes)
            self._ledger.forgotten += batch.trained
            for share in batch.shares:
                self._groups.gone(share)

    def forget_unclaimed(self) -> None:
        """Forget the batches of trainers that never committed: no resume will ask for them."""
        kept = {group for group, _ in self._rewind_buffer.retained()}
        for group in kept - self._rewind_buffer.checkpointing:
            self._events.add(Forgot(group, 1 << 62))
            self.forget_oldest(group, 1 << 62)

    def rewind(self, consumer_group: str, version: PolicyVersion, consumer: str, wall: float) -> None:
        """Queue every batch settled after `version` again, then the leased ones.

        The batches up to `version` are committed: the trainer has just started from that checkpoint.
        """
        dead: list[StoredGroup] = []
        for split in Split:
            if leases := self._leases.of_stream((consumer_group, split)):
                dead += self._take_back(leases, failed=True, why="rewound", recalled=True)
        self._events.add(Rewound(consumer_group, version, consumer))
        self.apply_rewind(consumer_group, version)
        self._bury(dead, wall)

    def apply_recall(self, lease: Lease, *, failed: bool, split_up: bool) -> None:
        """Move an open lease to the rewind queue, ahead of which the batches before it will be put."""
        self._unlease(lease, failed=failed)
        if not lease.rewound:
            for part in lease.parts:
                self._count_out(part.share)
                for totals in part.share.lanes:
                    lane = self._lanes.of(totals.first)
                    lane.rewinding.count(totals)
                    self._lanes.let_go(lane, totals)
                    self._rewind_buffer.charge(totals.nbytes)
        self._requeue_rewound(lease.stream, _rewound_batches(lease, split_up=split_up))

    def apply_rewind(self, consumer_group: str, version: PolicyVersion) -> None:
        """Put the batches settled after `version` at the head of the rewind queue, behind accused groups."""
        covered, after = self._rewind_buffer.pop_after(consumer_group, version)
        self._commit(covered)
        for split in Split:
            batches = [RewoundBatch(b.shards, b.short, b.moments) for b in after if b.split is split]
            stream = consumer_group, split
            accused = list(self._pop_accused(stream))
            self._requeue_rewound(stream, [*accused, *batches])
        for batch in after:
            for group, state in batch.members():
                self._ledger.rewind(state, 1)
                lane = self._lanes.of(group)
                lane.rewinding.add(group)
                lane.trained_groups -= state is GroupState.TRAINED

    def _pop_accused(self, stream: Stream) -> Iterator[RewoundBatch]:
        while (head := self._rewind_buffer.head(stream)) is not None and self._is_accused(head):
            self._rewind_buffer.pop_next(stream)
            yield head

    def reset(self, wall: float) -> None:
        """Discard every queued, leased or rewound group; trained groups stay counted as trained."""
        for lease in self._leases:
            self._discard(lease.groups, GroupState.LEASED, wall)
        for lane in self._lanes:
            self._discard(list(lane.in_order()), GroupState.QUEUED, wall)
        for batch in self._rewind_buffer.all_queued():
            self._discard(batch.groups, GroupState.QUEUED, wall)
        self._ledger.forgotten += sum([batch.trained for batch in self._rewind_buffer.all_retained()])
        self._leases.clear()
        self._rewind_buffer.clear()
        self._lanes.clear()
        self._builder.reset_waits()
        self._groups.clear()

    def _discard(self, groups: Iterable[StoredGroup], state: GroupState, wall: float) -> None:
        for group in groups:
            self._ledger.move(state, GroupState.DISCARDED, reason="reset")
            self._dropper.end(group, GroupState.DISCARDED, "reset", wall)


def _rewound_batches(lease: Lease, *, split_up: bool) -> list[RewoundBatch]:
    batch = RewoundBatch([[*part.groups] for part in lease.parts], lease.short, lease.moments)
    return batch.split_groups() if split_up else [batch]


def _leased(lease: Lease) -> Leased:
    return Leased(
        number=lease.number,
        generation=lease.generation,
        group=lease.stream[0],
        split=lease.split,
        step=lease.step,
        version=lease.version,
        sequences=lease.sequences,
        shards=orders([part.groups for part in lease.parts]),
        short=lease.short,
        again=lease.rewound,
        tokens=lease.tokens,
        moments=lease.moments,
        window=lease.window,
    )


def orders(shards: Sequence[Sequence[StoredGroup]]) -> tuple[tuple[int, ...], ...]:
    """Return the orders of the groups of each rank."""
    return tuple(tuple(group.order for group in groups) for groups in shards)
