"""Why a trainer that sends its weights waits: it asks for no batch meanwhile, so that no broker can know."""

from typing import Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.segments import Owner
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import SentAddress

REASON: Final = "weights_unsent"


def unsent(layout: RunLayout) -> str:
    """Say why a living trainer waits for a vLLM to take its weights; empty if it does not, or shares them otherwise."""
    try:
        found = read_json(layout.weights, SentAddress)
    except (msgspec.DecodeError, OSError):
        return ""
    if found is None or not found.waits or not Owner(*found.sender).alive():
        return ""
    return f"{REASON}, {found.waits}"
