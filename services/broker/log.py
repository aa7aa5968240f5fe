"""What changed during one call into the core, as facts, for the journal.

An accepted group stands for its own fact: only who writes it knows the place that it gets.
"""

from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.body import Body
from rolloutmq.services.broker.journal.facts import Fact, GroupItem

Entry = StoredGroup | Fact
SnapshotItem = Fact | tuple[GroupItem, Body]
"""A group comes with its body, since only who writes the snapshot knows by then where the body is."""


class Log:
    """Facts gathered during one call, in their order; nothing is gathered while facts are being applied."""

    def __init__(self, *, recording: bool) -> None:
        self.recording = recording
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        if self.recording:
            self._entries.append(entry)

    def take(self) -> list[Entry]:
        """Return what was gathered and start anew."""
        entries, self._entries = self._entries, []
        return entries
