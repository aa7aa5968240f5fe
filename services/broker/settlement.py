"""How groups move between queue, lease and settlement, and back.

Every transition of a group after its acceptance is here, each with its line in the ledger and its bytes in the right
account: an ordinary batch counts against the queue's mark until it is settled, a rewound one against `retain_bytes`
until a checkpoint covers it.
"""

from collections.abc import Iterable

from rolloutmq.schemas.delivery import Pull, Settle, Wait
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.forming import Former, Stream
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.leases import Lease, Leases, Part
from rolloutmq.services.broker.ledger import Ledger, State
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
        outbox: Outbox,
        *,
        max_deliveries: int,
        retain_bytes: int,
    ) -> None:
        self._lanes = lanes
        self._former = former
        self._leases = leases
        self._retained = retained
        self._ledger = ledger
        self._outbox = outbox
        self._max_deliveries = max_deliveries
        self._retain_bytes = retain_bytes
        self.consumed = Rate()
        """Sequences that trainers settled."""

    def lease(self, stream: Stream, pull: Pull, now: float, wall: float) -> Lease | Wait:
        """Lease the next batch: one that comes again if there is any, otherwise a new one."""
        again = self._retained.next_return(stream)
        if again is not None:
            return self._lease_again(stream, again, pull, now)
        formed = self._former.form(stream, pull, now, wall)
        if isinstance(formed, Wait):
            return formed
        for group in formed.groups:
            self._lanes.of(group).leased.add(group)
        self._ledger.move(State.QUEUED, State.LEASED, len(formed.groups))
        shards = shard(formed.groups, pull.world_size)
        return self._leases.open(stream, pull, shards, now, short=formed.short, rewound=False)

    def _lease_again(self, stream: Stream, again: Returning, pull: Pull, now: float) -> Lease:
        shards = again.shards
        if len(shards) != pull.world_size:
            shards = shard(again.groups, pull.world_size)
        self._ledger.move(State.QUEUED, State.LEASED, len(again.groups))
        return self._leases.open(stream, pull, shards, now, short=again.short, rewound=True)

    def settle(self, lease: Lease, now: float, wall: float) -> bool:
        """End a lease whose ranks have all settled; return whether a step was taken."""
        self._leases.end(lease)
        kept_groups: list[list[StoredGroup]] = []
        kept_states: list[list[State]] = []
        versions = []
        for part in lease.parts:
            assert part.settle is not None
            versions.append(part.settle.version)
            ended = fates(part, part.settle)
            assert ended is not None
            alive = []
            for group, fate in zip(part.groups, ended, strict=True):
                self._end(lease, group, fate, wall)
                if fate[0] is not State.DEAD:
                    alive.append((group, fate[0]))
            self.consumed.add(sum(group.header.sequences for group, _ in alive), now)
            kept_groups.append([group for group, _ in alive])
            kept_states.append([state for _, state in alive])
        stepped = any(State.TRAINED in states for states in kept_states)
        kept = Kept(
            version=max(versions),
            stepped=stepped,
            split=lease.split,
            shards=kept_groups,
            states=kept_states,
            short=lease.short,
        )
        if any(kept_groups):
            self._retained.keep(lease.stream[0], kept)
            self._forget_surplus(lease.stream[0])
        return stepped

    def _forget_surplus(self, consumer_group: str) -> None:
        for batch in self._retained.surplus(consumer_group, self._retain_bytes):
            self._retained.charge(-batch.nbytes)
            self._ledger.forgotten += sum(state is State.TRAINED for _, state in batch.members())

    def _end(self, lease: Lease, group: StoredGroup, fate: Fate, wall: float) -> None:
        state, reason = fate
        lane = self._leave(lease.rewound, group)
        if state is State.DEAD:
            self._ledger.move(State.LEASED, state, reason="rejected")
            self._bury(lease.rewound, group, f"rejected: {reason}", wall)
            return
        self._ledger.move(State.LEASED, state)
        lane.trained_groups += state is State.TRAINED
        if not lease.rewound:
            self._lanes.let_go(group)
            self._retained.charge(group.header.nbytes)

    def _leave(self, rewound: bool, group: StoredGroup) -> Lane:
        lane = self._lanes.of(group)
        (lane.rewinding if rewound else lane.leased).add(group, -1)
        return lane

    def _bury(self, rewound: bool, group: StoredGroup, reason: str, wall: float) -> None:
        if rewound:
            self._retained.charge(-group.header.nbytes)
        else:
            self._lanes.let_go(group)
        self._outbox.dropped(wall, group.header.group_id, State.DEAD.value, reason)

    def lose(self, lease: Lease, wall: float, *, failed: bool) -> None:
        """Take a lease back: its groups return to their places; those that failed too often are dead.

        Args:
            lease: An open lease.
            wall: Wall-clock seconds, for the records.
            failed: Whether its trainer was lost with it, rather than giving it back.
        """
        self._leases.lose(lease)
        back = self._survivors(lease, wall, failed=failed)
        if lease.rewound:
            self._ledger.move(State.LEASED, State.QUEUED, sum(map(len, back)))
            self._send_back(lease.stream, [Returning(back, lease.short)])
            return
        for groups in back:
            for group in groups:
                self._leave(False, group)
            self._lanes.put_back(groups)
            self._ledger.move(State.LEASED, State.QUEUED, len(groups))

    def _survivors(self, lease: Lease, wall: float, *, failed: bool) -> list[list[StoredGroup]]:
        back: list[list[StoredGroup]] = []
        for part in lease.parts:
            alive = []
            for group in part.groups:
                group.failures += failed
                if group.failures < self._max_deliveries:
                    alive.append(group)
                    continue
                self._leave(lease.rewound, group)
                self._ledger.move(State.LEASED, State.DEAD, reason="deliveries")
                reason = f"lost with {group.failures} leases"
                self._bury(lease.rewound, group, reason, wall)
            back.append(alive)
        return back

    def _send_back(self, stream: Stream, batches: Iterable[Returning]) -> None:
        self._retained.send_back(stream, [batch for batch in batches if batch.groups])

    def commit(self, consumer_group: str, version: PolicyVersion) -> None:
        """Forget the batches that a durable checkpoint covers."""
        self._forget(self._retained.covered(consumer_group, version))

    def _forget(self, covered: Iterable[Kept]) -> None:
        for batch in covered:
            self._retained.charge(-batch.nbytes)
            for _, state in batch.members():
                if state is State.TRAINED:
                    self._ledger.move(State.TRAINED, State.COMMITTED)

    def rewind(self, consumer_group: str, version: PolicyVersion, wall: float) -> None:
        """Bring back every batch that was settled after `version`, then what is leased now.

        What the checkpoint covers is committed: the trainer has just started from it.
        """
        covered, after = self._retained.after(consumer_group, version)
        self._forget(covered)
        for split in Split:
            stream = consumer_group, split
            lease = self._leases.of(stream)
            batches = [Returning(b.shards, b.short) for b in after if b.split is split]
            if lease is not None:
                batches.append(self._recall(lease, wall))
            self._send_back(stream, batches)
        for batch in after:
            for group, state in batch.members():
                self._ledger.rewind(state, 1)
                lane = self._lanes.of(group)
                lane.rewinding.add(group)
                lane.trained_groups -= state is State.TRAINED

    def _recall(self, lease: Lease, wall: float) -> Returning:
        """Take an open lease back whole, for the rewind queue."""
        self._leases.lose(lease)
        shards = self._survivors(lease, wall, failed=True)
        for groups in shards:
            self._ledger.move(State.LEASED, State.QUEUED, len(groups))
            if lease.rewound:
                continue
            for group in groups:
                lane = self._leave(False, group)
                lane.rewinding.add(group)
                self._lanes.let_go(group)
                self._retained.charge(group.header.nbytes)
        return Returning(shards, lease.short)

    def reset(self, wall: float) -> None:
        """Discard what is queued, leased or on its way back; what was trained stays counted as that."""
        for lease in self._leases:
            self._discard(lease.groups, State.LEASED, wall)
        for lane in self._lanes:
            self._discard(lane.in_order(), State.QUEUED, wall)
        for batch in self._retained.all_returning():
            self._discard(batch.groups, State.QUEUED, wall)
        self._ledger.forgotten += sum(
            state is State.TRAINED for batch in self._retained.all_kept() for _, state in batch.members()
        )
        self._leases.clear()
        self._retained.clear()
        self._lanes.clear()
        self._former.forget()

    def _discard(self, groups: Iterable[StoredGroup], state: State, wall: float) -> None:
        for group in groups:
            self._ledger.move(state, State.DISCARDED, reason="reset")
            self._outbox.dropped(wall, group.header.group_id, State.DISCARDED.value, "reset")
