"""Addresses that a server of a run may bind. Pure: no name is looked up.

A server on loopback is for this host alone. Any other address is within reach of other machines: the server must ask
for a key or a token, or the configuration must say that it means it, by `insecure = true` in the section of the server.
"""

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

LISTEN_PORTS: Final = 4
"""Ports of a broker's listener, one after the other: serve, ingest, events, publish."""
_LISTEN: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class Listen(NamedTuple):
    """`broker.listen`: host, in brackets if it is of IPv6, and first port; 0 lets the system choose all."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this host reaches it."""
        return is_loopback(self.host.strip("[]"))


def listen_of(text: str) -> Listen | None:
    """Return the parts of `broker.listen`, None if it is none."""
    found = _LISTEN.fullmatch(text)
    if found is None or int(found[2]) > 65535 - (LISTEN_PORTS - 1):
        return None
    return Listen(found[1], int(found[2]))


def port_of(address: str) -> int:
    """Return the port of a bound address `tcp://HOST:PORT`."""
    return int(address.rpartition(":")[2])


def problem_of_listen(listen: str, keys: str, *, insecure: bool) -> str:
    """Return the problem with `broker.listen`, `broker.keys` and `broker.insecure`, or an empty text."""
    if not listen:
        return ""
    if listen_of(listen) is None:
        return (
            f"listen must be tcp://HOST:PORT, the first of {LISTEN_PORTS} ports (got {listen!r}); "
            "such as tcp://0.0.0.0:7760"
        )
    if keys and insecure:
        return (
            f"insecure must be false with keys, which it would not ask for (got keys = {keys!r}); remove one"
        )
    if keys or insecure:
        return ""
    return (
        f"listen needs keys, or whoever reaches the address may use the run (got {listen!r}); make them with "
        '`rolloutmq keys init keys` and set broker.keys = "keys", or allow it with broker.insecure = true'
    )


def host_and_port(text: str) -> tuple[str, int] | None:
    """Return both parts of `tcp://HOST:PORT`, None if it is none; an address of IPv6 comes without its brackets."""
    try:
        parts = urlsplit(text)
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
            return parts.hostname, parts.port
    except ValueError:
        pass
    return None


def problem_of_weights(listen: str, keys: str, *, insecure: bool) -> str:
    """Return the problem with `weights.listen`, or an empty text.

    Args:
        listen: The address.
        keys: `broker.keys`: receivers of other hosts get their tickets from the broker.
        insecure: `weights.insecure`.
    """
    parts = host_and_port(listen)
    if parts is None:
        return f"listen must be tcp://HOST:PORT (got {listen!r}); port 0 takes any"
    if keys or insecure or is_loopback(parts[0]):
        return ""
    return (
        f"listen needs keys, by which the broker knows who may have the weights (got {listen!r}); make them with "
        '`rolloutmq keys init keys` and set broker.keys = "keys", or allow it with weights.insecure = true'
    )


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches a server that is bound to `host`."""
    import ipaddress  # the SDK needs none of it

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def problem_of_host(section: str, host: str, *, tokens: bool, insecure: bool) -> str:
    """Return the problem with the `host` of an HTTP server, or an empty text.

    Args:
        section: Section of the server.
        host: The host.
        tokens: The server asks for a token.
        insecure: The configuration allows one that does not.
    """
    if tokens or insecure or is_loopback(host):
        return ""
    return (
        f"host is within reach of other machines, and the server asks for no token (got {host!r}); set "
        f"run.http_token_file or broker.keys, use 127.0.0.1, or allow it with {section}.insecure = true"
    )
