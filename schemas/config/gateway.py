"""`[gateway]`: the HTTP interface for Atropos environments and trainers."""

from typing import Annotated, Final

from pydantic import Field, PositiveFloat, PositiveInt

from rolloutmq.schemas.config.base import Section

MIB: Final = 1 << 20


class GatewayConfig(Section):
    """`[gateway]`: the HTTP interface for Atropos environments and trainers."""

    enabled: bool = False
    """Start the gateway with the run. Environments on the gateway need no `[environment]` section."""
    listen: bool = True
    """Listen on `host` and `port`. Off: your own ASGI server serves the gateway."""
    host: str = "127.0.0.1"
    """Address to bind. Another one than loopback needs tokens, by `run.http_token_file` or `broker.keys`, or
    `insecure`."""
    insecure: bool = False
    """Allow a `host` within reach of other machines without a token: everybody who reaches the address controls the
    run."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to bind, by default that of Atropos. 0 lets the system choose; `gateway.json` then has the port."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests, `*` for all. The gateway's own page needs no entry. All others are
    refused: any page in a browser could reset the run."""
    max_body_bytes: PositiveInt = 64 * MIB
    """Largest request body on the wire."""
    max_inflated_bytes: PositiveInt = 256 * MIB
    """Largest request body after decompression: one megabyte of gzip can inflate to a gigabyte."""
    max_in_hand_bytes: PositiveInt = 1024 * MIB
    """Limit for bodies that arrive and groups that wait for room. A body counts for the bytes that have come. At the
    limit the gateway reads no further, so clients wait; if unfinished bodies are most of it, one goes on at a time.
    The bodies being inflated and decoded, one for each of `threads`, come on top."""
    silent_s: PositiveFloat = 10.0
    """Time a client has for the headers of a request, from the beginning of its connection, and for each further 64 kB
    of a body. A client that stops sending loses its connection. Waits for room do not count."""
    gzip_level: Annotated[int, Field(ge=1, le=9)] = 1
    """Compression level of responses. Level 9 takes twenty times as long and saves a tenth."""
    threads: PositiveInt = 2
    """Threads for inflating and compressing large bodies."""
    absent_s: PositiveFloat = 60.0
    """An environment that sent no request for this long gives up its weight and minimum share until it sends one.
    Atropos environments poll ten times a second and do not unregister."""
    post_wait_s: PositiveFloat = 240.0
    """Longest wait of a group for room, and of a status request for a broker that has not replied yet; then the gateway
    answers 503. Atropos clients time out after 300 s; after a 503 they retry twice. Then they drop a group, and end for
    want of a status."""
