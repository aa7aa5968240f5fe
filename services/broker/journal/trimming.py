"""What a killed broker had reserved on the disk and nobody will use, given back when its run has ended.

Room for whole segments is reserved ahead of the groups (see `grouplog`). A broker that ends in order gives back the
rest itself, and so does the next life of one that was killed; this is for the one that gets no other life. Nothing is
cut but what lies behind the end of the records, and nothing removed but segments without any, and those that were kept
to be written over. Where records do not end as their writer lets them end, that is left to the next life, which can
tell a torn end from damage.
"""

import logging
from contextlib import closing
from pathlib import Path

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.reading import RecordFile
from rolloutmq.services.broker.journal.segment import FILE_HEADER_BYTES, FILLER
from rolloutmq.services.broker.journal.segments import SPARES, numbered_files

logger = logging.getLogger(__name__)


def trim(directory: Path, disk: Disk | None = None) -> int:
    """Give back what is reserved in a journal, and return how many bytes; OSError if the disk refuses.

    Blocks. Only for the holder of the broker's claim (`bus.endpoint.claim`): nobody may be writing.
    """
    disk = disk or Disk()
    freed = 0
    if not directory.is_dir():
        return freed
    for path in directory.glob(SPARES):
        freed += path.stat().st_size
        disk.unlink(path)
    for path in reversed(numbered_files(directory, "groups").values()):
        with closing(RecordFile(disk, path)) as file:
            size, end = file.size, _end(file)
        if end == size > FILE_HEADER_BYTES:
            break  # nothing is reserved here, nor before: only the last one, and the one after it, were not finished
        if end <= FILE_HEADER_BYTES:
            disk.unlink(path)
        else:
            disk.cut(path, end)
        freed += size - end
    if freed:
        logger.info("journal trimmed directory=%s bytes=%d", directory, freed)
    return freed


def _end(file: RecordFile) -> int:
    """Return where the records of a segment end; the end of the file if what follows is not as its writer leaves it."""
    if file.nonce is None:
        return 0 if file.blank() else file.size
    end = at = FILE_HEADER_BYTES
    while (header := file.header(at)) is not None:
        at += header.span
        if header.kind != FILLER:
            end = at
    return min(end, file.size) if file.ends(at) else file.size
