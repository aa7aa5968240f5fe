"""The way to a broker of another host: the address of its listener, and the file of a key."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.schemas.errors import UsageError

_ADDRESS: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Remote:
    """A broker of another host. It is accepted wherever a run directory is.

    Attributes:
        address: Address of its `serve` socket, `tcp://HOST:PORT`, as `broker.listen` has it.
        key: File of the client's key, as `rolloutmq keys new` wrote it. It is read again for each connection. None
            for a broker that asks for none, by `broker.insecure`.
    """

    address: str
    key: Path | None = None

    def __post_init__(self) -> None:
        require_tcp(self.address)

    def __str__(self) -> str:
        return self.address


def require_tcp(address: str) -> None:
    """Require the address of a broker's listener.

    Raises:
        UsageError: It is none.
    """
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 0 < int(found[2]) <= 65535:
        raise UsageError(f"address: must be tcp://HOST:PORT, as in broker.listen (got {address!r})")


def remote(address: str, key: str | Path | None = None) -> Remote:
    """Return a broker of another host, in place of a run directory: `Producer.open(remote(...), ...)`.

    Args:
        address: Its `broker.listen`, with a name or an address that this host can reach: `tcp://HOST:PORT`.
        key: File of `rolloutmq keys new`, for this user alone. None for a broker with `broker.insecure`, which asks
            for none.

    Raises:
        UsageError: The address is wrong.
        MissingError, NotPrivateError, ConfigError, UnusablePathError: The key cannot be used.
    """
    if key is None:
        return Remote(address)
    file = Path(key).absolute()
    load_bundle(file)  # a wrong file is told here, not in a search without an end
    return Remote(address, file)
