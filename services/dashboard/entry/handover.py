"""Secrets of a page that outlive its server: a file in memory, which the launcher keeps and each server inherits.

No other process can read it, unlike an environment or an argument. It also says whether the token of the link was
exchanged, so a server that is started again does not take it a second time.
"""

import os
from typing import Final

import msgspec

from rolloutmq.services.dashboard.entry.sessions import Sessions

_LIMIT_BYTES: Final = 4096


class Secrets(msgspec.Struct, frozen=True):
    """Token of the link, key of the cookies, and whether the token was exchanged."""

    token: str
    key: bytes
    is_used: bool = False


def create(secrets: Secrets) -> int:
    """Return the descriptor of a new file with the secrets; the caller closes it."""
    fd = os.memfd_create("rolloutmq-dashboard")
    _write(fd, secrets)
    return fd


def opened(fd: int) -> Sessions:
    """Return the sessions of an inherited file, which learns of the exchange.

    Raises:
        OSError, msgspec.DecodeError: It is no such file.
    """
    secrets = msgspec.msgpack.decode(os.pread(fd, _LIMIT_BYTES, 0), type=Secrets)
    used = msgspec.structs.replace(secrets, is_used=True)
    return Sessions(secrets.token, secrets.key, is_used=secrets.is_used, on_used=lambda: _write(fd, used))


def _write(fd: int, secrets: Secrets) -> None:
    data = msgspec.msgpack.encode(secrets)
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
