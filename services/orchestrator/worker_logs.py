"""Logs of the workers: rotated while in use, and only the last few of ended workers kept.

Names are not reused while workers of an earlier life are present, and the logs show the used names: the highest number
of an environment always stays.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

from rolloutmq.schemas.config.run import RunSection
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.orchestrator.supervision.worker_table import env_of, number_of
from rolloutmq.services.process.logbook import LogLimits, Rotation, remove

logger = logging.getLogger(__name__)


class WorkerLogs:
    """Logs of the workers of a run, including those of an earlier orchestrator.

    Args:
        layout: Location of the logs.
        run: Limits on size and number.
        present: Returns the present workers.
    """

    def __init__(self, layout: RunLayout, run: RunSection, present: Callable[[], Collection[str]]) -> None:
        self._layout = layout
        self._keep = run.log_workers
        self._present = present
        self._rotation = Rotation(LogLimits(run.log_bytes, run.log_files), self.logs)

    async def run(self) -> None:
        """Rotate and remove logs until cancelled."""
        await self._rotation.run()

    def logs(self) -> list[Path]:
        """Return the logs to keep; the others are removed."""
        found = [log for log in self._layout.logs.glob("*.log") if env_of(log.stem)]
        present = self._present()
        gone: defaultdict[str, list[Path]] = defaultdict(list)
        for log in found:
            if log.stem not in present:
                gone[env_of(log.stem)].append(log)
        for logs in gone.values():
            for log in sorted(logs, key=lambda log: number_of(log.stem))[: -self._keep]:
                found.remove(log)
                try:
                    remove(log)
                except OSError as error:
                    logger.warning("log not removed path=%s error=%s", log, error)
        return found
