"""Shared-memory segments as files: names, owners, holders and removal.

A segment is a plain file `/dev/shm/rolloutmq-<nonce>-<kind>`. It is not a `multiprocessing.shared_memory`, whose
tracker unlinks segments of other processes before Python 3.13. Its first 64 bytes name the owner:

    0  magic (8 bytes)   8  layout version    16  nonce (16 hexadecimal characters)
   32  owner pid, or 0  40  owner start ticks  48  inode of the owner's pid namespace   56  reserved

Every process with a mapping holds a shared lock on its first byte (an open-file-description lock: it ends with the
process, not with another descriptor of the file). A segment may be removed once its owner is dead and no process holds
that lock. The remover holds the lock exclusively meanwhile, so no successor takes over a file about to go. A
separate lock (flock) excludes readers and writers from each other. This module needs no torch: every service may sweep.
"""

import errno
import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Container
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from rolloutmq.bus.files import decode_json, read_regular, write_private
from rolloutmq.schemas.errors import MissingError, SegmentGoneError
from rolloutmq.schemas.files import WeightsAddress

logger = logging.getLogger(__name__)

SHM: Final = Path("/dev/shm")
PREFIX: Final = "rolloutmq-"
MAGIC: Final = b"RMQ-SEGM"
LAYOUT: Final = 1
HEADER: Final = struct.Struct("=8sq16sqqqq")
UNBORN_S: Final = 10.0
"""A younger empty segment may still be in creation: it is locked before it gets its size."""
_FLOCK: Final = struct.Struct("hhqqi")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid (0 for open-file-description locks)."""


class SegmentOwner(NamedTuple):
    """A process, distinguishable from a later one with the same pid."""

    pid: int
    start_ticks: int
    namespace: int

    @classmethod
    def current(cls) -> Self:
        """Return the identity of the calling process."""
        pid = os.getpid()
        return cls(pid, _start_ticks(pid) or 0, _pid_namespace())

    def is_here(self) -> bool:
        """Return whether its pid belongs to this pid namespace."""
        return self.namespace == _pid_namespace()

    def alive(self) -> bool:
        """Return whether the process is alive. One in another pid namespace is invisible and counts as alive."""
        if not self.pid:
            return False  # nobody, see `SegmentFile.release`
        if not self.is_here():
            return True
        return _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/<pid>/stat, or None if the process does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


class SegmentFile(NamedTuple):
    """An open segment. The holder closes `fd` and unmaps it."""

    path: Path
    nonce: str
    fd: int

    def claim(self) -> None:
        """Write the header: the calling process is the owner."""
        self._write(SegmentOwner.current())

    def release(self) -> None:
        """Leave the segment without an owner, as the death of this process would; nothing if another one owns it."""
        owner = SegmentOwner.current()
        if self.owner() == owner:
            self._write(SegmentOwner(0, 0, owner.namespace))

    def _write(self, owner: SegmentOwner) -> None:
        os.pwrite(self.fd, HEADER.pack(MAGIC, LAYOUT, self.nonce.encode(), *owner, 0), 0)

    def owner(self) -> SegmentOwner | None:
        """Return the owner, or None while the header is incomplete."""
        header = _read_header(self.fd)
        return header[1] if header else None

    def discard(self) -> None:
        """Remove and close a segment whose creation failed."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def create(kind: str, nbytes: int) -> SegmentFile:
    """Create a segment of `nbytes` zero bytes, owned by the calling process and readable by this user only.

    All pages are allocated at once: a page missing later would raise SIGBUS in the middle of a step.

    Raises:
        MissingError: The machine lacks that much shared memory.
    """
    nonce = os.urandom(8).hex()
    path = SHM / f"{PREFIX}{nonce}-{kind}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    segment = SegmentFile(path, nonce, fd)
    try:
        _hold(fd, path)
        os.posix_fallocate(fd, 0, nbytes)
        segment.claim()
    except BaseException as error:
        segment.discard()
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}:
            what = f"shared memory: {nbytes / 2**20:.1f} MiB in {SHM}"
            raise MissingError(
                what, "give the container more shared memory, for example --shm-size=8g"
            ) from None
        raise
    return segment


def open_existing(path: Path, nonce: str, *, writable: bool = False) -> SegmentFile:
    """Open the segment at `path` if it has this nonce, and protect it from sweeping.

    Raises:
        SegmentGoneError: It was removed or replaced, is being removed, or belongs to another user.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise SegmentGoneError(str(path), error.strerror or str(error)) from None
    try:
        _hold(fd, path)
        _require(fd, path, nonce)
    except BaseException:
        os.close(fd)
        raise
    return SegmentFile(path, nonce, fd)


def _require(fd: int, path: Path, nonce: str) -> None:
    info = os.fstat(fd)
    header = _read_header(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        raise SegmentGoneError(str(path), f"it is not a regular file of this user but of user {info.st_uid}")
    if info.st_nlink == 0:
        raise SegmentGoneError(str(path), "it has just been removed")
    if header is None or header[0] != nonce:
        raise SegmentGoneError(str(path), f"it does not have the nonce {nonce}")


def _read_header(fd: int) -> tuple[str, SegmentOwner] | None:
    data = os.pread(fd, HEADER.size, 0)
    if len(data) < HEADER.size:
        return None
    magic, layout, nonce, pid, ticks, namespace, _reserved = HEADER.unpack(data)
    if magic != MAGIC or layout != LAYOUT:
        return None
    return nonce.decode("ascii", "replace"), SegmentOwner(pid, ticks, namespace)


def _hold(fd: int, path: Path) -> None:
    """Mark the segment as mapped by this process until the last duplicate of `fd` is closed."""
    if not lock_byte(fd, 0, fcntl.F_RDLCK):
        raise SegmentGoneError(str(path), "it is being removed")


def lock_byte(fd: int, place: int, kind: int) -> bool:
    """Lock or unlock one byte for the open file `fd`; return whether that succeeded. Never waits.

    Args:
        kind: `F_WRLCK`, `F_RDLCK` or `F_UNLCK` of `fcntl`.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _held_by_others(fd: int) -> bool:
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def in_use(path: Path) -> bool:
    """Return whether the owner of a segment is alive or a process maps it. False if there is no segment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        header = _read_header(fd)
        if header is None:
            info = os.fstat(fd)
            unborn = info.st_size == 0 and time.time() - info.st_mtime < UNBORN_S
            return unborn or _held_by_others(fd)
        return header[1].alive() or _held_by_others(fd)
    finally:
        os.close(fd)


def owner_of(address: WeightsAddress) -> SegmentOwner | None:
    """Return the owner of the segment of an address, dead or alive, or None if the segment is gone."""
    try:
        segment = open_existing(Path(address.path), address.nonce)
    except SegmentGoneError:
        return None
    try:
        return segment.owner()
    finally:
        os.close(segment.fd)


def sweep(address_file: Path | None = None, *, spared: Container[Path] = (), kind: str = "") -> list[Path]:
    """Remove segments with a dead owner and no holder, and return them.

    Args:
        address_file: `weights.json` of a run: check only the segment named there, and remove the file too. None checks
            every segment of this user.
        spared: Segments to keep although they are unused, because their owner is about to restart.
        kind: Kind of segments to check; empty for all.
    """
    if address_file is None:
        uid = os.geteuid()
        every = SHM.glob(f"{PREFIX}*-{kind}" if kind else f"{PREFIX}*")
        found = [path for path in every if path not in spared and _uid(path) == uid]
        return [path for path in found if _remove_unused(path)]
    address = read_address(address_file)
    if address is None:
        return []
    path = Path(address.path)
    ours = path.parent == SHM and path.name.startswith(PREFIX)
    if path.exists() and not (ours and _remove_unused(path)):
        return []
    address_file.unlink(missing_ok=True)
    return [path]


def _uid(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return -1


def _remove_unused(path: Path) -> bool:
    if in_use(path):
        return False
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not lock_byte(fd, 0, fcntl.F_WRLCK):
            return False  # a successor has opened it meanwhile
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    logger.info("removed segment=%s reason=owner_dead", path)
    return True


def read_address(path: Path) -> WeightsAddress | None:
    """Read an address file; None if it is missing or malformed."""
    try:
        return decode_json(read_regular(path), WeightsAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def remove_named(address: WeightsAddress) -> None:
    """Remove the segment of an address, also one in use: whoever has mapped it keeps the memory."""
    path = Path(address.path)
    if path.parent == SHM and path.name.startswith(PREFIX):
        path.unlink(missing_ok=True)


def write_address(path: Path, segment: SegmentFile) -> None:
    """Replace an address file atomically: readers see the old address or the new one."""
    address = WeightsAddress(path=str(segment.path), nonce=segment.nonce)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_private(written, msgspec.json.encode(address) + b"\n")
    written.replace(path)
