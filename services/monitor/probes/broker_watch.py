"""Whether the broker of a run answers, as seen by its launcher.

A broker that starts does not hang, however long it reads its journal. One that has bound its sockets must answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import zmq

from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.requests import GetInfo

logger = logging.getLogger(__name__)

ASK_S: Final = 2.0
ANSWER_S: Final = 3.0
HUNG_S: Final = 30.0
"""Silence from which a broker hangs: it answers within milliseconds, and within seconds on a starved machine."""


class BrokerWatch:
    """What the last answers say. Pure.

    Attributes:
        answers: The broker has answered the last request.
    """

    def __init__(self) -> None:
        self.answers = False
        self._silent_since: float | None = None

    def note(self, *, serves: bool, answered: bool, now: float) -> None:
        """Note a request.

        Args:
            serves: The present process of the broker has bound its sockets.
            answered: It has answered.
            now: Monotonic seconds.
        """
        self.answers = answered
        if answered or not serves:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now

    def hangs(self, now: float) -> bool:
        """Return whether the broker has been silent for too long."""
        return self._silent_since is not None and now - self._silent_since > HUNG_S


async def keep_asking(watch: BrokerWatch, layout: RunLayout, pid: Callable[[], int]) -> None:
    """Ask the broker of this host every `ASK_S`, until cancelled.

    Args:
        watch: Notes the answers.
        layout: The run directory.
        pid: Returns the process of the broker; 0 while there is none.
    """
    while True:
        serves, answered = await _asked(layout, pid())
        watch.note(serves=serves, answered=answered, now=time.monotonic())
        await asyncio.sleep(ASK_S)


async def _asked(layout: RunLayout, pid: int) -> tuple[bool, bool]:
    """Return whether the broker serves, and whether it answers."""
    serves = False
    try:
        endpoints = read_endpoints(layout.root)
        if endpoints is None or endpoints.pid != pid:
            return False, False
        serves = True
        async with BrokerClient(endpoints.serve) as client:
            await client.request(GetInfo(), ANSWER_S)
    except RolloutMQError:
        return serves, False
    except (OSError, zmq.ZMQError) as error:
        # Such as a want of descriptors here: it says nothing of the broker.
        logger.warning("broker not asked error=%s", error)
        return False, False
    return True, True
