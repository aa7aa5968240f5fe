"""Certificates for tests: signed by one authority, with any names and dates."""

from pathlib import Path
from typing import NamedTuple

import pytest

from rolloutmq.bus.transport.keys.certificates import CA, CERT, DAYS, KEY, make_certificate


class Pair(NamedTuple):
    """Files of a server: certificate, key, and what its clients trust."""

    cert: Path
    key: Path
    ca: Path


def pair(directory: Path, *hosts: str, days: float = DAYS) -> Pair:
    """Make a certificate for hosts and loopback; that of a directory is replaced, by the same authority.

    Args:
        directory: Where the files are.
        hosts: Names of the server.
        days: Its life; down to -1/24 it has ended.
    """
    pytest.importorskip("cryptography")
    directory.mkdir(mode=0o700, exist_ok=True)
    make_certificate(directory, hosts or ("localhost",), days)
    return Pair(directory / CERT, directory / KEY, directory / CA)
