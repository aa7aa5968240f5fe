"""Shared-memory segments as files: their names, who owns them, who still maps them, what may be removed.

A segment is a plain file `/dev/shm/rolloutmq-<nonce>-<kind>`, never `multiprocessing.shared_memory`, whose tracker
unlinks the segments of others before Python 3.13. Its first 64 bytes say whose it is:

    0  magic (8 bytes)   8  layout version    16  nonce (16 hexadecimal characters)
   32  owner pid        40  owner start ticks  48  inode of the owner's pid namespace   56  reserved

Whoever maps a segment holds a shared lock on its first byte for as long as it does (an open-file-description lock:
it dies with the process, and not with some other descriptor of the same file). A segment may be removed when its
owner is dead and nobody holds that lock: who removes it holds it alone meanwhile, so that no heir takes over a file
that is about to go. Exclusion of readers and writers is another lock (flock) and not this
module's matter. No torch here: every service may sweep.
"""

import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Container
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.records import WeightsAddress
from rolloutmq.schemas.sharing import SegmentGoneError

logger = logging.getLogger(__name__)

SHM: Final = Path("/dev/shm")
PREFIX: Final = "rolloutmq-"
MAGIC: Final = b"RMQ-SEGM"
LAYOUT: Final = 1
HEADER: Final = struct.Struct("=8sq16sqqqq")
UNBORN_S: Final = 10.0
"""An empty segment that is younger may be in the middle of its making: it is held before it gets its size."""
_FLOCK: Final = struct.Struct("hhqqi")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid (0 for open-file-description locks)."""


class Owner(NamedTuple):
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_ticks: int
    namespace: int

    @classmethod
    def current(cls) -> Self:
        """Return the mark of the calling process."""
        pid = os.getpid()
        return cls(pid, _start_ticks(pid) or 0, _pid_namespace())

    def is_here(self) -> bool:
        """Tell whether the process is, or was, of this pid namespace, so that its pid means something."""
        return self.namespace == _pid_namespace()

    def alive(self) -> bool:
        """Tell whether the process lives. One in another pid namespace cannot be seen and counts as alive."""
        if not self.is_here():
            return True
        return self.pid > 0 and _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/<pid>/stat, or None where there is no such process or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


class Segment(NamedTuple):
    """An open segment. Closing `fd` and unmapping is up to the holder."""

    path: Path
    nonce: str
    fd: int

    def claim(self) -> None:
        """Write the header that makes the calling process the owner."""
        owner = Owner.current()
        os.pwrite(self.fd, HEADER.pack(MAGIC, LAYOUT, self.nonce.encode(), *owner, 0), 0)

    def owner(self) -> Owner | None:
        """Return the owner, or None as long as there is no whole header."""
        header = _read_header(self.fd)
        return header[1] if header else None

    def discard(self) -> None:
        """Remove a segment that came to nothing, and close it."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def create(kind: str, nbytes: int) -> Segment:
    """Make a segment of `nbytes` zero bytes owned by the calling process, readable by this user only.

    Raises:
        MissingError: There is not that much shared memory. Said now, since a page that cannot be had later is a
            SIGBUS in the middle of a step.
    """
    nonce = secrets.token_hex(8)
    path = SHM / f"{PREFIX}{nonce}-{kind}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    segment = Segment(path, nonce, fd)
    try:
        _hold(fd, path)
        os.posix_fallocate(fd, 0, nbytes)
        segment.claim()
    except BaseException as error:
        segment.discard()
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}:
            what = f"shared memory: {nbytes / 2**20:.1f} MiB in {SHM}"
            raise MissingError(what, "give the container more, for example --shm-size=8g") from None
        raise
    return segment


def open_existing(path: Path, nonce: str, *, writable: bool = False) -> Segment:
    """Open the segment at `path` if it still is the one with this nonce, and hold it against sweeping.

    Raises:
        SegmentGoneError: It is not there any more, or is another one, or not ours to read, or is being removed.
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
    return Segment(path, nonce, fd)


def _require(fd: int, path: Path, nonce: str) -> None:
    info = os.fstat(fd)
    header = _read_header(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        raise SegmentGoneError(str(path), "it is not a file of this user")
    if info.st_nlink == 0:
        raise SegmentGoneError(str(path), "it has just been removed")
    if header is None or header[0] != nonce:
        raise SegmentGoneError(str(path), f"it does not carry the nonce {nonce}")


def _read_header(fd: int) -> tuple[str, Owner] | None:
    data = os.pread(fd, HEADER.size, 0)
    if len(data) < HEADER.size:
        return None
    magic, layout, nonce, pid, ticks, namespace, _reserved = HEADER.unpack(data)
    if magic != MAGIC or layout != LAYOUT:
        return None
    return nonce.decode("ascii", "replace"), Owner(pid, ticks, namespace)


def _hold(fd: int, path: Path) -> None:
    """Mark the segment as mapped by this process until the last duplicate of `fd` is closed."""
    if not lock_byte(fd, 0, fcntl.F_RDLCK):
        raise SegmentGoneError(str(path), "it is being removed")


def lock_byte(fd: int, place: int, kind: int) -> bool:
    """Lock or unlock one byte for the open file `fd`; tell whether it was to be had. Never waits.

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
    """Tell whether the owner of a segment lives or anybody maps it. False where there is no segment."""
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


def owner_of(address: WeightsAddress) -> Owner | None:
    """Return who owns the segment of an address, dead or alive, or None where it is gone."""
    try:
        segment = open_existing(Path(address.path), address.nonce)
    except SegmentGoneError:
        return None
    try:
        return segment.owner()
    finally:
        os.close(segment.fd)


def sweep(address_file: Path | None = None, *, spared: Container[Path] = (), kind: str = "") -> list[Path]:
    """Remove what dead owners left and nobody maps, and return it.

    Args:
        address_file: `weights.json` of a run: only the segment that it names is looked at, and the file itself goes
            too. None looks at every segment of this user.
        spared: Segments that stay although nobody has them: their owner is about to come back.
        kind: Only segments of this kind, if one is given.
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
            return False  # an heir has come in between
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    logger.info("removed segment=%s reason=owner_dead", path)
    return True


def read_address(path: Path) -> WeightsAddress | None:
    """Read an address file, or None where there is none (yet) or what is there is no address."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=WeightsAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_address(path: Path, segment: Segment) -> None:
    """Replace an address file: readers see the old address or the new one, whole."""
    address = WeightsAddress(path=str(segment.path), nonce=segment.nonce)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    written.write_bytes(msgspec.json.encode(address) + b"\n")
    written.replace(path)
