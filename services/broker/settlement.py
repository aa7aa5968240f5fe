"""How groups move between queue, lease and settlement, and back.

Every transition of a group after its acceptance is here or in `dropping`, each with its fact, its line in the ledger,
and its bytes in the right account: an ordinary batch counts against the queue's mark until it is settled, a rewound
one against `retain_bytes` until a checkpoint covers it. What decides and what changes are apart, so that the facts of
an earlier life lead to the same state by the same code: `lease` decides and `hold` changes, `settle` and `conclude`,
`lose` and `give_back`.
"""

from collections.abc import Iterable, Sequence

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Pull, Settle, Wait
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.services.broker.dropping import Dropping
from rolloutmq.services.broker.forming import Former
from rolloutmq.services.broker.groups import Groups, StoredGroup, Stream
from rolloutmq.services.broker.journal.facts import Committed, Forgot, Leased, Lost, Rewound
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.leases import Lease, Leases, Part
from rolloutmq.services.broker.ledger import Ledger, State
from rolloutmq.services.broker.log import Log
from rolloutmq.services.broker.rates import Rate
from rolloutmq.services.broker.retained import Kept, Retained, Returning
from rolloutmq.services.broker.shards import shard

Fate = tuple[State, str]
"""What became of a group, and why."""


def fates(part: Part, settle: Settle) -> list[Fate] | None:
    """Return what became of each group of a part; None if the lists do not match the part."""
    named: dict[str, list[Fate]] = {}
    for group_id in settle.trained:
        named.setdefault(group_id, []).append((State.TRAINED, ""))
    for group_id in settle.filtered:
        named.setdefault(group_id, []).append((State.FILTERED, ""))
    for rejected in settle.rejected:
        named.setdefault(rejected.group_id, []).append((State.DEAD, rejected.reason))
    result = []
    for group in part.groups:
        left = named.get(group.header.group_id)
        if not left:
            return None
        result.append(left.pop(0))
    return None if any(named.values()) else result


class Settlement:
    """Moves groups; owns none of the containers."""

    def __init__(
        self,
        lanes: Lanes,
        former: Former,
        leases: Leases,
        retained: Retained,
        ledger: Ledger,
        groups: Groups,
        dropping: Dropping,
        log: Log,
        *,
        max_deliveries: int,
        retain_bytes: int,
    ) -> None:
        self._lanes = lanes
        self._former = former
        self._leases = leases
        self._retained = retained
        self._ledger = ledger
        self._groups = groups
        self._dropping = dropping
        self._log = log
        self._max_deliveries = max_deliveries
        self._retain_bytes = retain_bytes
        self.consumed = Rate()
        """Sequences that trainers settled."""

    def adopt(self, config: BrokerConfig) -> None:
        """Go on with another bound of what is kept for a checkpoint."""
        self._retain_bytes = config.retain_bytes

    def lease(self, stream: Stream, pull: Pull, now: float, wall: float) -> Lease | Wait:
        """Lease the next batch: one that comes again if there is any, otherwise a new one."""
        again = self._next_return(stream, wall)
        if isinstance(again, Wait):
            return again
        if again is not None:
            shards, short = again.shards, again.short
            if len(shards) != pull.world_size:
                shards = shard(again.groups, pull.world_size)
        else:
            formed = self._former.form(stream, pull, now, wall)
            if isinstance(formed, Wait):
                return formed
            shards, short = shard(formed.groups, pull.world_size), formed.short
        lease = Lease(
            number=self._leases.next_number(),
            generation=self._leases.next_generation(),
            stream=stream,
            step=pull.step,
            version=pull.version,
            sequences=pull.sequences,
            tokens=pull.tokens,
            parts=[Part(groups, now) for groups in shards],
            short=short,
            rewound=again is not None,
        )
        self._log.add(_leased(lease))
        self.hold(lease)
        return lease

    def _next_return(self, stream: Stream, wall: float) -> Returning | Wait | None:
        """Take the next batch that comes again, without what cannot be read back."""
        while (again := self._retained.next_return(stream)) is not None:
            try:
                damaged = [group for group in again.groups if not group.body.load()]
            except JournalWaitsError:
                self._send_back(stream, [again])
                return Wait.JOURNAL_SLOW
            if not damaged:
                return again
            self._send_back(stream, [again])
            self._dropping.drop(damaged, State.DEAD, "damaged", wall)
        return None

    def returns_next(self, stream: Stream) -> list[list[StoredGroup]]:
        """Return the batch at the head of the rewind queue by ranks; empty if there is none."""
        return next((batch.shards for own, batch in self._retained.returning() if own == stream), [])

    def take(self, fact: Leased) -> list[list[StoredGroup]]:
        """Take what an earlier life leased out of the queue, or from the head of the rewind queue."""
        shards = [list(filter(None, map(self._groups.find, orders))) for orders in fact.shards]
        if fact.again:
            self._retained.next_return((fact.group, fact.split))
            return shards
        shards = [[group for group in groups if self._lanes.of(group).holds(group)] for groups in shards]
        for group in (group for groups in shards for group in groups):
            self._lanes.of(group).remove(group)
        return shards

    def hold(self, lease: Lease) -> None:
        """Count the groups of a new lease, which were taken from their queues, as leased."""
        for group in lease.groups:
            group.deliveries += 1
            if not lease.rewound:
                self._lanes.of(group).leased.add(group)
        self._ledger.move(State.QUEUED, State.LEASED, sum(1 for _ in lease.groups))
        self._leases.open(lease)

    def settle(self, lease: Lease, now: float, wall: float) -> None:
        """End a lease whose ranks have all settled."""
        consumer_group = lease.stream[0]
        batch = self.conclude(lease, wall)
        if lease.split is Split.TRAIN:
            self.consumed.add(sum(group.header.sequences for group, _ in batch.members()), now)
        surplus = self._retained.surplus(consumer_group, self._retain_bytes)
        if surplus:
            self._log.add(Forgot(consumer_group, surplus))
            self.forget_oldest(consumer_group, surplus)
        for group, _ in batch.members():
            # It may be kept for long: its producer's memory is for what comes.
            group.body.leave_arena()

    def conclude(self, lease: Lease, wall: float) -> Kept:
        """Move the groups of a settled lease to where its ranks said, and keep the batch for its checkpoint."""
        self._leases.end(lease)
        settles = [part.settle for part in lease.parts if part.settle is not None]
        shards: list[list[tuple[StoredGroup, State]]] = []
        for part, settle in zip(lease.parts, settles, strict=True):
            ended = fates(part, settle)
            assert ended is not None
            alive: list[tuple[StoredGroup, State]] = []
            for group, fate in zip(part.groups, ended, strict=True):
                self._end(lease, group, fate, wall)
                if fate[0] is not State.DEAD:
                    alive.append((group, fate[0]))
            shards.append(alive)
        batch = Kept(
            version=max(settle.version for settle in settles),
            stepped=any(state is State.TRAINED for alive in shards for _, state in alive),
            split=lease.split,
            shards=[[group for group, _ in alive] for alive in shards],
            states=[[state for _, state in alive] for alive in shards],
            short=lease.short,
        )
        if any(batch.shards):
            self._retained.keep(lease.stream[0], batch)
        return batch

    def _end(self, lease: Lease, group: StoredGroup, fate: Fate, wall: float) -> None:
        state, reason = fate
        lane = self._leave(lease.rewound, group)
        lane.settled_sequences += group.header.sequences
        if not lease.rewound:
            self._lanes.let_go(group)
        if state is State.DEAD:
            if lease.rewound:
                self._retained.charge(-group.header.nbytes)
            self._ledger.move(State.LEASED, state, reason="rejected")
            self._dropping.end(group, state, f"rejected: {reason}", wall)
            return
        self._ledger.move(State.LEASED, state)
        lane.trained_groups += state is State.TRAINED
        group.body.shed()
        if not lease.rewound:
            self._retained.charge(group.header.nbytes)

    def _leave(self, rewound: bool, group: StoredGroup) -> Lane:
        lane = self._lanes.of(group)
        (lane.rewinding if rewound else lane.leased).add(group, -1)
        return lane

    def lose(self, lease: Lease, wall: float, *, failed: bool, why: str) -> None:
        """Take a lease back: its groups return to their places; those that failed too often are dead.

        Args:
            lease: An open lease.
            wall: Wall-clock seconds, for the records.
            failed: Whether its trainer was lost with it, rather than giving it back.
            why: For people.
        """
        apart = self._comes_apart(lease, failed=failed)
        self._log.add(Lost(lease.number, failed, why, apart=apart))
        self.give_back(lease, failed=failed, apart=apart)
        self._bury(lease.groups, wall)

    def _comes_apart(self, lease: Lease, *, failed: bool) -> bool:
        """Whether a group of the lease, once it is lost, will have one chance left: then it may be poison."""
        return any(self._lanes.of(group).would_be_suspected(group, failed) for group in lease.groups)

    def give_back(self, lease: Lease, *, failed: bool, apart: bool = False) -> None:
        """Return the groups of a lease to their places; a rewound batch comes again whole, or apart."""
        groups = self._unlease(lease, failed=failed)
        if lease.rewound:
            self._send_back(lease.stream, _again(lease, apart=apart))
            return
        for group in groups:
            self._leave(False, group)
        self._lanes.put_back(groups)

    def _unlease(self, lease: Lease, *, failed: bool) -> list[StoredGroup]:
        self._leases.lose(lease)
        groups = list(lease.groups)
        for group in groups:
            group.failures += failed
            group.body.shown = False
        self._ledger.move(State.LEASED, State.QUEUED, len(groups))
        return groups

    def _bury(self, groups: Iterable[StoredGroup], wall: float) -> None:
        dead = [group for group in groups if group.failures >= self._max_deliveries]
        for group in dead:
            self._dropping.drop([group], State.DEAD, "deliveries", wall, f"lost with {group.failures} leases")

    def _send_back(self, stream: Stream, batches: Iterable[Returning]) -> None:
        self._retained.send_back(stream, [batch for batch in batches if batch.groups])

    def commit(self, consumer_group: str, version: PolicyVersion) -> None:
        """Forget the batches that a durable checkpoint covers."""
        self._log.add(Committed(consumer_group, version))
        self._commit(self._retained.covered(consumer_group, version))

    def _commit(self, covered: Iterable[Kept]) -> None:
        for batch in covered:
            self._retained.charge(-batch.nbytes)
            for group, state in batch.members():
                if state is State.TRAINED:
                    self._ledger.move(State.TRAINED, State.COMMITTED)
                self._groups.gone(group)

    def forget_oldest(self, consumer_group: str, count: int) -> None:
        """Let kept batches go that no checkpoint will ever cover; their groups stay counted as they are."""
        for batch in self._retained.oldest(consumer_group, count):
            self._retained.charge(-batch.nbytes)
            self._ledger.forgotten += sum(state is State.TRAINED for _, state in batch.members())
            for group, _ in batch.members():
                self._groups.gone(group)

    def forget_unclaimed(self) -> None:
        """Let the batches of trainers go that never spoke of a checkpoint: nobody will ever ask for them."""
        kept = {group for group, _ in self._retained.kept()}
        for group in kept - self._retained.checkpointing:
            self._log.add(Forgot(group, 1 << 62))
            self.forget_oldest(group, 1 << 62)

    def rewind(self, consumer_group: str, version: PolicyVersion, consumer: str, wall: float) -> None:
        """Bring back every batch that was settled after `version`, then what is leased now.

        What the checkpoint covers is committed: the trainer has just started from it.
        """
        leases = [lease for split in Split if (lease := self._leases.of((consumer_group, split)))]
        for lease in leases:
            apart = self._comes_apart(lease, failed=True)
            self._log.add(Lost(lease.number, True, "rewound", recalled=True, apart=apart))
            self.recall(lease, apart=apart)
        self._log.add(Rewound(consumer_group, version, consumer))
        self.bring_back(consumer_group, version)
        for lease in leases:
            self._bury(lease.groups, wall)

    def recall(self, lease: Lease, *, apart: bool) -> None:
        """Take an open lease back for the rewind queue, where the batches before it will follow."""
        groups = self._unlease(lease, failed=True)
        if not lease.rewound:
            for group in groups:
                self._leave(False, group).rewinding.add(group)
                self._lanes.let_go(group)
                self._retained.charge(group.header.nbytes)
        self._send_back(lease.stream, _again(lease, apart=apart))

    def bring_back(self, consumer_group: str, version: PolicyVersion) -> None:
        """Put the batches that were settled after `version` at the head of the rewind queue."""
        covered, after = self._retained.after(consumer_group, version)
        self._commit(covered)
        for split in Split:
            batches = [Returning(b.shards, b.short) for b in after if b.split is split]
            self._send_back((consumer_group, split), batches)
        for batch in after:
            for group, state in batch.members():
                self._ledger.rewind(state, 1)
                lane = self._lanes.of(group)
                lane.rewinding.add(group)
                lane.trained_groups -= state is State.TRAINED

    def reset(self, wall: float) -> None:
        """Discard what is queued, leased or on its way back; what was trained stays counted as that."""
        for lease in self._leases:
            self._discard(lease.groups, State.LEASED, wall)
        for lane in self._lanes:
            self._discard(list(lane.in_order()), State.QUEUED, wall)
        for batch in self._retained.all_returning():
            self._discard(batch.groups, State.QUEUED, wall)
        self._ledger.forgotten += sum(
            state is State.TRAINED for batch in self._retained.all_kept() for _, state in batch.members()
        )
        self._leases.clear()
        self._retained.clear()
        self._lanes.clear()
        self._former.forget()
        self._groups.clear()

    def _discard(self, groups: Iterable[StoredGroup], state: State, wall: float) -> None:
        for group in groups:
            self._ledger.move(state, State.DISCARDED, reason="reset")
            self._dropping.end(group, State.DISCARDED, "reset", wall)


def _again(lease: Lease, *, apart: bool) -> list[Returning]:
    batch = Returning([part.groups for part in lease.parts], lease.short)
    return batch.apart() if apart else [batch]


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
    )


def orders(shards: Sequence[Sequence[StoredGroup]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of each rank by their orders."""
    return tuple(tuple(group.order for group in groups) for groups in shards)
