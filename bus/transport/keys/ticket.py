"""Tickets: proof that a receiver may have the weights of a run, without a list of receivers at the sender.

The sender has a secret, in `stream.json` of its run directory. Whoever may read that file makes tickets: a receiver on
the same host by itself, for another host the broker, over its keyed connection. A ticket is public: a name, and the
time at which it ends by the clock of the sender's host, which is also that of its maker. Its key is a keyed hash of it,
so the sender computes the key from the ticket that a receiver shows.
"""

import hashlib
import hmac
import secrets
import time
from typing import Final, NamedTuple

import msgspec

from rolloutmq.schemas.errors import MalformedError

VALID_S: Final = 120.0
"""Lifetime of a ticket in seconds: enough to connect. A connection ends by `sender.SESSION_S`."""
TICKET_BYTES: Final = 512
"""Largest encoded ticket."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver shows."""

    name: str
    """Name of the key that it was given for, or of the receiver's process."""
    until: float
    """Wall clock of the sender's host."""
    nonce: bytes


class Pass(NamedTuple):
    """A ticket as a receiver has it: what it shows, and the key that it proves to have."""

    shown: bytes
    key: bytes


def new_secret() -> str:
    """Return a secret for a sender."""
    return secrets.token_hex(32)


def issue(secret: str, name: str, now: float | None = None) -> Pass:
    """Make a ticket of a sender's secret."""
    until = (time.time() if now is None else now) + VALID_S
    shown = msgspec.msgpack.encode(Ticket(name=name[:128], until=until, nonce=secrets.token_bytes(16)))
    return Pass(shown, key_of(secret, shown))


def key_of(secret: str, shown: bytes) -> bytes:
    """Return the key of a shown ticket. Whether it is still valid: see `read`."""
    return hmac.digest(bytes.fromhex(secret), b"rolloutmq weights ticket" + shown, hashlib.sha256)


def read(shown: bytes, now: float) -> Ticket:
    """Decode a shown ticket. Its maker is unproven until the receiver proves its key.

    Raises:
        MalformedError: It is none, or not valid at wall clock `now`.
    """
    try:
        ticket = msgspec.msgpack.decode(shown, type=Ticket)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"ticket for weights: {error}") from None
    if not now <= ticket.until <= now + 2 * VALID_S:
        raise MalformedError("ticket for weights: no longer valid; get a new one")
    return ticket
