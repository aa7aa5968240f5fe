"""Keys of a run on a network: the contents of a key directory, and of the file that a client carries.

server.key         key pair of the broker (ServerKey)                    `rolloutmq keys init`
authorized.json    keys that may enter, and revoked ones (KeyList)       `keys new`, `keys revoke`; read by the broker
NAME.key           what the client of one name carries (Bundle)          `keys new`

A key is a CURVE key pair, in Z85 text. The directory has the public key of each client alone: its secret key and its
token are in the client's file, and nowhere else.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Name

CurveKey = Annotated[str, Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]
"""A public or secret key: 32 bytes as Z85."""
TokenHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 of a token, in hexadecimal."""

KEYS_LIMIT: Final = 10_000
"""Most keys of a directory, revoked ones included: as many as a run has workers."""


class Role(StrEnum):
    """What the holder of a key may do."""

    WORKER = "worker"
    """Deliver groups and take tasks."""
    TRAINER = "trainer"
    """Pull and settle batches, submit tasks, and report steps."""
    ENGINE = "engine"
    """Serve the policy: report itself, and receive weights."""
    MONITOR = "monitor"
    """Read status and events."""
    ADMIN = "admin"
    """Everything."""


class ServerKey(msgspec.Struct, frozen=True, kw_only=True):
    """`server.key`: the key pair by which clients recognize the broker."""

    public: CurveKey
    secret: CurveKey

    def __repr__(self) -> str:
        return f"ServerKey(public={self.public!r})"


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One key of `authorized.json`."""

    name: Name
    role: Role
    public: CurveKey
    token: TokenHash
    """Hash of its token for HTTP."""
    created: float
    """Wall-clock seconds."""
    revoked: float | None = None
    """When it was revoked, wall-clock seconds; None if it may enter."""


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """`authorized.json`. No two keys have the same name; a revoked name is not given again."""

    keys: Annotated[tuple[KeyRecord, ...], Meta(max_length=KEYS_LIMIT)] = ()


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One token of `http_tokens.json`, on a host that serves a run of another one: its hash, and whose it is."""

    name: str
    """Name of the key; `(run)` for processes of the run's own host."""
    role: Role
    token: TokenHash
    revoked: float | None = None
    """When it was revoked, wall-clock seconds of the run's host; None if it was not."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """`NAME.key`: what a client of another host carries."""

    name: Name
    role: Role
    public: CurveKey
    secret: CurveKey
    server: CurveKey
    """Public key of the broker: the client talks to nobody else."""
    token: Annotated[str, Meta(min_length=16, max_length=256)]
    """Its token for HTTP."""
    ca: Annotated[str, Meta(max_length=1 << 20)] = ""
    """Certificates, in PEM, by which it trusts the HTTP servers of the run; empty for those of its system."""

    def __repr__(self) -> str:
        return f"Bundle(name={self.name!r}, role={self.role.value!r}, public={self.public!r})"
