"""Where a run of another host has its directory on this host, and what of its addresses this host can use. Pure, but
for the directory."""

import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Final

from rolloutmq.bus.transport.bindings import private_directory
from rolloutmq.schemas.errors import UnusablePathError

_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?P<rest>(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?)"
)
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.-]+")
ANY_HOST: Final = frozenset({"0.0.0.0", "[::]"})
"""Host of a URL in place of the one by which the asker reaches the run."""


def directory_of(run: str, address: str, given: Path | None = None, apart: str = "") -> Path:
    """Return the directory on this host of a run; create it, for this user alone.

    Without a given one it is below `XDG_STATE_HOME` or the user's home, and where that cannot be written below the
    temporary directory. It is named by this host, as several may share a home, by the run and by its address.

    Args:
        run: Name of the run.
        address: Address of its broker.
        given: The directory that a user chose.
        apart: Added to the name.

    Raises:
        AddressInUseError: Another user owns the directory.
        UnusablePathError: It cannot be created.
    """
    try:
        return private_directory(given) if given is not None else _usual(run, address, apart)
    except OSError as error:
        where = given or tempfile.gettempdir()
        raise UnusablePathError(f"directory of the run {where}", error.strerror or str(error)) from error


def _usual(run: str, address: str, apart: str) -> Path:
    name = f"{run}@{_safe(address.removeprefix('tcp://'))}{f'-{apart}' if apart else ''}"
    try:
        return private_directory(_state() / "rolloutmq" / _safe(socket.gethostname()) / name)
    except (OSError, RuntimeError):  # no home, or one that is read-only
        own = private_directory(Path(tempfile.gettempdir()) / f"rolloutmq-{os.geteuid()}")
        return private_directory(own / name)


def usable_url(told: str, address: str) -> str:
    """Return the URL of a server of the run for this host; empty if it is none.

    Args:
        told: The URL as the run tells it. A host of `ANY_HOST` stands for the one by which this host reaches the run.
        address: Address at which this host reaches the broker, `tcp://HOST:PORT`.
    """
    found = _URL.fullmatch(told)
    if found is None:
        return ""
    host = host_of(address) if found["host"] in ANY_HOST else found["host"]
    return f"{found['scheme']}://{host}{found['rest']}"


def host_of(address: str) -> str:
    """Return the host of `tcp://HOST:PORT`, in brackets if it is of IPv6."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def _state() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    return Path(given) if given else Path.home() / ".local" / "state"


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text)
