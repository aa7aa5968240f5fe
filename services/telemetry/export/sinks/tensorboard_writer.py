"""TensorBoard: event files in `trackers/tensorboard/` of the run directory. Each life of telemetry appends a file."""

import math

from tensorboard.summary import Writer

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.telemetry.export.sinks.identity import TrackerFiles
from rolloutmq.services.telemetry.export.sinks.points import Point


class TensorboardWriter:
    """One directory of event files: a run of TensorBoard."""

    def __init__(self, config: RunConfig, layout: RunLayout) -> None:
        self._writer = Writer(str(TrackerFiles(layout, "tensorboard").directory / config.run.name))

    def log(self, point: Point) -> None:
        """Write a point to the disk."""
        for name, value in point.values.items():
            self._writer.add_scalar(
                name, math.nan if value is None else value, point.step, wall_time=point.at
            )
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()
