"""Trim: returns the disk room a killed broker had reserved, when its run has ended.

Room is reserved ahead of the groups and the events (see `write.group_log` and `write.event_reserve`). A broker that
ends in order returns the rest itself, and so does the next life of a killed one; trim is for a run without a next life.
Only bytes behind the end of the records are cut, and only the reserve, spares and segments without records are removed.
Records that do not end as their writer leaves them are left to the next life, which can distinguish a torn end from
damage. A journal of another version is not touched.
"""

import logging
from contextlib import closing
from pathlib import Path

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES, FILLER
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.read.segments import SPARES, numbered_files
from rolloutmq.services.broker.journal.read.versions import require_version_of

logger = logging.getLogger(__name__)


def trim(directory: Path, disk: Disk | None = None) -> int:
    """Return the reserved room of a journal, and report how many bytes.

    Blocks. Only for the holder of the broker's claim (`bus.transport.endpoint.claim`): no process may be writing.

    Raises:
        OSError: The disk refuses.
        JournalWaitsError: A file cannot be read now.
        RecordVersionError: Another version wrote the journal.
    """
    disk = disk or Disk()
    freed = 0
    if not directory.is_dir():
        return freed
    require_version_of(directory, disk)
    for path in (*directory.glob(SPARES), *directory.glob("*.tmp")):
        freed += path.stat().st_size
        disk.unlink(path)
    for path in reversed(numbered_files(directory, "groups").values()):
        with closing(RecordFile(disk, path)) as file:
            size, end = file.size, _end(file)
        if end == size > FILE_HEADER_BYTES:
            break  # nothing is reserved here, nor before: at most the last two were unfinished
        if end <= FILE_HEADER_BYTES:
            disk.unlink(path)
        else:
            disk.cut(path, end)
        freed += size - end
    if freed:
        logger.info("journal trimmed directory=%s bytes=%d", directory, freed)
    return freed


def _end(file: RecordFile) -> int:
    """Return where the records of a segment end; the end of the file if its writer did not end it like this."""
    if file.nonce is None:
        return 0 if file.blank() else file.size
    end = at = FILE_HEADER_BYTES
    while (header := file.header(at)) is not None:
        at += header.span
        if header.kind != FILLER:
            end = at
    return min(end, file.size) if file.ends(at) else file.size
