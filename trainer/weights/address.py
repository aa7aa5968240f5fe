"""Owner of the weights in an address file, and the sweep of what a dead owner left outside of segments.

    weights/        beside the address file: a directory for each version, see `disk`
      owner         locked by the owner for its life; holds its pid

Imports no torch: the sweep runs without it.
"""

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import decode_json, read_regular
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.errors import SegmentInUseError
from rolloutmq.schemas.files import VERSIONS, DiskAddress, SentAddress

logger = logging.getLogger(__name__)

OWNER: Final = "owner"
PARCEL: Final = "sent"
"""Kind of the files of a weight transfer; nobody takes over those of a dead trainer."""


def directory_of(address_file: Path) -> Path:
    """Return the directory of the versions."""
    return address_file.parent / VERSIONS


def read_disk(path: Path) -> DiskAddress | None:
    """Read an address file; None if there is none (yet), or if it belongs to another backend."""
    try:
        return decode_json(read_regular(path), DiskAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def read_sent(path: Path) -> SentAddress | None:
    """Read an address file; None if there is none (yet), or if it belongs to another backend."""
    try:
        return decode_json(read_regular(path), SentAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def own(root: Path) -> int:
    """Become the only owner of a directory of versions, until the returned descriptor is closed.

    Raises:
        SegmentInUseError: A live process owns it.
    """
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(root / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a sweep removed it
        try:
            _lock(fd, root)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # swept before it was locked: try again


def _lock(fd: int, root: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SegmentInUseError(str(root), int(os.pread(fd, 20, 0) or b"0")) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)


def owner_lives(address_file: Path) -> bool:
    """Return whether the weights in an address file have a live owner, with any backend."""
    if read_disk(address_file) is not None:
        return is_locked(directory_of(address_file) / OWNER)
    if (sent := read_sent(address_file)) is not None:
        return segment_file.SegmentOwner(*sent.sender).alive()
    found = segment_file.read_address(address_file)
    owner = segment_file.owner_of(found) if found else None
    return owner is not None and owner.alive()


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on a file; False if the file does not exist."""
    try:
        # Over NFS an exclusive lock needs a descriptor that may write.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def sweep(address_file: Path) -> list[Path]:
    """Remove versions, transfer files and the address file of a dead owner; return the removed paths. Segments stay."""
    return sweep_sent(address_file) + _sweep_versions(address_file)


def sweep_sent(address_file: Path) -> list[Path]:
    """Remove transfer files and the address file of a dead owner; return the removed paths."""
    if read_sent(address_file) is None or owner_lives(address_file):
        return []
    address_file.unlink(missing_ok=True)
    return [address_file, *segment_file.sweep(kind=PARCEL)]


def _sweep_versions(address_file: Path) -> list[Path]:
    root, named = directory_of(address_file), read_disk(address_file) is not None
    if not (named or (root / OWNER).is_file()):  # not a directory of versions
        return []
    try:
        lock = own(root)
    except SegmentInUseError:
        return []
    removed = [root]
    try:
        if named:
            address_file.unlink(missing_ok=True)
            removed.append(address_file)
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)
    logger.info("removed directory=%s reason=owner_dead", root)
    return removed
