"""Bounds of staleness: those of the configuration, and what was put in force while the run went on.

The bound of a run is the largest of the environments that are trained on. One that has no lane yet has the configured
bound; as soon as it has, the broker says which is in force.
"""

from collections.abc import Iterable

import msgspec

from rolloutmq.schemas.config import RunConfig


class BoundChange(msgspec.Struct, frozen=True):
    """The bound of one environment, from a time on."""

    t: float
    env: str
    max_staleness: int


def configured_bounds(config: RunConfig) -> dict[str, int]:
    """Return the bounds of the environments that are trained on."""
    return {name: env.max_staleness for name, env in config.environment.items() if env.split == "train"}


def bounds_in_force(config: RunConfig, changes: Iterable[BoundChange]) -> list[tuple[float, int]]:
    """Return since when which bound was the largest, in order; the configured one since 0, if there is any."""
    bounds = configured_bounds(config)
    course = [(0.0, max(bounds.values()))] if bounds else []
    for change in changes:
        bounds[change.env] = change.max_staleness
        largest = max(bounds.values())
        if not course or course[-1][1] != largest:
            course.append((change.t, largest))
    return course
