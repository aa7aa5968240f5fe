"""Curricula as text: one line each. Pure, except `read_curricula`."""

from typing import Any

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.telemetry import CurriculumProgress


def read_curricula(layout: RunLayout) -> tuple[CurriculumProgress, ...]:
    """Return the file of the curriculum service; empty if it is missing or unreadable."""
    try:
        return read_json(layout.curriculum, tuple[CurriculumProgress, ...]) or ()
    except (msgspec.MsgspecError, NotADirectoryError):
        return ()


def line(one: CurriculumProgress) -> str:
    """Return the state of a curriculum: its sampler, what came of its tasks, and the recent means."""
    parts = [f"{one.env}: {one.sampler}, {one.outcomes:,} groups"]
    if one.outcomes:
        parts.append(f"{one.flat / one.outcomes:.0%} without spread")
    for count, what in ((one.failed, "failed"), (one.dropped, "dropped")):
        if count:
            parts.append(f"{count:,} tasks {what}")
    text = ", ".join(parts)
    if one.success is None or one.flat_share is None or one.level is None:
        return text
    level = f", level {one.level:.1f} of 0 to {one.levels - 1}" if one.levels > 1 else ""
    return f"{text}; recently success {one.success:.2f}, {one.flat_share:.0%} without spread{level}"


def figures(curricula: tuple[CurriculumProgress, ...]) -> dict[str, dict[str, Any]]:
    """Return the curricula as JSON objects, by environment."""
    plain = {one.env: msgspec.to_builtins(one) for one in curricula}
    for fields in plain.values():
        for key in ("kind", "env"):
            fields.pop(key, None)
    return plain
