"""The handshakes of a client's socket: what they failed for, and another try where libzmq makes none.

libzmq tries again after a lost connection, and not after a refusal of the key: such a socket would stay mute for ever,
also once the key may enter. Its monitor tells the refusal. The socket then connects anew, in pauses that double: each
try costs the broker a handshake.
"""

import math
import random
import struct
from typing import Final

import zmq

from rolloutmq.bus.transport.keys.bundle import CurveKeys

FIRST_S: Final = 0.5
"""Pause before the first new try."""
LONGEST_S: Final = 30.0
"""Longest pause: a thousand refused clients then ask about thirty times a second."""

_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Handshakes:
    """Watches one socket, in the thread of that socket.

    Args:
        socket: A connected socket.
        address: Where it is connected to.
        keys: Its keys; None for none.

    Attributes:
        problem: What the last handshake failed for; empty if it did not.
        due: When `look` connects anew, in monotonic seconds; infinite if it need not.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str, keys: CurveKeys | None) -> None:
        self.problem = ""
        self.due = math.inf
        self._socket = socket
        self._address = address
        self._keys = keys
        self._pause_s = FIRST_S
        self._ended = 0
        """Handshakes in a row that the other side ended without a reason."""
        self._monitor = socket.get_monitor_socket(_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    @property
    def fd(self) -> int:
        """Descriptor that becomes readable, once, when `look` has something to see."""
        return int(self._monitor.getsockopt(zmq.FD))

    def look(self, now: float) -> None:
        """Take the news of the monitor, and connect anew if that is due. Never waits."""
        while (kind := self._next()) is not None:
            self._take(kind, now)
        if now >= self.due:
            self.due = math.inf
            self._socket.disconnect(self._address)
            self._socket.connect(self._address)

    def close(self) -> None:
        """End the watch; call it before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _next(self) -> int | None:
        try:
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        kind: int = struct.unpack_from("=H", frames[0])[0]
        return kind

    def _take(self, kind: int, now: float) -> None:
        if not kind & _FAILED:
            self.problem, self.due, self._pause_s, self._ended = "", math.inf, FIRST_S, 0
        elif kind & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            name = "the key" if self._keys is None else f"key {self._keys.name}"
            self.problem = (
                f"{name} was refused by {self._address}: revoked or unknown; get a new one, made with "
                "`rolloutmq keys new`"
            )
            self.due = now + self._pause_s * random.uniform(0.5, 1.0)
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
        elif kind & zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._ended < 1:
            self._ended += 1  # once is a broker that was just killed
        elif self._keys is None:
            self.problem = (
                f"{self._address} ended the handshake: it asks for a key; give one, as in rolloutmq.remote"
                "(address, key=FILE)"
            )
        else:
            self.problem = (
                f"{self._address} ended the handshake with key {self._keys.name}: it is the broker of other keys, or "
                "no broker; correct the address, or get a key of that run"
            )


def watched(socket: zmq.Socket[bytes], address: str, keys: CurveKeys | None) -> Handshakes | None:
    """Return the watch of a socket that is connected by TCP, None for a unix socket."""
    return Handshakes(socket, address, keys) if address.startswith("tcp://") else None
