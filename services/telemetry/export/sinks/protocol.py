"""What telemetry and the process of a sink tell each other: a JSON object a line.

Telemetry writes points to the input of the process, and closes it at the end. The process writes a `Told` for each
point to its output.
"""

from typing import Final

import msgspec

from rolloutmq.services.telemetry.export.sinks.points import Point

LINE_LIMIT_BYTES: Final = 1 << 20
"""Longest line."""


class Told(msgspec.Struct, frozen=True):
    """The outcome of one point.

    Attributes:
        why: Why the tracker did not take it; empty if it did.
    """

    why: str = ""


point_decoder: Final = msgspec.json.Decoder(Point)
told_decoder: Final = msgspec.json.Decoder(Told)


def line_of(message: Point | Told) -> bytes:
    """Return the line of a message. A number that is not finite becomes null."""
    return msgspec.json.encode(message) + b"\n"
