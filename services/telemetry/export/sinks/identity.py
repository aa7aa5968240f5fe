"""The run of a tracker that belongs to this run: its id is kept in the run directory, so a restart continues it."""

from pathlib import Path

import msgspec

from rolloutmq.bus.files import PRIVATE_DIRECTORY
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout

PROJECT = "rolloutmq"
"""Project, or experiment, of a run without `run.tracking_project`."""


class TrackerRun(msgspec.Struct, frozen=True):
    """Id of the run of a tracker."""

    id: str


class TrackerFiles:
    """Files of one tracker in a run directory.

    Args:
        layout: The run directory.
        name: Name of the tracker.
    """

    def __init__(self, layout: RunLayout, name: str) -> None:
        self.directory: Path = layout.trackers / name
        for made in (layout.trackers, self.directory):
            made.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        self._path = layout.trackers / f"{name}.json"

    @property
    def id(self) -> str:
        """Id of the run that an earlier life began; empty if there is none."""
        known = read_json(self._path, TrackerRun)
        return known.id if known is not None else ""

    @id.setter
    def id(self, value: str) -> None:
        write_json(self._path, TrackerRun(value))


def project_of(config: RunConfig) -> str:
    """Return the project of a run."""
    return config.run.tracking_project or PROJECT
