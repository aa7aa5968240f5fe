"""The log of groups dropped as stale: a warning for each environment, at most every 30 seconds.

Such a group was accepted, and leaves by the rule `stale = "drop"`. The ledger counts it, but nobody sees that in the
log of a broker started by hand, whose batches may be smaller than it assumes. Pure: the caller passes the time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rolloutmq.bus.log_throttle import EVERY_S
from rolloutmq.services.broker.actions import Expired


@dataclass(slots=True)
class _Lane:
    """Groups of one environment: dropped in all, and since the last warning."""

    last: Expired
    newest_step: int = 0
    total: int = 0
    untold: int = 0
    due: float = 0.0
    """Earliest time of the next warning."""


LANES: Final = 1024
"""Most environments that are counted: those of a long run come and go."""


class StaleLog:
    """Counts the groups dropped as stale, and gives the warnings that are due."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._lanes: dict[str, _Lane] = {}

    def note(self, expired: Expired) -> None:
        """Count dropped groups."""
        if len(self._lanes) >= LANES and expired.env not in self._lanes:
            told = next(
                (env for env, lane in self._lanes.items() if not lane.untold), next(iter(self._lanes))
            )
            del self._lanes[told]
        lane = self._lanes.setdefault(expired.env, _Lane(expired))
        lane.last = expired
        lane.newest_step = max(lane.newest_step, expired.newest_step)
        lane.total += expired.groups
        lane.untold += expired.groups

    def warnings(self, now: float) -> Iterator[str]:
        """Yield the warnings that are due, and count them as logged."""
        for lane in self._lanes.values():
            if lane.untold and now >= lane.due:
                yield _warning(lane)
                lane.untold, lane.due = 0, now + self._every_s

    def rest(self) -> Iterator[str]:
        """Yield the warnings that are not logged yet, due or not: the broker ends."""
        yield from (_warning(lane) for lane in self._lanes.values() if lane.untold)


def _warning(lane: _Lane) -> str:
    env = lane.last.env
    text = (
        f"groups dropped as stale env={env} count={lane.untold} total={lane.total} "
        f"max_staleness={lane.last.max_staleness} newest_step={lane.newest_step}; if `rolloutmq status` shows an "
        "engine or a relay that is behind, mend that; else set trainer.batch_sequences to the "
        "sequences of the trainer's batches, so that producers do not run ahead, or deliver such groups: "
        f"`rolloutmq set env.{env}.stale=pass`"
    )
    if lane.newest_step:
        return text
    return (
        f"{text}; or, if every group of {env} names policy step 0, leave `oldest` of Trajectory or Group.build out: "
        "then it is the policy that the producer knew"
    )
