"""The key of a client: the file that it carries, and the CURVE keys of its sockets."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rolloutmq.bus.transport.keys.key_files import read_secret, write_secret
from rolloutmq.schemas.errors import ConfigError, UnusablePathError
from rolloutmq.schemas.files import Endpoints
from rolloutmq.schemas.network.keys import Bundle

OWN_KEY: Final = "ROLLOUTMQ_KEY"
"""Variable with the file of this process's key, in place of that in `endpoints.json`."""


@dataclass(frozen=True)
class CurveKeys:
    """CURVE keys of a client's sockets, in Z85."""

    name: str
    """Name of the key, for errors."""
    public: str
    secret: str = field(repr=False)
    server: str
    """Public key of the broker."""


def load_bundle(path: Path) -> Bundle:
    """Read the file of a client's key.

    Raises:
        MissingError: There is no such file.
        NotPrivateError: Another user owns it, or may read it.
        ConfigError: It is damaged, or no key file.
        UnusablePathError: It cannot be read.
    """
    return read_secret(path, Bundle, "get a key file of `rolloutmq keys new` from the host of the broker")


def save_bundle(path: Path, bundle: Bundle) -> None:
    """Write the file of a client's key, for this user alone.

    Raises:
        ConfigError: The file exists.
        UnusablePathError: It cannot be written.
    """
    try:
        write_secret(path, bundle, new=True)
    except FileExistsError:
        raise ConfigError(
            str(path), "exists, and is not written over; name another file with --out"
        ) from None
    except OSError as error:
        raise UnusablePathError(str(path), error.strerror or str(error)) from error


def curve_keys(bundle: Bundle) -> CurveKeys:
    """Return the keys for the sockets of a client."""
    return CurveKeys(bundle.name, bundle.public, bundle.secret, bundle.server)


def load_keys(path: Path) -> CurveKeys:
    """Read the file of a client's key, and return the keys of its sockets; raises what `load_bundle` raises."""
    return curve_keys(load_bundle(path))


def keys_of(endpoints: Endpoints) -> CurveKeys | None:
    """Return the keys for sockets to these addresses, None if they need none; raises what `load_bundle` raises."""
    # Programs of several roles may share one directory of a run of another host.
    return load_keys(Path(os.environ.get(OWN_KEY) or endpoints.key)) if endpoints.key else None
