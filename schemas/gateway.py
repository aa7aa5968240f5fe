"""The configuration of the gateway."""

from typing import Annotated, Final

from pydantic import Field, PositiveFloat, PositiveInt

from rolloutmq.schemas.section import Section

MIB: Final = 1 << 20


class GatewayConfig(Section):
    """`[gateway]`: the HTTP interface of Atropos, for its environments and trainers."""

    enabled: bool = False
    """Start it with the run. Environments that come through it need not be configured."""
    listen: bool = True
    """Have the run listen by itself; off where an ASGI server of your own serves it."""
    host: str = "127.0.0.1"
    """Address to bind. There is no password: on another address whoever reaches it can do everything."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to bind, Atropos' own; 0 lets the system choose, and `gateway.json` tells which."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may ask, `*` for all. None by itself: any page in a browser could reset the run."""
    max_body_bytes: PositiveInt = 64 * MIB
    """Largest body as it comes."""
    max_inflated_bytes: PositiveInt = 256 * MIB
    """Largest body once it is inflated: a gzip of one megabyte can become a gigabyte."""
    max_in_hand_bytes: PositiveInt = 1024 * MIB
    """Bodies, and groups that wait for room, that are not answered yet; while there are more, no other body is read and
    its client waits. An estimate: a compressed body counts four times until it is here."""
    gzip_level: Annotated[int, Field(ge=1, le=9)] = 1
    """Of answers. The highest takes twenty times as long for a tenth less."""
    threads: PositiveInt = 2
    """Threads for large bodies: they are inflated and compressed there."""
    absent_s: PositiveFloat = 60.0
    """An environment that was not heard for that long gives up its weight and minimum share until it is heard again.
    Atropos' environments ask for their status ten times a second, and never say that they go."""
    post_wait_s: PositiveFloat = 240.0
    """How long a group may wait for room before it is answered 503. Clients give up after 300 s; at a 503 they try
    twice more, and then drop the group."""
