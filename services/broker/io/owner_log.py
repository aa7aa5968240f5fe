"""`owners.jsonl`: which key each name belongs to, for a restarted broker.

Each change is one line, written before the registration is answered; it survives a killed broker. The file is written
anew at each start. After a power cut the last lines may be missing: then the key that registers first has the name.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rolloutmq.bus.files import append_whole, read_regular, write_private
from rolloutmq.schemas.files import NameOwner
from rolloutmq.schemas.network.keys import Role

logger = logging.getLogger(__name__)

_LINES = msgspec.json.Decoder(NameOwner)


class OwnerLog:
    """The log of one run directory. One writer at a time.

    Args:
        path: Its file, which may be missing.
        roles: Keys that may enter; names of others are left out.
    """

    def __init__(self, path: Path, roles: Mapping[str, Role]) -> None:
        self._path = path
        self.owners: dict[str, str] = {}
        """Owner of each name at the start."""
        for line in self._lines():
            try:
                found = _LINES.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                logger.warning("line of owners left out file=%s", path)
                continue
            self.owners.pop(found.name, None)
            if found.key in roles:
                self.owners[found.name] = found.key
        write_private(path, _encoded(self.owners))

    def write(self, changes: Mapping[str, str]) -> None:
        """Append changes; a full disk is logged, and costs no more than a name after a restart."""
        try:
            append_whole(self._path, _encoded(changes))
        except OSError as error:
            logger.warning("owners of names not written file=%s error=%s", self._path, error)

    def _lines(self) -> list[bytes]:
        with suppress(FileNotFoundError):
            return read_regular(self._path).splitlines()
        return []


def _encoded(owners: Mapping[str, str]) -> bytes:
    return b"".join(
        msgspec.json.encode(NameOwner(name=name, key=key)) + b"\n" for name, key in owners.items()
    )
