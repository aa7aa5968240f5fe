"""Whose the weights are that an address file names, and what goes of them that are no segment when that one is dead.

    weights/        beside the address file: a directory for each version, see `versions`
      owner         locked by the owner for its life; holds its pid

No torch here: whoever tidies up has none.
"""

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus import segments
from rolloutmq.schemas.layout import VERSIONS
from rolloutmq.schemas.records import DiskAddress, SentAddress
from rolloutmq.schemas.sharing import SegmentInUseError

logger = logging.getLogger(__name__)

OWNER: Final = "owner"
PARCEL: Final = "sent"
"""Kind of the files in which weights are sent; what a dead trainer left of them has no heir."""


def directory_of(address_file: Path) -> Path:
    """Return where the versions are that an address file may name."""
    return address_file.parent / VERSIONS


def read_disk(path: Path) -> DiskAddress | None:
    """Read an address file, or None where there is none (yet), or that of another backend."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=DiskAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def read_sent(path: Path) -> SentAddress | None:
    """Read an address file, or None where there is none (yet), or that of another backend."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SentAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def own(root: Path) -> int:
    """Become the only owner of a directory of versions, until the descriptor that is returned is closed.

    Raises:
        SegmentInUseError: A living process owns it.
    """
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(root / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # somebody sweeps
        try:
            _lock(fd, root)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was swept before it was locked: what is there now is another one, or nothing


def _lock(fd: int, root: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SegmentInUseError(str(root), int(os.pread(fd, 20, 0) or b"0")) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)


def owner_lives(address_file: Path) -> bool:
    """Tell whether the weights that an address file names have a living owner, whatever holds them."""
    if read_disk(address_file) is not None:
        return is_locked(directory_of(address_file) / OWNER)
    if (sent := read_sent(address_file)) is not None:
        return segments.Owner(*sent.sender).alive()
    found = segments.read_address(address_file)
    owner = segments.owner_of(found) if found else None
    return owner is not None and owner.alive()


def is_locked(path: Path) -> bool:
    """Tell whether somebody has a lock on a file; nobody has where there is none."""
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
    """Remove what a dead owner left that is no segment: versions, files on their way, the address file.

    Returns what was removed.
    """
    return sweep_sent(address_file) + _sweep_versions(address_file)


def sweep_sent(address_file: Path) -> list[Path]:
    """Remove what a dead owner left that sent its weights: files on their way, the address file.

    Returns what was removed.
    """
    if read_sent(address_file) is None or owner_lives(address_file):
        return []
    address_file.unlink(missing_ok=True)
    return [address_file, *segments.sweep(kind=PARCEL)]


def _sweep_versions(address_file: Path) -> list[Path]:
    root, named = directory_of(address_file), read_disk(address_file) is not None
    if not (named or (root / OWNER).is_file()):  # made by nobody of ours
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
