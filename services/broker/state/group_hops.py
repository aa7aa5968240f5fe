"""Hops of groups as they happen: durations by environment and split, for the latency sample of the broker. Pure.

    rollout, send   counted as the broker accepts the group
    queue           as a consumer is handed the group for the first time
    train           as its settlement arrives
    commit          as a checkpoint covers it

They are those of the journal (`journal.inspect.hops`), at every durability; hops that began in an earlier life of the
broker are left out, except `queue` of a group that was not yet handed out. Durations are gathered group by group and
become histograms in blocks. All times are wall-clock seconds.

A worker on another host has another clock. It measures the offset to the broker's clock with its heartbeats, and `send`
is corrected by it; the row carries the bound of the error.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isnan, nan
from typing import Final

import msgspec

from rolloutmq.bus.evaluation.plan import answering_producer
from rolloutmq.schemas.config.base import PROCESSES_LIMIT
from rolloutmq.schemas.wire.control import WorkerBeat
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop, LatencySample
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.process.latency_recorder import LatencyKey, LatencyRecorder

GATHERED: Final = 256
"""New groups that are counted together: many enough, and still in the cache of the processor."""
CLOCKS_LIMIT: Final = 2 * PROCESSES_LIMIT
"""Most producers on other hosts: two of each worker."""
BROKER: Final = "broker"
"""Name of the broker in its samples."""


class Clock(msgspec.Struct, frozen=True):
    """Clock of a producer on another host: seconds that the broker's is ahead, NaN if not known, and the bound of the
    error.
    """

    offset_s: float
    error_s: float


class GroupHops:
    """Durations of the hops of all groups since the last sample.

    Args:
        host: Name of the broker's host; empty if it is not known, and then no clock is corrected.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._recorder = LatencyRecorder(BROKER, 0.0, host=host, id_of=_id_of)
        self._has_begun = False
        self.arrived: list[StoredGroup] = []
        """New groups, appended as they are accepted; `gather` counts them."""
        self._keys: dict[tuple[Hop, str, Split], LatencyKey] = {}
        self._clocks: dict[str, Clock] = {}

    def __bool__(self) -> bool:
        """Whether anything was measured since the last sample."""
        return bool(self.arrived or self._recorder)

    def heard(self, beat: WorkerBeat) -> None:
        """Note the clock of a worker; one on this host has that of the broker.

        Until another host's worker tells its offset, the way of its groups is not known, and not counted.
        """
        names = beat.worker, answering_producer(beat.worker)
        for name in names:
            self._clocks.pop(name, None)
        if self._host and beat.host not in {"", self._host}:
            offset_s = beat.clock_offset_s if beat.clock_error_s else nan
            self._clocks |= dict.fromkeys(names, Clock(offset_s, beat.clock_error_s))
            while len(self._clocks) > CLOCKS_LIMIT:  # the one that was heard of longest ago
                del self._clocks[next(iter(self._clocks))]

    def gather(self) -> None:
        """Count rollout and way of the new groups; a time of 0 is unknown: the group was built without it."""
        accepted, self.arrived = self.arrived, []
        for groups in _by_lane(accepted):
            headers = [group.header for group in groups]
            tokens = sum([header.tokens for header in headers])
            rolled_s = [one.finished_at - (one.started_at or nan) for one in headers]
            self._extend(Hop.ROLLOUT, groups, rolled_s, tokens)
            if self._clocks:
                groups = self._count_sent_from_elsewhere(groups)
                tokens = sum([group.header.tokens for group in groups])
            sent_s = [one.accepted_wall - (one.header.finished_at or nan) for one in groups]
            self._extend(Hop.SEND, groups, sent_s, tokens)

    def handed_out(self, groups: Sequence[StoredGroup], wall: float) -> None:
        """Count the time in the queue of groups that are handed out; one that was delivered before does not count."""
        waited_s = [wall - group.accepted_wall for group in groups if group.deliveries == 1]
        if len(waited_s) < len(groups):
            groups = [group for group in groups if group.deliveries == 1]
        for of_groups, of_waited_s in _by_env(groups, waited_s):
            self._extend(Hop.QUEUE, of_groups, of_waited_s)

    def settled(self, groups: Sequence[StoredGroup], seconds: float) -> None:
        """Count the time with the trainer of groups that were handed out together; NaN if it is not known."""
        self._repeat(Hop.TRAIN, groups, seconds)

    def committed(self, groups: Sequence[StoredGroup], seconds: float) -> None:
        """Count the time from the settlement of a batch to the checkpoint that covers it."""
        self._repeat(Hop.COMMIT, groups, seconds)

    def samples(self, wall: float) -> list[LatencySample]:
        """Return what was measured since the last call. The first one begins, and returns nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._recorder.begin(wall)
            return []
        self.gather()
        self._keys.clear()
        return self._recorder.samples(wall)

    def _count_sent_from_elsewhere(self, groups: Sequence[StoredGroup]) -> Sequence[StoredGroup]:
        """Count groups of producers with another clock; return the others."""
        others: list[StoredGroup] = []
        for group in groups:
            clock = self._clocks.get(group.producer)
            if clock is None:
                others.append(group)
            else:
                seconds = group.accepted_wall - (group.header.finished_at or nan) - clock.offset_s
                self._extend(Hop.SEND, [group], [seconds], group.header.tokens, clock.error_s)
        return others

    def _extend(
        self,
        hop: Hop,
        groups: Sequence[StoredGroup],
        durations_s: Sequence[float],
        tokens: int | None = None,
        clock_error_s: float = 0.0,
    ) -> None:
        """Count groups of one environment and split."""
        if groups:
            tokens = _tokens(groups) if tokens is None else tokens
            self._recorder.extend(
                self._key(hop, groups[0]), durations_s, groups, tokens=tokens, clock_error_s=clock_error_s
            )

    def _repeat(self, hop: Hop, groups: Sequence[StoredGroup], seconds: float) -> None:
        """Count groups of one duration."""
        if isnan(seconds):
            return
        for of_env, _ in _by_env(groups, ()):
            key, tokens = self._key(hop, of_env[0]), _tokens(of_env)
            self._recorder.repeat(key, seconds, len(of_env), of_env[0], tokens=tokens)

    def _key(self, hop: Hop, group: StoredGroup) -> LatencyKey:
        """Return the key of a row: kept until the next sample, since making one costs as much as a dozen groups."""
        name = hop, group.env, group.split
        if (key := self._keys.get(name)) is None:
            key = self._keys[name] = LatencyKey(*name)
        return key


def _tokens(groups: Sequence[StoredGroup]) -> int:
    return sum([group.header.tokens for group in groups])


def _by_lane(groups: Sequence[StoredGroup]) -> Iterable[Sequence[StoredGroup]]:
    """Yield the groups of each environment and split."""
    if len({group.env for group in groups}) <= 1 and len({group.split for group in groups}) <= 1:
        return [groups]
    lanes: defaultdict[tuple[str, int], list[StoredGroup]] = defaultdict(list)
    for group in groups:
        lanes[group.env, group.split].append(group)
    return lanes.values()


def _by_env(
    groups: Sequence[StoredGroup], values: Sequence[float]
) -> Iterable[tuple[Sequence[StoredGroup], Sequence[float]]]:
    """Yield the groups of one pull, which are of one split, by environment, each with its value if there are any."""
    envs = {group.env for group in groups}
    if len(envs) == 1:
        yield groups, values
        return
    found: dict[str, tuple[list[StoredGroup], list[float]]] = {env: ([], []) for env in envs}
    for group in groups:
        found[group.env][0].append(group)
    for group, value in zip(groups, values, strict=False):
        found[group.env][1].append(value)
    yield from found.values()


def _id_of(group: StoredGroup) -> str:
    return group.header.group_id
