"""Heartbeats of an engine that serves a run of another host: what its address file says, once a second.

Its own file is on this host. The broker writes the same beside the files of the run's other engines, so that workers
find it wherever they are.
"""

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.log_throttle import WaitLog
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.mirror.beats import send_beats
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.bus.transport.way.families import families
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.wire.joining import EngineBeat, EngineState

logger = logging.getLogger(__name__)

WEIGHTS_S: Final = 5.0
"""Time without weights after which the command says what is missing."""

Url = Callable[[str, str], str]
"""Returns the URL of an engine for others, by that of its own host and the address at which this host reaches the
broker."""


class EngineBeats:
    """Tells the broker of one engine of this host.

    Args:
        name: Its name.
        url: Tells where others reach it.
    """

    def __init__(self, name: str, url: Url) -> None:
        self._name = name
        self._url = url

    async def run(self, mirror: Mirror, layout: RunLayout) -> None:
        """Send heartbeats until cancelled; then say that the engine ends."""

        def beat(told: InferenceAddress, address: str, *, ends: bool) -> EngineBeat:
            state = EngineState(
                name=self._name,
                url=self._url(told.url, address),
                pid=told.pid,
                number=told.number,
                at=told.at,
                in_hand=told.in_hand,
                busy=told.busy,
                draining=told.draining,
                trouble=told.trouble[:200],
                network=told.network,
                run_id=told.run_id,
                version=told.version,
            )
            return EngineBeat(engine=state, host=socket.gethostname()[:255], ends=ends)

        log = WaitLog(WEIGHTS_S)

        def read() -> InferenceAddress | None:
            found = _read(layout.engine(self._name))
            if found is None and not layout.weights.exists():
                if log.is_due("weights", now := time.monotonic()):
                    logger.warning(
                        "waiting for=weights waited_s=%.0f: %s",
                        log.waited_s(now),
                        _no_weights(layout, mirror.config),
                    )
            else:
                log.over()
            return found

        await send_beats(mirror, self._name, read, beat)


def _no_weights(layout: RunLayout, config: RunConfig) -> str:
    """Return what an engine without weights lacks: a relay, or a trainer beside it."""
    backend = config.weights.backend
    if backend == "stream":
        return (
            f"no relay has written {layout.weights}; start `rolloutmq relay` on this host, or look at its log"
        )
    return (
        f"no trainer of this host has written {layout.weights}; with weights.backend={backend} an engine runs on the "
        "host of the trainer, in the same directory; elsewhere the run needs weights.backend=stream, and this host "
        "a relay"
    )


def own_host(other: str) -> str:
    """Return the address of this host by which it reaches another one."""
    host = other.strip("[]")
    is_ipv6 = ":" in host or families.is_ipv6(f"tcp://{host}:9")
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    # Connecting a datagram socket sends nothing; it only selects the source address.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _read(path: Path) -> InferenceAddress | None:
    try:
        return read_json(path, InferenceAddress)
    except (msgspec.DecodeError, OSError):
        return None
