"""Topics of the `events` socket.

SUB matches prefixes: `ack.w-1` would also receive `ack.w-10`. A topic with an id therefore ends in `/`, and a receiver
compares the whole topic.
"""

from typing import Final

PRESSURE: Final = b"pressure"
STEP: Final = b"step"
POLICY: Final = b"policy"
TELEMETRY: Final = b"telemetry."
ACK: Final = b"ack."
CONTROL: Final = b"control."

HEADS: Final = ("ack", "control", "policy", "pressure", "step", "telemetry")
"""First part of every topic."""

FORWARDED: Final = (TELEMETRY, POLICY, STEP)
"""Prefixes that the broker forwards from `publish`; it publishes all other topics itself."""


def ack(producer: str) -> bytes:
    """Return the topic of the acks of one producer."""
    return b"ack.%b/" % producer.encode()


def acked_producer(topic: bytes) -> str | None:
    """Return the producer whose acks have this topic; None for any other text, such as a prefix of topics."""
    name = topic.removeprefix(b"ack.").removesuffix(b"/")
    try:
        producer = name.decode()
    except UnicodeDecodeError:
        return None
    return producer if topic == ack(producer) else None


def control(worker: str) -> bytes:
    """Return the topic of the orders to one worker."""
    return b"control.%b/" % worker.encode()


def telemetry(what: str, name: str) -> bytes:
    """Return the topic of one telemetry source, for example `telemetry.host.<name>`."""
    return b"telemetry.%b.%b" % (what.encode(), name.encode())


def is_forwarded(topic: bytes) -> bool:
    """Return whether services other than the broker may publish the topic."""
    return topic in {POLICY, STEP} or topic.startswith(TELEMETRY)
