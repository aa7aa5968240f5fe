"""Address families of host names. A socket is told before it connects whether to look for addresses of IPv6.

Without that option libzmq finds only addresses of IPv4 for a name, and with it those of IPv6 first. A name counts as
one of IPv6 only if it has no address of IPv4: a listener on `0.0.0.0` has none of the others.

A look-up takes seconds where the name service is silent, and libzmq connects beside the event loop. So a thread looks
up: whoever connects waits for at most `LOOK_S`, and goes by the last answer meanwhile. Clients connect anew while
nobody answers, and go by the new one then.
"""

import re
import socket
import threading
import time
from typing import Final

LOOK_S: Final = 0.2
"""Longest wait for a look-up."""
KEPT_S: Final = 30.0
"""Time for which an answer holds: a host may get another address."""
NAMES_LIMIT: Final = 256
"""Most names whose answers are kept; a process connects to a few."""
_IPV4: Final = re.compile(r"[0-9.]+")


class Families:
    """What is known of host names. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[bool, float]] = {}
        """Whether a name has addresses of IPv6 alone, and when that was found."""
        self._looking: dict[str, threading.Event] = {}

    def is_ipv6(self, address: str) -> bool:
        """Return whether a socket to `tcp://HOST:PORT` needs IPv6. Blocks for at most `LOOK_S`."""
        host = address.removeprefix("tcp://").rpartition(":")[0]
        if host.startswith("["):
            return True
        return bool(host) and not _IPV4.fullmatch(host) and self._of_name(host)

    def _of_name(self, name: str) -> bool:
        with self._lock:
            known, at = self._known.get(name, (False, -KEPT_S))
            if time.monotonic() - at < KEPT_S:
                return known
            looked = self._looking.get(name) or self._begin(name)
        looked.wait(LOOK_S)
        with self._lock:
            return self._known.get(name, (False, 0.0))[0]

    def _begin(self, name: str) -> threading.Event:
        looked = self._looking[name] = threading.Event()
        threading.Thread(
            target=self._look, args=(name, looked), name=f"look-up of {name}", daemon=True
        ).start()
        return looked

    def _look(self, name: str, looked: threading.Event) -> None:
        try:
            found = {family for family, *_ in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError):
            found = set()
        with self._lock:
            if len(self._known) >= NAMES_LIMIT:
                self._known.clear()
            if found:  # while the name service is away, the last answer holds
                self._known[name] = socket.AF_INET not in found, time.monotonic()
            del self._looking[name]
        looked.set()


families: Final = Families()
"""Those of this process."""
