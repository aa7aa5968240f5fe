"""Groups that leave the stream untrained: too old, damaged, dead, or discarded. Each says why, in every record."""

from collections.abc import Iterable

from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.groups import Groups, StoredGroup
from rolloutmq.services.broker.journal.body import Frames
from rolloutmq.services.broker.journal.facts import Dropped
from rolloutmq.services.broker.lanes import Lanes
from rolloutmq.services.broker.ledger import Ledger, State
from rolloutmq.services.broker.log import Log
from rolloutmq.services.broker.retained import Retained


class Dropping:
    """Ends groups; who calls it has decided."""

    def __init__(
        self, lanes: Lanes, retained: Retained, ledger: Ledger, groups: Groups, outbox: Outbox, log: Log
    ) -> None:
        self._lanes = lanes
        self._retained = retained
        self._ledger = ledger
        self._groups = groups
        self._outbox = outbox
        self._log = log

    def drop(
        self, groups: Iterable[StoredGroup], state: State, reason: str, wall: float, detail: str = ""
    ) -> None:
        """End groups that are queued, or wait on the rewind queue."""
        for group in groups:
            self._log.add(Dropped(group.order, state.value, reason))
            if self._retained.remove(group):
                self._lanes.of(group).rewinding.add(group, -1)
                self._retained.charge(-group.header.nbytes)
            else:
                self._lanes.of(group).remove(group)
                self._lanes.let_go(group)
            self._ledger.move(State.QUEUED, state, reason=reason)
            self.end(group, state, detail or reason, wall)
        self._retained.drop_empty()

    def end(self, group: StoredGroup, state: State, reason: str, wall: float) -> None:
        """Tell of a group that is out of every container, and let it go; the dead keep their contents aside."""
        if state is State.DEAD and not self._outbox.muted:
            self._outbox.bury(group, _contents(group), reason)
        self._outbox.dropped(wall, group.header.group_id, state.value, reason)
        self._groups.gone(group)


def _contents(group: StoredGroup) -> Frames | None:
    """Return what a letter of a dead group can keep of it; it is not waited for."""
    try:
        return group.body.own_frames if group.body.load() else None
    except JournalWaitsError:
        return None
