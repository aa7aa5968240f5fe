"""Files of other RolloutMQ versions: present files, rewritten in the old format."""

import struct
from pathlib import Path

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.services.broker.journal.format.records import (
    FILE_HEADER_BYTES,
    FILE_MAGIC,
    HEADER_BYTES,
    header_at,
    nonce_of,
)
from rolloutmq.services.broker.journal.read.versions import OLD_LOGS

OTHERS = (1, 2, 3, 5)
"""Versions that are not ours: two that did not say so in the beginning of a file, the last one and the next one."""


def beginning(nonce: bytes, version: int) -> bytes:
    """Return the header of a file of that version."""
    said = struct.pack("<I", version) if version > 2 else b""
    return FILE_MAGIC + nonce + struct.pack("<I", checksum([FILE_MAGIC, nonce, said])) + said.ljust(4, b"\0")


def as_version(path: Path, version: int) -> Path:
    """Rewrite a file in that version's format: its header, the header of each record, and the name of a log."""
    data = bytearray(path.read_bytes())
    nonce = nonce_of(data)
    assert nonce is not None, path
    at = FILE_HEADER_BYTES
    while (header := header_at(bytes(data[at : at + HEADER_BYTES]), nonce, at)) is not None:
        struct.pack_into("<H", data, at + 4, version)
        said = bytes(data[at : at + HEADER_BYTES - 4])
        struct.pack_into("<I", data, at + HEADER_BYTES - 4, checksum([nonce, struct.pack("<Q", at), said]))
        at += header.span
    data[:FILE_HEADER_BYTES] = beginning(nonce, version)
    path.write_bytes(data)
    if version < 3 and path.match("events-*.rmq"):
        return path.rename(path.with_name(path.name.replace("events", OLD_LOGS)))
    return path


def listing(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return every file and directory below a root, with its mode, modification time and bytes."""
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = about.st_mode, about.st_mtime_ns, data
    return found
