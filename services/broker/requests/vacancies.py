"""Vacancies: lanes without a group and without a live producer, and when the broker forgets them.

Environments come and go under new names for as long as a run lives, and their names come from peers. A vacant lane
keeps its counts, and its producers may come back to their sessions. The newest `VACANT_KEPT` of these lanes stay. The
broker forgets older ones once they have been vacant for `silence_s`, or earlier if another lane needs the place. It
forgets their sessions too: a producer that returns after all opens a new session, and the broker recognizes resent
groups by their identity.

A lane of the configuration stays. One event names what was forgotten, so a restart forgets the same.
"""

from collections.abc import Sequence
from typing import Final

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.broker_state import BrokerState
from rolloutmq.services.broker.journal.format.events import Vacated
from rolloutmq.services.broker.state.queues import Lane

LANES_LIMIT: Final = 1024
"""Most lanes of one broker."""
VACANT_KEPT: Final = 64
"""Vacant lanes that stay known, with their counts."""


class Vacancies:
    """Finds the vacant lanes, and forgets some of them."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._since: dict[Lane, float] = {}
        """When each vacant lane was first seen vacant; the earliest one comes first."""

    def sweep(self, now: float) -> None:
        """Forget what has been vacant for long, beyond the lanes that stay."""
        self._look(now)
        moment = now - self._state.config.broker.silence_s
        surplus = list(self._since.items())[:-VACANT_KEPT]
        self._forget([lane for lane, since in surplus if since <= moment])

    def make_room(self, now: float) -> bool:
        """Return whether there is room for one more lane; forget vacant ones if that takes it."""
        if len(self._state.lanes) < LANES_LIMIT:
            return True
        self._look(now)
        vacant = list(self._since)
        self._forget(vacant[: max(1, len(vacant) - VACANT_KEPT)])
        return len(self._state.lanes) < LANES_LIMIT

    def free(self) -> int:
        """Return how many lanes could be opened now."""
        return max(0, LANES_LIMIT - len(self._state.lanes)) + sum(map(self._is_vacant, self._state.lanes))

    def _look(self, now: float) -> None:
        vacant = [lane for lane in self._state.lanes if self._is_vacant(lane)]
        before = self._since
        since = {lane: before.get(lane, now) for lane in vacant}
        self._since = dict(sorted(since.items(), key=lambda item: item[1]))

    def _is_vacant(self, lane: Lane) -> bool:
        state = self._state
        if state.lanes.configured(lane.env) or state.credits.producers(lane):
            return False
        return not state.groups.of_lane(lane.env, lane.split)

    def _forget(self, lanes: Sequence[Lane]) -> None:
        if lanes:
            self._state.events.add(Vacated(tuple((lane.env, lane.split) for lane in lanes)))
            self._remove(lanes)

    def apply(self, event: Vacated) -> None:
        """Forget the lanes of an earlier life's event; ValueError if one of them holds groups."""
        state = self._state
        for env, split in event.lanes:
            if state.groups.of_lane(env, split):
                raise ValueError(f"environment {env} still holds groups")
        found = (state.lanes.find(env, split) for env, split in event.lanes)
        self._remove([lane for lane in found if lane is not None])

    def _remove(self, lanes: Sequence[Lane]) -> None:
        state = self._state
        state.sessions.forget(set(lanes))
        for lane in lanes:
            self._since.pop(lane, None)
            state.credits.forget(lane)
            state.lanes.remove(lane)
            if all(state.lanes.find(lane.env, split) is None for split in Split):
                state.newest.pop(lane.env, None)
        state.permits_due = True
