"""Heartbeats of a relay that receives the weights of a run of another host.

The broker hears what the relay has and what it waits for. If the relay serves further relays, the broker also learns
its address and the secret of its tickets, and then gives tickets for it.
"""

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from rolloutmq.bus.engine_registry import own_network
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.mirror.beats import send_beats
from rolloutmq.bus.transport.mirror.engine_beats import own_host
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.bus.transport.mirror.place import host_of
from rolloutmq.schemas.files import RelayState, RunLayout, StreamAddress
from rolloutmq.schemas.network.address import host_and_port
from rolloutmq.schemas.wire.joining import WAIT_CHARS, RelayBeat

PREFIX: Final = "relay."
T = TypeVar("T")


@dataclass(frozen=True)
class RelayBeats:
    """Tells the broker of the relay of this host.

    Attributes:
        name: Its name, `relay.NAME`.
        listen: Address at which it serves further relays; empty for none.
        advertise: Host by which they reach it; empty for the one of `listen`, or that which reaches the run.
        behind: Relay that it gets the weights from; empty for that of the run.
    """

    name: str
    listen: str = ""
    advertise: str = ""
    behind: str = ""

    async def run(self, mirror: Mirror, layout: RunLayout) -> None:
        """Send heartbeats until cancelled; then say that the relay ends."""

        def beat(told: RelayState, address: str, *, ends: bool) -> RelayBeat:
            return self.beat(told, _read(layout.stream, StreamAddress), address, ends=ends)

        await send_beats(mirror, self.name, lambda: _read(layout.relay, RelayState), beat)

    def beat(
        self, told: RelayState, stream: StreamAddress | None, address: str, *, ends: bool = False
    ) -> RelayBeat:
        """Return one heartbeat.

        Args:
            told: What the relay says of itself.
            stream: Where it serves further relays.
            address: Address at which this host reaches the broker.
            ends: It ends in order.
        """
        serves = stream if self.listen else None
        return RelayBeat(
            name=self.name,
            host=socket.gethostname()[:255],
            at=time.time(),
            version=told.version,
            waits_for=told.waits_for[:WAIT_CHARS],
            serves=f"tcp://{self._host(address)}:{serves.port}" if serves is not None else "",
            secret=serves.secret if serves is not None else "",
            sealed=serves.sealed if serves is not None else True,
            ends=ends,
            run_id=told.run_id,
            behind=self.behind,
            network=own_network(),
        )

    def _host(self, address: str) -> str:
        host = self.advertise or (host_and_port(self.listen) or ("", 0))[0]
        if host in {"0.0.0.0", "::", ""}:
            host = own_host(host_of(address))
        return f"[{host}]" if ":" in host else host


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return read_json(path, kind)
    except (msgspec.DecodeError, OSError):
        return None
