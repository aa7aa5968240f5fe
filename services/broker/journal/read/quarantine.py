"""The quarantine: damaged stretches of the journal, one file for each, kept for people."""

import logging
from pathlib import Path
from typing import Final

from rolloutmq.bus.files import private_file
from rolloutmq.services.broker.journal.disk import Disk

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 4 << 20


class Quarantine:
    """Keeps damaged stretches, each once. A failure to keep one is only logged.

    Attributes:
        count: Stretches found in this life.
    """

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.directory = directory
        self.count = 0
        self._disk = disk
        self._known: set[Path] = set()

    def keep(self, path: Path, offset: int, nbytes: int) -> None:
        """Copy a stretch of a file; blocks."""
        target = self._target(path, f"{offset:012d}")
        if target not in self._known:
            self._note(target)
            try:
                self._copy(path, offset, offset + nbytes, target)
            except OSError as error:
                logger.error(
                    "damage found file=%s offset=%d bytes=%d not kept: %s", path, offset, nbytes, error
                )
            else:
                logger.error(
                    "damage found file=%s offset=%d bytes=%d kept_as=%s", path, offset, nbytes, target
                )

    def keep_whole(self, path: Path) -> None:
        """Keep a wholly unreadable file; it is linked and takes no further room."""
        target = self._target(path, "whole")
        if target not in self._known:
            self._note(target)
            try:
                self.directory.mkdir(mode=0o700, exist_ok=True)
                target.unlink(missing_ok=True)
                target.hardlink_to(path)
            except OSError as error:
                logger.error("damage found file=%s not kept: %s", path, error)
            else:
                logger.error("damage found file=%s kept_as=%s", path, target)

    def missing(self, path: Path) -> None:
        """Note that a file is gone."""
        if path not in self._known:
            self._note(path)
            logger.error("segment missing file=%s", path)

    def _target(self, path: Path, where: str) -> Path:
        return self.directory / f"{path.stem}-{where}.damaged"

    def _note(self, target: Path) -> None:
        self._known.add(target)
        self.count += 1

    def _copy(self, path: Path, offset: int, end: int, target: Path) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        source = self._disk.open(path)
        try:
            with private_file(target, "wb") as file:
                while offset < end and (
                    data := self._disk.pread(source, min(_CHUNK_BYTES, end - offset), offset)
                ):
                    file.write(data)
                    offset += len(data)
        finally:
            self._disk.close(source)
