"""Addresses that a server of a run may bind. Pure: no name is looked up.

A server on loopback is for this host alone. Any other address is within reach of other machines, so a configuration
must say that it means it: `insecure = true` in the section of the server.
"""


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches a server that is bound to `host`."""
    import ipaddress  # the SDK needs none of it

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def problem_of_host(section: str, host: str, *, insecure: bool) -> str:
    """Return the problem with the `host` of an HTTP server, or an empty text."""
    if insecure or is_loopback(host):
        return ""
    return (
        f"host is within reach of other machines, and plain HTTP is not encrypted (got {host!r}); "
        f"use 127.0.0.1, or allow it with {section}.insecure = true"
    )
