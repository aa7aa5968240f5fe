"""Version check: refuses the records of another RolloutMQ version before anything is changed.

It covers the files a reader would read: event logs, segments, `saved.rmq`, dead letters. A spare is never read,
and gets a header of its own before it becomes a segment. See docs/decisions/0022.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rolloutmq.schemas.errors import JournalWaitsError, RecordVersionError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.journal.disk import Disk, readable_later
from rolloutmq.services.broker.journal.format.records import VERSION
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.read.segments import numbered_files

OLD_LOGS: Final = "facts"
"""Name of the event logs of versions 1 and 2. Whatever such a file holds, no reader of this version opens it."""
OLD_LOGS_VERSION: Final = 2


def require_own_records(layout: RunLayout) -> None:
    """Refuse a run directory in which another version wrote the journal, the saved state, or dead letters.

    Raises:
        RecordVersionError: The first file of another version.
        JournalWaitsError: A file cannot be read now.
    """
    _require([*_journal(layout.journal), layout.saved, *sorted(layout.dead.glob("*.rmq"))], Disk())


def require_version_of(directory: Path, disk: Disk) -> None:
    """Refuse a journal that another version wrote; see `require_own_records`."""
    _require(_journal(directory), disk)


def _journal(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from numbered_files(directory, OLD_LOGS).values()
        yield from numbered_files(directory, "events").values()
        yield from numbered_files(directory, "groups").values()


def _require(paths: Iterable[Path], disk: Disk) -> None:
    for path in paths:
        try:
            RecordFile(disk, path).close()
        except OSError as error:
            # A file that fails has no version: its reader finds it damaged.
            if readable_later(error):
                raise JournalWaitsError(str(path), str(error)) from error
        if path.name.startswith(OLD_LOGS):
            raise RecordVersionError(str(path), OLD_LOGS_VERSION, VERSION)
