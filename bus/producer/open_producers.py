"""The open producers of this process: their default names, and a warning at exit.

A default name has environment, host and process id. The second open producer of the same environment adds `-2`, and so
on, so no two of them fence each other. A closed producer frees its name for the next one.

A producer that is still open at exit loses the groups that are not acked by then: nothing waits for them. The exit code
cannot tell that any more, so a message does.
"""

import atexit
import logging
import os
import re
import socket
import threading
import weakref
from itertools import count
from typing import Final, Protocol

logger = logging.getLogger(__name__)

_PART_CHARS: Final = 24
"""Longest part of a default name; three parts and a number fit into a `Name`."""


class OpenProducer(Protocol):
    """What is known of an open producer."""

    @property
    def name(self) -> str: ...
    @property
    def unacked(self) -> int: ...


class OpenProducers:
    """The open producers of one process; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._open: weakref.WeakSet[OpenProducer] = weakref.WeakSet()
        self._owner = 0

    def claim(self, env: str) -> str:
        """Return an unused default name for a producer of `env`; give it back with `release`."""
        base = f"{_plain(env)}-{_plain(socket.gethostname().partition('.')[0])}-{os.getpid()}"
        with self._lock:
            numbered = (base if number == 1 else f"{base}-{number}" for number in count(1))
            name = next(name for name in numbered if name not in self._taken)
            self._taken.add(name)
        return name

    def release(self, name: str) -> None:
        """Free a default name."""
        with self._lock:
            self._taken.discard(name)

    def opened(self, producer: OpenProducer) -> None:
        """Note an open producer."""
        with self._lock:
            if self._owner != os.getpid():  # the first one, or the first one of a forked child
                self._open.clear()
                self._owner = os.getpid()
            self._open.add(producer)

    def closed(self, producer: OpenProducer) -> None:
        """Forget a producer that is closed."""
        with self._lock:
            self._open.discard(producer)

    def warn(self) -> None:
        """Log the producers that are still open and have unacked groups."""
        if self._owner != os.getpid():
            return
        for producer in list(self._open):
            if producer.unacked:
                logger.error(
                    "producer never closed, unacked groups may be lost producer=%s unacked=%d; open it in a `with` "
                    "block, which waits for the acks",
                    producer.name,
                    producer.unacked,
                )


def _plain(text: str) -> str:
    """Return the beginning of a text with only the characters of a name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", str(text)[:_PART_CHARS])


open_producers: Final = OpenProducers()
atexit.register(open_producers.warn)
