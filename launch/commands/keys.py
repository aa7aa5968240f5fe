"""`rolloutmq keys`: the keys of a run on a network."""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rolloutmq.bus.files import read_regular
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.certificates import (
    CA,
    CERT,
    DAYS,
    KEY,
    make_certificate,
    require_cryptography,
)
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.errors import ConfigError, UnusablePathError
from rolloutmq.schemas.network.keys import KeyRecord, Role
from rolloutmq.schemas.printable import printable, shell_word

PEM = b"-----BEGIN CERTIFICATE-----"


def init(directory: Path, hosts: Sequence[str] = ()) -> int:
    """Create a key directory, with a certificate for hosts if there are any; return the exit code.

    Raises what `KeyDirectory.create` and `make_certificate` raise.
    """
    if hosts:
        require_cryptography()
    KeyDirectory.create(directory)
    sys.stdout.write(
        f"wrote {printable(str(directory))}: set broker.keys to it, and make a key for each client with "
        f"`rolloutmq keys new {shell_word(directory)} NAME --role ROLE`\n"
    )
    if hosts:
        _certify(directory, hosts)
    return 0


def tls(directory: Path, hosts: Sequence[str]) -> int:
    """Make or renew a certificate for hosts; return the exit code. Raises what `make_certificate` raises."""
    KeyDirectory(directory).server()
    _certify(directory, hosts)
    return 0


def _certify(directory: Path, hosts: Sequence[str]) -> None:
    make_certificate(directory, hosts)
    cert, key, ca = (printable(str(directory / name)) for name in (CERT, KEY, CA))
    sys.stdout.write(
        f'wrote {cert}, for {DAYS} days: set run.tls_cert = "{cert}", run.tls_key = "{key}" and '
        f'run.tls_ca = "{ca}"\n'
    )


def new(directory: Path, name: str, role: Role, out: Path, ca: Path | None) -> int:
    """Make a key and write the file of its client; return the exit code.

    Raises:
        ConfigError: The name was given before, the file exists, or `ca` has no certificate.
        MissingError, NotPrivateError, UnusablePathError: The directory or a file cannot be used.
    """
    if out.exists():
        raise ConfigError(str(out), "exists, and is not written over; name another file with --out")
    own = directory / CA
    certificates = _certificates(ca or own) if ca is not None or own.exists() else ""
    save_bundle(out, KeyDirectory(directory).new(name, role, ca=certificates))
    sys.stdout.write(
        f"wrote {printable(str(out))}: carry it to the host of {name}, keep no copy, and close it to other users "
        "there (chmod 600)\n"
    )
    return 0


def _certificates(path: Path) -> str:
    try:
        data = read_regular(path)
    except OSError as error:
        raise UnusablePathError(str(path), error.strerror or str(error)) from error
    if PEM not in data:
        raise ConfigError("--ca", f"must be a file with certificates in PEM (got {path})")
    return data.decode("ascii", "replace")


def show(directory: Path, *, as_json: bool) -> int:
    """Print the keys of a directory; return the exit code. Raises what `KeyDirectory.records` raises."""
    records = KeyDirectory(directory).records()
    if as_json:
        sys.stdout.write(json.dumps([_plain(key) for key in records]) + "\n")
        return 0
    rows = [("NAME", "ROLE", "CREATED", "STATE"), *map(_row, records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0


def revoke(directory: Path, name: str) -> int:
    """Revoke a key; return the exit code. Raises what `KeyDirectory.revoke` raises."""
    record = KeyDirectory(directory).revoke(name)
    sys.stdout.write(f"revoked {record.name}\n")
    return 0


def _row(key: KeyRecord) -> tuple[str, str, str, str]:
    state = "valid" if key.revoked is None else f"revoked {_time(key.revoked)}"
    return key.name, key.role.value, _time(key.created), state


def _plain(key: KeyRecord) -> dict[str, object]:
    return {
        "name": key.name,
        "role": key.role.value,
        "public": key.public,
        "created": key.created,
        "revoked": key.revoked,
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")
