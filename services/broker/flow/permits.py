"""Rollout permits: how many rollouts a producer may start.

With pacing, the sequences of a lane between permit and settlement stay within `(max_staleness + 1) * batch_sequences
* share`. A rollout started now is then trained on at most `max_staleness` steps later. Sequences are counted as they
are, so groups smaller than announced never leave the trainer without a batch. A lane's permits are shared evenly
among its producers, each with at most its `slots` at once. Without pacing only the marks bind. Announced limits never
fall, but for a producer that pauses: the others get its unused permits.

With batches by tokens, a batch is as many sequences as the recent ones had on average. Once a lane's share of that is
queued but is less than its share of the tokens, because sequences got shorter, their own mean length counts. Pacing
therefore never holds back less than one budget.

The share is by weight among the environments that deliver. A silent environment is left out, so the others can
fill whole batches.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from math import ceil

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.services.broker.flow.credits import MANY, ByteCredits
from rolloutmq.services.broker.flow.sessions import ProducerSession
from rolloutmq.services.broker.state.queues import NO_MARK, Lane, Lanes


class RolloutPermits:
    """Grants permits to producers."""

    def __init__(self, lanes: Lanes, credits: ByteCredits, silent_env_s: float, batch: int) -> None:
        self.stalled = False
        """The journal cannot keep up: no permits are granted."""
        self._lanes = lanes
        self._credits = credits
        self._silent_env_s = silent_env_s
        self.batch_sequences = batch
        self.batch_tokens = 0
        """Token budget of a batch; 0 if batches are pulled by sequences."""
        self.behind = False
        """Some lanes were left out since the last `pace_all`."""
        self._short: set[Lane] = set()
        """Lanes without pacing whose producers have fewer permits than due: the marks left no more."""
        self._late: set[Lane] = set()
        """Lanes with many producers that were not paced at once."""
        self._lacking: set[Lane] = set()
        """Lanes some of whose producers had fewer permits than they may have, when they were paced."""
        self._due: set[Lane] = set()
        """Lanes that may have more permits than when they were paced."""
        self._paced_for: object = None
        """What all shares depend on, at the last `pace_all`."""
        self._active: dict[Split, _ActiveLanes] = {}

    def pace_all(self, now: float) -> None:
        """Grant permits in every lane."""
        self.behind = False
        self._short.clear()
        self._late.clear()
        self._paced_for = self._conditions()
        self._active = {split: self._active_lanes(split, now) for split in Split}
        self._take_due()
        for lane in self._lanes:
            self._pace(lane, self._active[lane.split].share(lane), now)

    def pace_urgent(self, now: float) -> None:
        """Grant permits where a producer may wait for them; elsewhere arrivals refill the windows.

        These are the lanes with arrivals or settled groups, and those that the marks held back. All lanes follow soon,
        or at once if the conditions of all shares have changed.
        """
        if self._paced_for != self._conditions():
            self.pace_all(now)
            return
        self.behind = True
        late, self._late = self._late, set()
        for lane in sorted(self._take_due() | self._short | late, key=lambda lane: lane.number):
            if lane.rule.pacing or lane in self._short or lane in late:
                self._pace(lane, self._active[lane.split].share(lane), now)

    def used_up(self, split: Split) -> bool:
        """Return whether no group of a split is under way, and none may be started before others are settled."""
        active = self._active.get(split)
        lanes = [lane for lane in self._lanes.of_split(split).lanes if lane.connected]
        if active is None or not lanes or any(lane.granted for lane in lanes):
            return False
        return all(self._free(lane, active.share(lane))[0] <= 0 for lane in lanes)

    def note(self, lane: Lane) -> None:
        """Note that a lane may have more permits."""
        self._due.add(lane)

    def _take_due(self) -> set[Lane]:
        due = self._due | self._lanes.settled
        self._due.clear()
        self._lanes.settled.clear()
        return due

    def _conditions(self) -> object:
        versions = self._lanes.versions()
        return self.batch_sequences, self.batch_tokens, self.stalled, self._silent_env_s, versions

    def _active_lanes(self, split: Split, now: float) -> "_ActiveLanes":
        return _ActiveLanes(lane for lane in self._lanes.of_split(split).lanes if self._delivers(lane, now))

    def pace(self, lane: Lane, now: float) -> bool:
        """Grant permits in one lane; return whether that has to follow with `pace_urgent`.

        It has for many producers: a fleet that comes back would else be paced once for each of its producers.
        """
        if len(self._credits.producers(lane)) < MANY:
            self._pace(lane, self._active_lanes(lane.split, now).share(lane), now)
            return False
        self._late.add(lane)
        return True

    def pace_new(self, session: ProducerSession, now: float) -> None:
        """Grant permits in the lane of a session that has just been registered; `pace_urgent` has to follow.

        Of many producers it gets some at once, unless others lack permits.
        """
        lane = session.lane
        if self.pace(lane, now) and lane not in self._lacking and session.begins:
            share = self._active_lanes(lane.split, now).share(lane)
            free = min(self._free(lane, share)[0], self._credits.starts(lane)[0])
            self._grant([session], free, paced=lane.rule.pacing)

    def clear(self) -> None:
        """Forget all lanes."""
        self._short.clear()
        self._late.clear()
        self._lacking.clear()
        self._due.clear()
        self._active.clear()
        self._paced_for = None

    def adopt(self, silent_env_s: float) -> None:
        """Apply another time limit for silent environments."""
        self._silent_env_s = silent_env_s

    def _delivers(self, lane: Lane, now: float) -> bool:
        return lane.connected and bool(lane.queued.groups or not lane.silent(now, self._silent_env_s))

    def _pace(self, lane: Lane, share: float, now: float) -> None:
        sessions = self._credits.producers(lane)
        open_ = [session for session in sessions if session.begins]
        free, reason = self._free(lane, share)
        room, full = self._credits.starts(lane)
        if room < free or not lane.rule.pacing:
            free, reason = min(free, room), full if not self.stalled else reason
        self._short.discard(lane)
        if self._grant(open_, free, paced=lane.rule.pacing):
            self._lacking.add(lane)
        else:
            self._lacking.discard(lane)
        # Without pacing a window is refilled when half of it is used: a session with less than all need not wait.
        held_back = lane.rule.pacing or lane in self._short
        idle = self._lacks_tasks(lane, sessions)
        for session in sessions:
            wait = self._credits.wait(session)
            fewer = held_back and session.starts_out < session.slots
            open_to_begin = session.begins and (self.stalled or fewer)
            if wait is Wait.NONE and idle and session.begins and (fewer or session.takes):
                wait = Wait.NO_TASKS  # permits without a task are unused: no limit is reached
            elif wait is Wait.NONE and open_to_begin:
                wait = reason
            if wait is not session.wait:
                session.wait = wait
                session.touch_later(now)

    def _lacks_tasks(self, lane: Lane, sessions: Iterable[ProducerSession]) -> bool:
        """Return whether producers with permits wait for tasks. Those of an evaluation do so until its next point."""
        return lane.split is Split.TRAIN and not self.stalled and any(session.takes for session in sessions)

    def _free(self, lane: Lane, share: float) -> tuple[int, Wait]:
        """Return how many more rollouts the lane may start, and the wait reason beyond that."""
        if self.stalled:
            return 0, Wait.JOURNAL_SLOW
        if not lane.rule.pacing:
            return NO_MARK, Wait.GLOBAL_FULL
        budget = (lane.rule.max_staleness + 1) * self._part(lane, share)
        free = ceil((budget - lane.pending_sequences) / lane.group_size - 1e-9)
        return max(0, free), Wait.STALE_GUARD

    def _part(self, lane: Lane, share: float) -> float:
        """Return the sequences of a batch that come from a lane."""
        part, queued = self.batch_sequences * share, lane.queued
        if self.batch_tokens and queued.sequences >= part:
            part = max(part, self.batch_tokens * share * queued.sequences / max(1, queued.tokens))
        return part

    def arrived(self, session: ProducerSession) -> bool:
        """Note an accepted group; return whether its lane should be paced again soon.

        A half-empty window is refilled before it closes: at once without pacing, where it takes no counting, and at
        the next `pace_all` with pacing, once for all arrivals in the meantime.
        """
        lane = session.lane
        paced = lane.rule.pacing
        window = session.slots if paced else self._credits.open_window(session)
        if session.starts_out * 2 > window or not session.begins:
            return False
        if paced and self._frees_none(session):
            self.behind = True
            return False
        if not paced and not self.stalled:
            self._grant([session], self._credits.starts(lane)[0], paced=False)
        if paced:
            self._due.add(lane)
        return paced

    def _frees_none(self, session: ProducerSession) -> bool:
        """Return whether an arrival in a lane with pacing frees no permit.

        A session that waits for the trainer had fewer permits than slots when its lane was paced, so the lane had all
        that it may have. Since then an arriving group counts as queued instead of as begun.
        """
        return session.wait is Wait.STALE_GUARD and not self.batch_tokens

    def _grant(self, sessions: Iterable[ProducerSession], free: int, *, paced: bool) -> bool:
        """Grant one rollout at a time to the session with the fewest, within its limit.

        Return whether some of them may have more.
        """
        heap = []
        for session in sessions:
            limit = session.slots if paced else self._credits.open_window(session)
            out = session.starts_out
            if out < limit if paced else out * 2 <= limit:
                heap.append((out, session.number, limit, session))
        heapify(heap)
        given: dict[int, ProducerSession] = {}
        while heap and free > 0:
            out, number, limit, session = heap[0]
            more = 1 if len(heap) > 1 else min(free, limit - out)
            session.start_limit = max(session.start_limit, session.used) + more
            given[number] = session
            free -= more
            if out + more < limit:
                heapreplace(heap, (out + more, number, limit, session))
            else:
                heappop(heap)
        if heap and not paced:
            self._short.add(heap[0][3].lane)
        for session in given.values():
            self._credits.charge(session)
            session.touch()
        return bool(heap)


class _ActiveLanes:
    """The lanes of a split that deliver, and their weight."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._lanes = set(lanes)
        self._weight = sum(lane.weight for lane in self._lanes)

    def share(self, lane: Lane) -> float:
        """Return a lane's part of every batch, as if it delivered."""
        extra = lane not in self._lanes
        own = lane.weight if lane.connected else 0.0
        weight = self._weight + own * extra
        part = own / weight if weight else 1.0 / max(1, len(self._lanes) + extra)
        return min(1.0, max(part, lane.min_share))
