"""The logs of the workers: each is kept short while anybody may write it, and of those that are gone the last few stay.

A name is not given twice while workers of an earlier life are there, since the logs say which were given: the highest
number of an environment always stays.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

from rolloutmq.schemas.config import RunSection
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.logbook import LogLimits, Rotation, remove
from rolloutmq.services.orchestrator.roster import env_of, number_of

logger = logging.getLogger(__name__)


class Shelf:
    """The logs of the workers of a run, those of an earlier orchestrator included.

    Args:
        layout: Where they are.
        run: What is kept of them.
        present: Names the workers that are there.
    """

    def __init__(self, layout: RunLayout, run: RunSection, present: Callable[[], Collection[str]]) -> None:
        self._layout = layout
        self._keep = run.log_workers
        self._present = present
        self._rotation = Rotation(LogLimits(run.log_bytes, run.log_files), self.logs)

    async def run(self) -> None:
        """Look after them until cancelled."""
        await self._rotation.run()

    def logs(self) -> list[Path]:
        """Return the logs that are kept; the others are removed."""
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
