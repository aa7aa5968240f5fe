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
CLOCKS_LIMIT: Final = 2 * PROCESSES_LIMIT
"""Most producers on other hosts: two of each worker."""


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
        self.arrived: list[StoredGroup] = []
        """New groups, appended as they are accepted; `gather` counts them."""
        self._delivered: list[tuple[BatchShare, list[float]]] = []
        """Groups that were handed out for the first time, and their waits; `gather` counts them, behind the reply."""
        self._delivered_groups = 0
        self._rows: dict[tuple[Hop, str, Split], RowRecorder] = {}
        self._clocks: dict[str, Measured] = {}

    def __bool__(self) -> bool:
        """Whether anything was measured since the last sample."""
        return bool(self.arrived or self._delivered or self._recorder)

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
        return len(self.arrived) + self._delivered_groups

    def gather(self) -> None:
        """Count rollout and way of the new groups, and the time in the queue of those handed out.

        A time of 0 is unknown: the group was built without it.
        """
        self._gather_delivered()
        arrived, self.arrived = self.arrived, []
        if not self._enabled:
            return
        for groups in _by_lane(arrived):
            headers = [group.header for group in groups]
            tokens = sum([header.tokens for header in headers])
            rolled_s = [one.finished_at - (one.started_at or nan) for one in headers]
            self._row(Hop.ROLLOUT, groups[0]).extend(rolled_s, tokens, groups)
            if self._clocks:
                groups = self._count_sent_from_elsewhere(groups)
                tokens = _tokens(groups)
                if not groups:
                    continue
            sent_s = [one.accepted_wall - (one.header.finished_at or nan) for one in groups]
            self._row(Hop.SEND, groups[0]).extend(sent_s, tokens, groups)

    def handed_out(self, share: BatchShare, wall: float) -> None:
        """Note the groups that are handed out; one that was delivered before does not count."""
        if not self._enabled:
            return
        if self._delivered_groups >= DELIVERED:
            self._gather_delivered()
        groups = share.groups
        waited_s = [wall - group.accepted_wall for group in groups if group.deliveries == 1]
        if len(waited_s) < len(groups):
            share = BatchShare([group for group in groups if group.deliveries == 1])
        self._delivered.append((share, waited_s))
        self._delivered_groups += len(waited_s)

    def _gather_delivered(self) -> None:
        delivered, self._delivered, self._delivered_groups = self._delivered, [], 0
        for share, waited_s in delivered:
            groups, lanes = share.groups, share.lanes
            if len(lanes) == 1:
                self._row(Hop.QUEUE, groups[0]).extend(waited_s, lanes[0].tokens, groups)
                continue
            for group, seconds in zip(groups, waited_s, strict=True):
                self._row(Hop.QUEUE, group).add(seconds, group.header.tokens, group)

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
        return self._recorder.samples(wall)

    def _count_sent_from_elsewhere(self, groups: Sequence[StoredGroup]) -> Sequence[StoredGroup]:
        """Count groups of producers with another clock; return the others."""
        others: list[StoredGroup] = []
        for group in groups:
            clock = self._clocks.get(group.producer)
            if clock is None:
                others.append(group)
                continue
            row = self._row(Hop.SEND, group)
            sent_s = group.accepted_wall - (group.header.finished_at or nan) - clock.offset_s
            row.add(sent_s, group.header.tokens, group)
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
