"""Addresses of a broker for clients of other hosts, in tests."""

from msgspec.structs import replace

from rolloutmq.bus.transport.bindings import LISTENING
from rolloutmq.schemas.files import Endpoints

INSECURE = {"listen": "tcp://127.0.0.1:0", "insecure": True}
"""Configuration of a broker that also listens on loopback, for everybody."""


def over_tcp(endpoints: Endpoints) -> Endpoints:
    """Return the addresses of `broker.listen` in place of the sockets of this host."""
    return replace(endpoints, **dict(zip(LISTENING, endpoints.listen, strict=True)))
