"""Topics of the `events` socket.

SUB matches by prefix, so a topic that ends in an id ends in `/`, and a receiver compares the whole topic before it
believes a message: `ack.w-1` would also receive `ack.w-10`.
"""

from typing import Final

PRESSURE: Final = b"pressure"
STEP: Final = b"step"
POLICY: Final = b"policy"
TELEMETRY: Final = b"telemetry."
ACK: Final = b"ack."
CONTROL: Final = b"control."

FORWARDED: Final = (TELEMETRY, POLICY, STEP)
"""Prefixes that the broker forwards from `publish`; all other topics are its own."""


def ack(producer: str) -> bytes:
    """Topic of the acks of one producer."""
    return b"ack.%b/" % producer.encode()


def control(worker: str) -> bytes:
    """Topic of what one worker is told to do."""
    return b"control.%b/" % worker.encode()


def telemetry(what: str, name: str) -> bytes:
    """Topic of one telemetry source, for example `telemetry.host.<name>`."""
    return b"telemetry.%b.%b" % (what.encode(), name.encode())


def is_forwarded(topic: bytes) -> bool:
    """Whether a service other than the broker may publish under this topic."""
    return topic in {POLICY, STEP} or topic.startswith(TELEMETRY)
