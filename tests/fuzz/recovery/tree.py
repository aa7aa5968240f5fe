"""A directory as a value: the contents of its files by name, and entries that are no files."""

import os
import shutil
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rolloutmq.bus.files import write_private


class Kind(StrEnum):
    """What lies in place of a file."""

    DIRECTORY = "directory"
    FULL_DIRECTORY = "full directory"
    FIFO = "fifo"
    LINK = "link"
    SOCKET = "socket"


class Odd(NamedTuple):
    """An entry that is no file; `target` of a link."""

    kind: Kind
    target: str = ""


Tree = Mapping[str, bytes | Odd]
"""Entries by their path below the directory."""


def gathered(root: Path) -> Tree:
    """Return the files of a directory."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def lay(tree: Tree, root: Path) -> None:
    """Make a directory of a tree."""
    root.mkdir(mode=0o700)
    for name, entry in tree.items():
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if isinstance(entry, bytes):
            write_private(path, entry)
        else:
            _lay_odd(entry, path)


def _lay_odd(entry: Odd, path: Path) -> None:
    match entry.kind:
        case Kind.DIRECTORY:
            path.mkdir()
        case Kind.FULL_DIRECTORY:
            path.mkdir()
            (path / "inside").write_bytes(b"x")
        case Kind.FIFO:
            os.mkfifo(path)
        case Kind.LINK:
            path.symlink_to(entry.target)
        case Kind.SOCKET:
            os.mknod(path, 0o140600)


def signature(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return what changes when somebody writes below a directory."""
    found = {}
    for path in root.rglob("*"):
        info = path.lstat()
        found[str(path.relative_to(root))] = (info.st_mode, info.st_size, info.st_mtime_ns)
    return found


def copied(root: Path, target: Path) -> Path:
    """Copy a directory; entries that are no files are copied as what they are."""
    target.mkdir(mode=0o700)
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            (target / path.name).symlink_to(path.readlink())
        elif path.is_dir():
            copied(path, target / path.name)
        elif path.is_file():
            shutil.copyfile(path, target / path.name)
        else:
            os.mknod(target / path.name, path.lstat().st_mode)
    return target
