"""First process of a host: builds the host's file system, and then reaps the processes that lose their parent.

    python -I -S host_init.py '{"root": DIR, "tmp": DIR, "hosts": FILE, "shared": [PATH, ...]}'

It runs in new mount, pid, network and ipc namespaces. Its root has the system's programs, the `shared` paths at the
same place and read-only, private and empty /dev/shm, /home and /root, and the directory `tmp` as /tmp. Nothing else of
the caller's files exists there. It prints `ready`, and ends with its standard input.

It needs no package, so that a host starts at once.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

SYSTEM: Final = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64")
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
HOME: Final = "home/host"

MS_RDONLY: Final = 1
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
KEPT: Final = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME
"""Flags that a user namespace may not clear. Their numbers are those of mount(2)."""
SETTABLE: Final = {os.ST_RELATIME: 1 << 21}

_libc: Final = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    """Call mount(2); OSError if it fails."""
    called = _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, data.encode())
    if called:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def bind(source: Path, target: Path, *, read_only: bool = True) -> None:
    """Show a file or directory at another place."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.touch()
    mount(str(source), target, "", MS_BIND | MS_REC)
    if read_only:
        kept = os.statvfs(target).f_flag & KEPT
        flags = sum(SETTABLE.get(flag, flag) for flag in (1 << bit for bit in range(16)) if flag & kept)
        mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | flags)


def build(root: Path, tmp: Path, names: Path, shared: list[Path]) -> None:
    """Mount the file system of the host below `root`."""
    mount("", Path("/"), "", MS_REC | MS_PRIVATE)
    mount("none", root, "tmpfs", os.ST_NOSUID | os.ST_NODEV, "mode=755,size=64m")
    for name in SYSTEM:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(source.readlink())
        elif source.exists():
            bind(source, root / name)
    for name in ("proc", "sys", "dev", HOME, "root", "run", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    mount("proc", root / "proc", "proc", os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    mount("sysfs", root / "sys", "sysfs", os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | MS_RDONLY)
    for name in DEVICES:
        bind(Path("/dev", name), root / "dev" / name, read_only=False)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    (root / "dev/shm").mkdir()
    mount("none", root / "dev/shm", "tmpfs", os.ST_NOSUID | os.ST_NODEV, "mode=1777")
    bind(tmp, root / "tmp", read_only=False)
    for path in sorted(shared):  # a folder before what is in it
        bind(path, root / path.relative_to("/"))
    bind(names, root / "etc/hosts")


def enter(root: Path) -> None:
    """Make `root` the root of this namespace, and forget the old one."""
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "."], check=True)
    if _libc.umount2(b".", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "umount of the old root")
    os.chdir("/")


def main() -> None:
    told = json.loads(sys.argv[1])
    root = Path(told["root"])
    build(root, Path(told["tmp"]), Path(told["hosts"]), [Path(path) for path in told["shared"]])
    enter(root)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    os.write(1, b"ready\n")
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    main()
