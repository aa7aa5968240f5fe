"""Groups that leave untrained: stale, damaged, dead or discarded. Each has its reason in every record."""

from collections import Counter
from collections.abc import Iterable

from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.batches.rewind import RewindBuffer
from rolloutmq.services.broker.journal.event_buffer import EventBuffer
from rolloutmq.services.broker.journal.format.events import Dropped, GroupState
from rolloutmq.services.broker.journal.stored_group import Frames, StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare, total
from rolloutmq.services.broker.state.groups import Groups
from rolloutmq.services.broker.state.ledger import Ledger
from rolloutmq.services.broker.state.queues import Lanes


class GroupDropper:
    """Ends groups; its callers have decided."""

    def __init__(
        self,
        lanes: Lanes,
        rewind_buffer: RewindBuffer,
        ledger: Ledger,
        groups: Groups,
        outbox: Outbox,
        events: EventBuffer,
    ) -> None:
        self._lanes = lanes
        self._rewind_buffer = rewind_buffer
        self._ledger = ledger
        self._groups = groups
        self._outbox = outbox
        self._events = events

    def drop(
        self, groups: Iterable[StoredGroup], state: GroupState, reason: str, wall: float, detail: str = ""
    ) -> None:
        """End groups in a queue or on the rewind queue; say how many expired of each environment."""
        groups = list(groups)
        if state is GroupState.EXPIRED:
            for lane, count in Counter(map(self._lanes.of, groups)).items():
                newest = max(one.header.oldest.step for one in groups if self._lanes.of(one) is lane)
                self._outbox.expired(lane.env, count, lane.rule.max_staleness, newest)
        for group in groups:
            self._events.add(Dropped(group.order, state.value, reason))
            if self._rewind_buffer.remove(group):
                self._lanes.of(group).rewinding.add(group, -1)
                self._rewind_buffer.charge(-group.header.nbytes)
            else:
                lane = self._lanes.of(group)
                lane.remove(group)
                self._lanes.let_go(lane, total((group,)))
            self._ledger.move(GroupState.QUEUED, state, reason=reason)
            self.end(group, state, detail or reason, wall)
        self._rewind_buffer.drop_empty()

    def end(self, group: StoredGroup, state: GroupState, reason: str, wall: float) -> None:
        """Report a group that is out of every container, and release it; write a dead letter for a dead one."""
        if state is GroupState.DEAD and not self._outbox.muted:
            self._outbox.bury(group, _contents(group), reason)
        self._outbox.dropped(wall, group.header.group_id, state.value, reason)
        self._groups.gone(BatchShare((group,)))


def _contents(group: StoredGroup) -> Frames | None:
    """Return the contents for a dead letter; None if they are damaged or not readable now."""
    try:
        return group.body.own_frames if group.body.load() else None
    except JournalWaitsError:
        return None
