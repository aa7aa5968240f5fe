"""Lanes: the queue of one environment and split, indexed by the size of its groups.

The cost of a pull does not grow with the length of a queue: groups of one size lie in one deque, oldest first, and a
batch is composed from counts of sizes.

Where stale groups are dropped, the order is by the oldest policy version, then by acceptance: the first group has the
least time left. Where stale groups pass, the order is by acceptance alone. A returned group takes its old place. A
suspect, a group with one delivery left, lies apart because it is delivered alone.

A lane counts its queued and leased groups. Rewound groups are counted apart, because their bytes belong to
`retain_bytes`.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from operator import attrgetter
from typing import Any, Final

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare, LaneTotals, total
from rolloutmq.services.broker.state.groups import Groups, lane_text
from rolloutmq.services.broker.state.rates import Rate
from rolloutmq.services.broker.state.split_queue import GroupSums, Load, SplitQueue

UNCONFIGURED: Final = EnvironmentConfig(entry="unknown:Unknown")
"""Rule of an environment without a configuration section."""
NO_MARK: Final = 1 << 62
"""Room of a lane without a mark of its own."""
LONGEST_S: Final = 86_400.0
"""Longest plausible rollout; a longer one has a wrong clock."""
NEW_PART: Final = 0.1
"""Weight of a new group in the mean rollout time."""
_order: Final = attrgetter("order")


def _deadline(group: StoredGroup) -> tuple[PolicyVersion, int]:
    return group.header.oldest, group.order


def _turn(group: StoredGroup) -> tuple[int, int]:
    """Order suspects: the one accused most often, then the oldest."""
    return -group.failures, group.order


class Lane:
    """One environment's queue and its share of batches."""

    def __init__(
        self,
        env: str,
        split: Split,
        rule: EnvironmentConfig,
        now: float,
        last_chance: int = 1 << 30,
        all_: SplitQueue[Any] | None = None,
    ) -> None:
        self.env = env
        self._last_chance = last_chance
        self.split = split
        self.text = lane_text(env, split)
        self.rule = rule
        self._key: Callable[[StoredGroup], Any] = _deadline if rule.stale == "drop" else _order
        self._all: SplitQueue[Lane] = SplitQueue() if all_ is None else all_
        self._weight = rule.weight
        self._min_share = rule.min_share
        self._connected = True
        self._carry = 0.0
        self._carry_at = self._all.fair_clock
        self.part = 0.0
        """Its part of every batch, by weight or minimum share; see `SplitQueue`."""
        self.number = self._all.add(self)
        """Place among the lanes of its split, in the order of their first use."""
        self.group_size = rule.group_size
        self.queued = Load(self._all.queued)
        self.leased = Load()
        self.rewinding = Load()
        """Groups of rewound batches, waiting or leased again."""
        self.granted_bytes = 0
        """Bytes live producers may send, not yet arrived."""
        self.granted = 0
        """Rollouts live producers may start or have started, not yet arrived."""
        self.accepted_groups = 0
        self.trained_groups = 0
        self.accepted_sequences = 0
        self.settled_sequences = 0
        """Both in this life of the broker."""
        self.rewards = Moments()
        """Moments of the scores of every group that it accepted. A requeued group was counted before."""
        self.rollout_s = 0.0
        """Mean rollout time of a group; 0 until a group reports one."""
        self.largest_bytes = 0
        self.arrived_at = now
        """When it last got a group, or its first producer."""
        self.arrivals = Rate()
        self.sizes: dict[int, deque[StoredGroup]] = {}
        self.suspects: list[StoredGroup] = []
        """Queued groups with one delivery left, in the order of their deliveries; not in `sizes`."""

    @property
    def weight(self) -> float:
        """Share of the batches, relative to the other connected lanes."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = weight
        self._all.version += 1

    @property
    def min_share(self) -> float:
        """Part of every batch reserved for the lane."""
        return self._min_share

    @min_share.setter
    def min_share(self, min_share: float) -> None:
        self._min_share = min_share
        self._all.version += 1

    @property
    def connected(self) -> bool:
        """Whether its environment was not disconnected."""
        return self._connected

    @connected.setter
    def connected(self, connected: bool) -> None:
        self._connected = connected
        self._all.version += 1

    @property
    def carry(self) -> float:
        """Sequences (or tokens) that batches still owe the lane; negative if it had more than its part.

        A lane that was empty at a batch is owed nothing, unless it has a minimum share.
        """
        passed = self._all.fair_clock - self._carry_at
        if passed and not self.sizes and not self._min_share:
            return 0.0
        return min(self._all.batch, self._carry + self.part * passed)

    @carry.setter
    def carry(self, carry: float) -> None:
        self._carry, self._carry_at = carry, self._all.fair_clock

    def owed_after(self, batch: int) -> float:
        """Return the carry of a lane with groups, and its part of one more batch."""
        grown = self._carry + self.part * (self._all.fair_clock - self._carry_at)
        return min(self._all.batch, grown) + self.part * batch

    def set_part(self, part: float) -> None:
        """Change its part of every batch from now on."""
        self.carry, self.part = self.carry, part

    def _queue(self, size: int) -> deque[StoredGroup]:
        """Return the queue of a size, made on first use."""
        queue = self.sizes.get(size)
        if queue is None:
            if not self.sizes and self._carry_at != self._all.fair_clock:
                self.carry = self.carry  # nothing for the batches while it was empty
            queue = self.sizes[size] = deque()
            self._all.size_came(self, size)
        return queue

    def _emptied(self, size: int) -> None:
        """Remove the queue of a size."""
        if len(self.sizes) == 1 and self._carry_at != self._all.fair_clock:
            self.carry = self.carry
        del self.sizes[size]
        self._all.size_went(self, size)

    def _note_suspects(self) -> None:
        if self.suspects:
            self._all.suspected[self] = None
        else:
            self._all.suspected.pop(self, None)

    def adopt(self, rule: EnvironmentConfig, fixed: Container[str]) -> None:
        """Apply another rule; a weight or minimum share that is not `fixed` stays as its producer set it."""
        reordered, self.rule = rule.stale != self.rule.stale, rule
        if "weight" in fixed:
            self.weight = rule.weight
        if "min_share" in fixed and self.connected:
            self.min_share = rule.min_share
        if reordered:
            self._key = _deadline if rule.stale == "drop" else _order
            self.sizes = {size: deque(sorted(queue, key=self._key)) for size, queue in self.sizes.items()}

    def accept(self, groups: Sequence[StoredGroup], sums: GroupSums, now: float) -> None:
        """Queue new groups, in the order of their acceptance; `sums` are theirs. `count` has to follow."""
        self.arrived_at = now
        size = groups[0].header.sequences
        alike = True
        for group in groups:
            if group.header.sequences != size or group.failures:
                alike = False
        if sums.largest > self.largest_bytes:
            self.note_size(sums.largest)
        queue = self.sizes.get(size)
        if alike and ((queue is None and len(groups) == 1) or self._in_turn(groups, queue)):
            (self._queue(size) if queue is None else queue).extend(groups)
            self.queued.count(sums)
        else:
            for group in groups:
                self.append(group)

    def count(self, sums: GroupSums, now: float) -> None:
        """Count accepted groups, and note how long their rollouts took."""
        self.accepted_groups += sums.groups
        self.accepted_sequences += sums.sequences
        self.arrivals.add(sums.groups, now)
        rollout_s = self.rollout_s
        for header in sums.headers:
            took_s = header.finished_at - header.started_at
            if header.started_at and 0.0 <= took_s <= LONGEST_S:
                rollout_s += (took_s - rollout_s) * (NEW_PART if rollout_s else 1.0)
        self.rollout_s = rollout_s

    def _in_turn(self, groups: Sequence[StoredGroup], queue: deque[StoredGroup] | None) -> bool:
        """Return whether new groups of one size follow each other, and the last one in the queue of their size."""
        key = self._key
        if queue is not None and key(queue[-1]) > key(groups[0]):
            return False
        if len(groups) == 1:
            return True
        keys = [key(group) for group in groups]
        return sorted(keys) == keys

    def note_size(self, nbytes: int) -> None:
        """Note the size of a group in bytes."""
        if nbytes > self.largest_bytes:
            self.largest_bytes = nbytes
            self._all.largest_bytes = max(self._all.largest_bytes, nbytes)

    def append(self, group: StoredGroup) -> None:
        """Queue a group in its order among groups of its size; quick near both ends."""
        if self.suspected(group):
            self.put_back([group])
            return
        queue = self._queue(group.header.sequences)
        if queue and self._key(queue[-1]) > self._key(group):
            queue.insert(bisect_right(queue, self._key(group), key=self._key), group)
        else:
            queue.append(group)
        self.queued.add(group)

    def suspected(self, group: StoredGroup) -> bool:
        """Return whether one more failure ends the group: then the failure must be its own."""
        return 0 < group.failures >= self._last_chance

    def accused(self, group: StoredGroup) -> bool:
        """Return whether a suspect has failed again, where another group may have been at fault."""
        return group.failures > self._last_chance

    def would_be_suspected(self, group: StoredGroup, failed: bool) -> bool:
        """Return whether a group is a suspect after its lease is lost."""
        return 0 < group.failures + failed >= self._last_chance

    def holds(self, group: StoredGroup) -> bool:
        """Return whether a group is queued here; quick near the head."""
        if self.suspected(group):
            return group in self.suspects
        return group in self.sizes.get(group.header.sequences, ())

    def remove(self, group: StoredGroup) -> None:
        """Remove one queued group; quick near the head."""
        if self.suspected(group):
            self.suspects.remove(group)
            self._note_suspects()
        else:
            size = group.header.sequences
            queue = self.sizes[size]
            queue.remove(group)
            if not queue:
                self._emptied(size)
        self.queued.add(group, -1)

    def take(self, size: int, count: int) -> BatchShare:
        """Remove the `count` groups of a size whose turn is first; there must be enough. They are sorted by age."""
        queue = self.sizes[size]
        if count == 1:
            taken = [queue.popleft()]
        else:
            taken = [queue.popleft() for _ in range(count)]
            taken.sort(key=_order)
        if not queue:
            self._emptied(size)
        totals = total(taken)
        self.queued.count(totals, -1)
        return BatchShare(taken, (totals,))

    def put_back(self, groups: Iterable[StoredGroup]) -> None:
        """Return groups to their old places in the queue."""
        back: dict[int, list[StoredGroup]] = {}
        for group in groups:
            self.queued.add(group)
            if self.suspected(group):
                insort(self.suspects, group, key=_turn)
                self._note_suspects()
            else:
                back.setdefault(group.header.sequences, []).append(group)
        for size, returned in back.items():
            returned.sort(key=self._key)
            queue = self._queue(size)
            if queue and self._key(queue[0]) < self._key(returned[-1]):
                self.sizes[size] = deque(merge(returned, queue, key=self._key))
            else:
                queue.extendleft(reversed(returned))

    def in_order(self) -> Iterator[StoredGroup]:
        """Yield the queued groups, oldest first."""
        if len(self.sizes) == 1 and not self.suspects:
            return iter(next(iter(self.sizes.values())))
        return merge(sorted(self.suspects, key=self._key), *self.sizes.values(), key=self._key)

    def counts(self, largest: int) -> dict[int, int]:
        """Return the number of groups of each size up to `largest`, the oldest size first; suspects aside."""
        usable = [size for size in self.sizes if size <= largest]
        if len(usable) > 1:
            usable.sort(key=lambda size: self._key(self.sizes[size][0]))
        return {size: len(self.sizes[size]) for size in usable}

    def heads(self, sizes: Iterable[int]) -> Iterator[StoredGroup]:
        """Yield the groups of some sizes, oldest first; suspects aside."""
        queues = [self.sizes[size] for size in sizes]
        return iter(queues[0]) if len(queues) == 1 else merge(*queues, key=self._key)

    def oldest_above(self, sequences: int) -> StoredGroup | None:
        """Return the oldest group with more than so many sequences, suspects aside."""
        heads = (queue[0] for size, queue in self.sizes.items() if size > sequences)
        return min(heads, key=self._key, default=None)

    def oldest(self) -> StoredGroup | None:
        """Return the head of the queue."""
        heads = [queue[0] for queue in self.sizes.values()] + self.suspects
        return min(heads, key=self._key, default=None)

    @property
    def pending_sequences(self) -> int:
        """Sequences between permit and settlement; rollouts under way count at their usual size."""
        waiting = self.queued.sequences + self.leased.sequences + self.rewinding.sequences
        return waiting + self.granted * self.group_size

    @property
    def held_bytes(self) -> int:
        """Bytes queued or leased."""
        return self.queued.nbytes + self.leased.nbytes

    @property
    def room(self) -> int:
        """Bytes the lane's mark leaves to grant; below 0 if the mark was lowered."""
        mark = self.rule.high_bytes
        return mark - self.held_bytes - self.granted_bytes if mark else NO_MARK

    @property
    def room_groups(self) -> int:
        """Groups of usual size the lane's mark leaves to start; an empty lane may always start one."""
        mark, usual = self.rule.high_bytes, self.usual_bytes
        if not mark or not usual:
            return NO_MARK
        return max((mark - self.held_bytes) // usual, not self.held_bytes) - self.granted

    @property
    def usual_bytes(self) -> int:
        """Present bytes of one group; 0 before the first."""
        groups = self.queued.groups + self.leased.groups
        return self.held_bytes // groups if groups else self.largest_bytes

    @property
    def full(self) -> bool:
        """Whether the lane's mark may leave no room for another group."""
        return bool(self.rule.high_bytes) and self.held_bytes + self.largest_bytes > self.rule.high_bytes

    def silent(self, now: float, limit_s: float) -> bool:
        """Return whether no group arrived for so long that other lanes need not wait for this one."""
        return now - self.arrived_at > limit_s

    def validate(self) -> None:
        """Assert that the counts are those of the containers."""
        load = Load()
        assert self.suspects == sorted(self.suspects, key=_turn)
        for group in self.suspects:
            assert self.suspected(group)
            load.add(group)
        for size, queue in self.sizes.items():
            assert queue, f"empty deque for size {size}"
            keys = [self._key(group) for group in queue]
            assert keys == sorted(keys), f"{self.env}: size {size} out of order"
            for group in queue:
                assert group.header.sequences == size
                assert not self.suspected(group)
                load.add(group)
        assert load.as_tuple() == self.queued.as_tuple(), self.env
        assert min(self.leased.as_tuple() + self.rewinding.as_tuple()) >= 0, self.env
        assert min(self.granted, self.granted_bytes) >= 0, self.env


class Lanes:
    """All lanes, and their sums."""

    def __init__(
        self,
        environments: dict[str, EnvironmentConfig],
        groups: Groups,
        last_chance: int = 1 << 30,
        other: EnvironmentConfig = UNCONFIGURED,
        evaluated: Container[str] = (),
    ) -> None:
        self._evaluated = evaluated
        self._rules = environments
        self._other = other
        self._fixed: dict[str, Container[str]] = dict.fromkeys(environments, ("weight", "min_share"))
        self._configured = frozenset(environments)
        self._groups = groups
        self._last_chance = last_chance
        self._lanes: dict[tuple[str, Split], Lane] = {}
        self._splits: dict[Split, SplitQueue[Lane]] = {split: SplitQueue() for split in Split}
        self.settled: set[Lane] = set()
        """Lanes that let a group go since the set was cleared."""
        self.held_groups = 0
        """Groups queued or leased, without rewound batches."""
        self.held_bytes = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def __len__(self) -> int:
        return len(self._lanes)

    def find(self, env: str, split: Split) -> Lane | None:
        return self._lanes.get((env, split))

    def open(self, env: str, split: Split, now: float) -> Lane:
        """Return the lane, made on first use by the configuration's rule."""
        lane = self._lanes.get((env, split))
        if lane is None:
            rule = self._rule(env, split, self._rules.get(env, self._other))
            lane = Lane(env, split, rule, now, self._last_chance, self._splits[split])
            self._lanes[env, split] = lane
        return lane

    def remove(self, lane: Lane) -> None:
        """Forget a lane without groups; a later group of its environment opens a new one."""
        del self._lanes[lane.env, lane.split]
        self._splits[lane.split].remove(lane)
        self.settled.discard(lane)

    def configured(self, env: str) -> bool:
        """Return whether the configuration has a section for the environment; it then wins over a producer."""
        return env in self._configured

    def adopt(self, environments: dict[str, EnvironmentConfig], fixed: Mapping[str, Container[str]]) -> None:
        """Apply other rules.

        Args:
            environments: The rules, including those of environments without a configuration section.
            fixed: Fields of those that win over a producer's values.
        """
        self._rules = environments
        self._fixed |= {env: fields for env, fields in fixed.items() if env not in self._configured}
        for lane in self:
            if lane.env in environments:
                rule = self._rule(lane.env, lane.split, environments[lane.env])
                lane.adopt(rule, self._fixed.get(lane.env, ()))

    def _rule(self, env: str, split: Split, given: EnvironmentConfig) -> EnvironmentConfig:
        """Return the rule of a lane.

        Groups that answer `[evaluation]`, or that a training environment makes for evaluation, are not paced: they wait
        for no step. An environment of split `eval` that a trainer pulls from is.
        """
        aside = split is Split.EVAL and (given.split == "train" or env in self._evaluated)
        return given.model_copy(update={"pacing": False}) if aside else given

    def apply_producer_settings(self, lane: Lane, weight: float, min_share: float, group_size: int) -> None:
        """Adopt a producer's values for its environment, where the configuration and live settings have none."""
        fixed = self._fixed.get(lane.env, ())
        lane.weight = lane.rule.weight if "weight" in fixed else weight
        lane.min_share = lane.rule.min_share if "min_share" in fixed else min_share
        if not self.configured(lane.env):
            lane.group_size = group_size

    def of(self, group: StoredGroup) -> Lane:
        """Return the lane a stored group belongs to."""
        return self._lanes[group.env, group.split]

    def of_split(self, split: Split) -> SplitQueue[Lane]:
        """Return the lanes of a split and their totals."""
        return self._splits[split]

    def versions(self) -> tuple[int, ...]:
        """Return the versions of all splits: they change with each weight, minimum share and connection."""
        return tuple([queue.version for queue in self._splits.values()])

    def accept(self, lane: Lane, groups: Sequence[StoredGroup], sums: GroupSums, now: float) -> None:
        """Queue new groups of a lane and give them their orders; `sums` are theirs."""
        self._groups.add(*groups)
        self.held_groups += sums.groups
        self.held_bytes += sums.nbytes
        lane.accept(groups, sums, now)

    def suspect(self, split: Split) -> StoredGroup | None:
        """Return the suspect to deliver next: the one accused most often, then the oldest."""
        suspected = self._splits[split].suspected
        return min([lane.suspects[0] for lane in suspected], key=_turn) if suspected else None

    def put_back(self, groups: Iterable[StoredGroup]) -> None:
        """Return groups to their old places in their queues."""
        back: dict[Lane, list[StoredGroup]] = {}
        for group in groups:
            back.setdefault(self.of(group), []).append(group)
        for lane, returned in back.items():
            lane.put_back(returned)

    def let_go(self, lane: Lane, groups: LaneTotals) -> None:
        """Count out the bytes of groups of a lane that are neither queued nor leased any more."""
        self.held_groups -= groups.groups
        self.held_bytes -= groups.nbytes
        self.settled.add(lane)

    def queued_sequences(self, split: Split) -> int:
        return self._splits[split].queued.sequences

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest group that any of the lanes has had."""
        return max(queue.largest_bytes for queue in self._splits.values())

    def clear(self) -> None:
        """Remove every lane and its groups."""
        self._lanes.clear()
        self._splits = {split: SplitQueue() for split in Split}
        self.settled.clear()
        self.held_groups = self.held_bytes = 0

    def validate(self) -> None:
        for lane in self:
            lane.validate()
        for queue in self._splits.values():
            queue.validate()
        loads = [(lane.queued, lane.leased) for lane in self]
        assert self.held_groups == sum(q.groups + leased.groups for q, leased in loads)
        assert self.held_bytes == sum(q.nbytes + leased.nbytes for q, leased in loads)
