"""Hops of groups as they happen: durations by environment and split, for the latency sample of the broker. Pure.

    rollout, send   counted as the broker accepts the group
    queue           as a consumer is handed the group for the first time
    train           as its settlement arrives
    commit          as a checkpoint covers it

They are those of the journal (`journal.inspect.hops`), at every durability; hops that began in an earlier life of the
broker are left out, except `queue` of a group that was not yet handed out. All times are wall-clock seconds.

Groups are counted in blocks, soon after they came or were handed out: the processor has them in its cache still, and
to read them from memory again costs more than to count them. What does not change on the way of a batch, its
environments and its tokens, is added up once for all of its hops (`BatchShare`).

In each sample, the first `SINGLY` groups of an environment count one by one in `rollout`, `send` and `queue`. Of those
after them, each `STRIDE`-th counts, for that many. `train` and `commit` are durations of a whole batch, and always
count every group.

A worker on another host has another clock. It measures the offset to the broker's clock with its heartbeats, and `send`
is corrected by it; the row carries the bound of the error.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from typing import Final

from rolloutmq.bus.evaluation.plan import answering_producer
from rolloutmq.schemas.config.base import PROCESSES_LIMIT
from rolloutmq.schemas.wire.control import WorkerBeat
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import BROKER, Hop, LatencySample
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare, is_one_env
from rolloutmq.services.process.clock_log import Measured
from rolloutmq.services.process.latency_recorder import LatencyKey, LatencyRecorder, RowRecorder

GATHERED: Final = 128
"""New groups that are counted together: many enough, and with their frames in the processor's second-level cache."""
DELIVERED: Final = 4 * GATHERED
"""Most groups that were handed out and wait for `gather`, before those of the last batch."""
SINGLY: Final = 256
"""Groups of an environment in a sample that count one by one; see above."""
STRIDE: Final = 16
MIXED: Final = 0
"""In place of what each group stands for: they are of several environments, and not yet thinned."""
ALL: Final = slice(None), 1
"""Places and times where each group counts for itself."""
CLOCKS_LIMIT: Final = 2 * PROCESSES_LIMIT
"""Most producers on other hosts: two of each worker."""


class Thinning:
    """Places of the groups that count, in one hop of one environment since the last sample."""

    __slots__ = ("_seen", "_skipped")

    def __init__(self) -> None:
        self._seen = 0
        self._skipped = STRIDE // 2
        """Groups before the next one that counts: half a stride, so that the sums are too high as often as too low."""

    def places(self, groups: int) -> tuple[slice, int] | None:
        """Return the places to count among so many groups that follow, and how many each stands for.

        None if there is none, as for most messages of a single group.
        """
        if self._seen < SINGLY:
            self._seen += groups
            return ALL
        begin = self._skipped
        if begin >= groups:
            self._skipped = begin - groups
            return None
        self._skipped = (begin - groups) % STRIDE
        return slice(begin, None, STRIDE), STRIDE


class GroupHops:
    """Durations of the hops of all groups since the last sample.

    Args:
        host: Name of the broker's host; empty if it is not known, and then no clock is corrected.
        enabled: Whether anything is measured.
    """

    def __init__(self, host: str = "", *, enabled: bool = True) -> None:
        self._host = host
        self._enabled = enabled
        self._recorder = LatencyRecorder(BROKER, 0.0, host=host, id_of=_id_of, enabled=enabled)
        self._has_begun = False
        self._arrived: list[StoredGroup] = []
        """New groups that count one by one; `gather` counts them."""
        self._thinned: list[StoredGroup] = []
        """New groups of which each counts for `STRIDE`."""
        self._delivered: list[tuple[Sequence[StoredGroup], list[float], int]] = []
        """Groups that were handed out for the first time, their waits, and how many each stands for or `MIXED`."""
        self.uncounted = 0
        """Number of new groups that `gather` has yet to count."""
        self._delivered_groups = 0
        self._thinnings: defaultdict[tuple[Hop, str, Split], Thinning] = defaultdict(Thinning)
        self._rows: dict[tuple[Hop, str, Split], RowRecorder] = {}
        self._clocks: dict[str, Measured] = {}

    def __bool__(self) -> bool:
        """Whether anything was measured since the last sample."""
        return bool(self._arrived or self._thinned or self._delivered or self._recorder)

    def heard(self, beat: WorkerBeat) -> None:
        """Note the clock of a worker; one on this host has that of the broker.

        Until another host's worker tells its offset, the way of its groups is not known, and not counted.
        """
        names = beat.worker, answering_producer(beat.worker)
        for name in names:
            self._clocks.pop(name, None)
        if self._host and beat.host not in {"", self._host}:
            offset_s = beat.clock_offset_s if beat.clock_error_s else nan
            self._clocks |= dict.fromkeys(names, Measured(offset_s, beat.clock_error_s))
            while len(self._clocks) > CLOCKS_LIMIT:  # the one that was heard of longest ago
                del self._clocks[next(iter(self._clocks))]

    @property
    def clocks(self) -> Mapping[str, Measured]:
        """Clocks of the producers of other hosts."""
        return self._clocks

    @property
    def ungathered(self) -> int:
        """Number of groups that `gather` has yet to count: new ones, and those handed out."""
        return self.uncounted + self._delivered_groups

    def accepted(self, groups: Sequence[StoredGroup]) -> None:
        """Note new groups of one producer."""
        if not self._enabled:
            return
        first = groups[0]
        counted = self._thinnings[Hop.SEND, first.env, first.split].places(len(groups))
        if counted is None:
            return
        places, times = counted
        if times == 1:
            self._arrived += groups
            self.uncounted += len(groups)
        else:
            found = groups[places]
            self._thinned += found
            self.uncounted += len(found)

    def gather(self) -> None:
        """Count rollout and way of the new groups, and the time in the queue of those handed out.

        A time of 0 is unknown: the group was built without it.
        """
        self._gather_delivered()
        arrived, self._arrived = self._arrived, []
        thinned, self._thinned = self._thinned, []
        self.uncounted = 0
        for groups in _by_lane(arrived):
            self._count_arrived(groups, 1)
        for groups in _by_lane(thinned):
            self._count_arrived(groups, STRIDE)

    def _count_arrived(self, groups: Sequence[StoredGroup], times: int) -> None:
        headers = [group.header for group in groups]
        tokens = times * sum([header.tokens for header in headers])
        rolled_s = [one.finished_at - (one.started_at or nan) for one in headers]
        self._row(Hop.ROLLOUT, groups[0]).extend(rolled_s, tokens, groups, times)
        if self._clocks:
            groups = self._count_sent_from_elsewhere(groups, times)
            tokens = times * _tokens(groups)
            if not groups:
                return
        sent_s = [one.accepted_wall - (one.header.finished_at or nan) for one in groups]
        self._row(Hop.SEND, groups[0]).extend(sent_s, tokens, groups, times)

    def handed_out(self, share: BatchShare, wall: float) -> None:
        """Note the groups that are handed out; one that was delivered before does not count."""
        if not self._enabled:
            return
        if self._delivered_groups >= DELIVERED:
            self._gather_delivered()
        groups, times = share.groups, MIXED
        if len(share.lanes) == 1:
            first = groups[0]
            counted = self._thinnings[Hop.QUEUE, first.env, first.split].places(len(groups))
            if counted is None:
                return
            places, times = counted
            if times != 1:
                groups = groups[places]
        groups = [group for group in groups if group.deliveries == 1]
        self._delivered.append((groups, [wall - group.accepted_wall for group in groups], times))
        self._delivered_groups += len(groups)

    def _gather_delivered(self) -> None:
        delivered, self._delivered, self._delivered_groups = self._delivered, [], 0
        for groups, waited_s, times in delivered:
            if times != MIXED:
                self._count_waits(groups, waited_s, times)
                continue
            lanes: defaultdict[str, tuple[list[StoredGroup], list[float]]] = defaultdict(lambda: ([], []))
            for group, seconds in zip(groups, waited_s, strict=True):
                members, waits_s = lanes[group.env]
                members.append(group)
                waits_s.append(seconds)
            for members, waits_s in lanes.values():
                first = members[0]
                counted = self._thinnings[Hop.QUEUE, first.env, first.split].places(len(members))
                if counted is not None:
                    places, each = counted
                    self._count_waits(members[places], waits_s[places], each)

    def _count_waits(self, groups: Sequence[StoredGroup], waited_s: Sequence[float], times: int) -> None:
        if groups:
            tokens = times * _tokens(groups)
            self._row(Hop.QUEUE, groups[0]).extend(waited_s, tokens, groups, times)

    def settled(self, share: BatchShare, seconds: float) -> None:
        """Count the time with the trainer of groups that were handed out together; NaN if it is not known."""
        self._repeat(Hop.TRAIN, share, seconds)

    def committed(self, share: BatchShare, seconds: float) -> None:
        """Count the time from the settlement of a batch to the checkpoint that covers it."""
        self._repeat(Hop.COMMIT, share, seconds)

    def samples(self, wall: float) -> list[LatencySample]:
        """Return what was measured since the last call. The first one begins, and returns nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._recorder.begin(wall)
            return []
        self.gather()
        self._rows.clear()
        self._thinnings.clear()
        return self._recorder.samples(wall)

    def _count_sent_from_elsewhere(self, groups: Sequence[StoredGroup], times: int) -> Sequence[StoredGroup]:
        """Count groups of producers with another clock; return the others."""
        others: list[StoredGroup] = []
        for group in groups:
            clock = self._clocks.get(group.producer)
            if clock is None:
                others.append(group)
                continue
            row = self._row(Hop.SEND, group)
            sent_s = group.accepted_wall - (group.header.finished_at or nan) - clock.offset_s
            row.repeat(sent_s, times, times * group.header.tokens, group)
            row.clock_error_s = max(row.clock_error_s, clock.error_s)
        return others

    def _repeat(self, hop: Hop, share: BatchShare, seconds: float) -> None:
        """Count groups of one duration."""
        if self._enabled and not isnan(seconds):
            for lane in share.lanes:
                self._row(hop, lane.first).repeat(seconds, lane.groups, lane.tokens, lane.first)

    def _row(self, hop: Hop, group: StoredGroup) -> RowRecorder:
        """Return the row of a group, kept until the next sample: to make a key takes a microsecond."""
        name = hop, group.env, group.split
        if (row := self._rows.get(name)) is None:
            row = self._rows[name] = self._recorder.row(LatencyKey(*name))
        return row


def _tokens(groups: Sequence[StoredGroup]) -> int:
    return sum([group.header.tokens for group in groups])


def _by_lane(groups: Sequence[StoredGroup]) -> Iterable[Sequence[StoredGroup]]:
    """Yield the groups of each environment and split."""
    if not groups:
        return ()
    if is_one_env(groups) and len({group.split for group in groups}) == 1:
        return (groups,)
    lanes: defaultdict[tuple[str, int], list[StoredGroup]] = defaultdict(list)
    for group in groups:
        lanes[group.env, group.split].append(group)
    return lanes.values()


def _id_of(group: StoredGroup) -> str:
    return group.header.group_id
