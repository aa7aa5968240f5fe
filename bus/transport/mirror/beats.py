"""Heartbeats to the broker of another host: what a process of this host says of itself in a file, once a second."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

from rolloutmq.bus.engine_registry import BEAT_S
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.wire.requests import Request

logger = logging.getLogger(__name__)

ANSWER_S: Final = 3.0
_throttle: Final = LogThrottle()
Told = TypeVar("Told")
Of = TypeVar("Of", contravariant=True)


class Beat(Protocol[Of]):
    """Makes a heartbeat."""

    def __call__(self, told: Of, address: str, *, ends: bool) -> Request:
        """Return the heartbeat: of what a process says of itself, for the broker at this address of `serve`."""
        ...


async def send_beats(
    mirror: Mirror,
    name: str,
    read: Callable[[], Told | None],
    beat: Beat[Told],
) -> None:
    """Send heartbeats until cancelled; then say that the process ends.

    Args:
        mirror: Keeps this host's directory of the run.
        name: What beats, for the log.
        read: Returns what the process says of itself, None before the first time; nothing is sent for the same again.
        beat: Makes the heartbeat.
    """
    last: Told | None = None
    try:
        while True:
            await asyncio.sleep(BEAT_S)
            found = read()
            if found is not None and found != last:
                last = found
                await _send(mirror, name, partial(beat, found, ends=False))
    finally:
        if last is not None:
            await asyncio.shield(_send(mirror, name, partial(beat, last, ends=True)))


async def _send(mirror: Mirror, name: str, beat: Callable[[str], Request]) -> None:
    endpoints = read_endpoints(mirror.layout.root)
    if endpoints is None or mirror.problem:
        return  # the mirror tells that the broker is away
    try:
        async with BrokerClient(endpoints.serve, keys=mirror.keys()) as client:
            await client.request(beat(endpoints.serve), ANSWER_S)
    except RolloutMQError as error:
        if _throttle.is_due(f"{name} {error}", time.monotonic()):
            logger.warning("heartbeat unanswered name=%s error=%s", name, error)
