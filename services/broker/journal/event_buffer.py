"""The event buffer: events of one call into the core, for the journal.

An accepted group stands for its own event, since only the commit thread knows the address it gets on disk.
"""

from collections.abc import Sequence

from rolloutmq.services.broker.journal.format.events import Event, GroupSnapshot
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup

Entry = StoredGroup | Event
SnapshotRecord = Event | tuple[GroupSnapshot, GroupBody]
"""A group comes with its body, since only the writer of the snapshot knows the body's address by then."""


class EventBuffer:
    """Events of one call, in their order; nothing is gathered while events are being applied."""

    def __init__(self, *, recording: bool) -> None:
        self.recording = recording
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        if self.recording:
            self._entries.append(entry)

    def extend(self, entries: Sequence[Entry]) -> None:
        if self.recording:
            self._entries += entries

    def take(self) -> list[Entry]:
        """Return the gathered events and start anew."""
        entries, self._entries = self._entries, []
        return entries
