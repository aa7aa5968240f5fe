"""The way to a run's broker, as its files tell it now: the addresses in `endpoints.json`, and the key in its file.

Both change under a living client. A restarted broker may have another address, and a person replaces the file of a
revoked key. Whoever keeps a socket of `events` or `publish` asks its `Route` now and then, and opens another socket
once there is another way. Requests have a search of their own, see `discovery`.
"""

import errno
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import zmq

from rolloutmq.bus.files import decode_json, read_regular
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.transport.keys.bundle import CurveKeys, keys_of
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import Endpoints, RunLayout

logger = logging.getLogger(__name__)


_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Wants of the machine or of this process, which pass."""


def is_short(error: OSError | zmq.ZMQError) -> bool:
    """Return whether descriptors or memory are used up for now: a later try may succeed."""
    return error.errno in _SHORT


def endpoints_of(layout: RunLayout) -> Endpoints | None:
    """Return the endpoints of a run's broker, or None if it has not published them."""
    try:
        return decode_json(read_regular(layout.endpoints), Endpoints)
    except (msgspec.DecodeError, FileNotFoundError, NotADirectoryError):
        return None


class Way(NamedTuple):
    """Where a socket connects to, and by which keys."""

    address: str
    keys: CurveKeys | None


class Route:
    """The way to one socket of a run's broker. For one thread.

    Args:
        layout: The run directory.
        pick: Returns the address of the socket.

    Attributes:
        taken: The way of the last socket; None before the first one.
    """

    def __init__(self, layout: RunLayout, pick: Callable[[Endpoints], str]) -> None:
        self.taken: Way | None = None
        self._layout = layout
        self._pick = pick
        self._throttle = LogThrottle()

    def other(self) -> Way | None:
        """Return the way if it is another than the one taken; None also while a file of it is missing. Does not block.

        Raises:
            OSError: This process has no descriptor left, or may not read the run directory.
        """
        endpoints = endpoints_of(self._layout)
        if endpoints is None:
            return None
        try:
            way = Way(self._pick(endpoints), keys_of(endpoints))
        except RolloutMQError as error:  # such as between the old file of a key and the new one
            if self._throttle.is_due(str(error), time.monotonic()):
                logger.warning("key not read, waiting for it error=%s", error)
            return None
        return way if way != self.taken else None
