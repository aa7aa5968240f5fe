"""The workers of one environment: names, counts, start times, and the order of removal. Pure.

A worker is `<environment>-<number>`. A number is never reused within one life of the orchestrator: the broker keeps
telling a drained worker to drain.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count
from statistics import median, median_low
from typing import Final

from msgspec.structs import replace

from rolloutmq.schemas.wire.control import WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView

STARTS: Final = 9
"""Recent starts whose median is the start time: one that hangs or hurries changes little."""


def env_of(worker: str) -> str:
    """Return the environment in a worker's name, or an empty string for any other name."""
    env, dash, number = worker.rpartition("-")
    return env if dash and number.isdigit() else ""


def number_of(worker: str) -> int:
    """Return the number of a worker."""
    return int(worker.rpartition("-")[2])


class WorkerTable:
    """The workers of one environment.

    Args:
        env: The environment.
        taken: Used names.
        starts: Recent start times under an earlier orchestrator, in seconds, the last one last.
    """

    def __init__(self, env: str, taken: Iterable[str] = (), starts: Iterable[float] = ()) -> None:
        self.env = env
        used = [number_of(worker) for worker in taken if env_of(worker) == env]
        self._numbers = count(max(used, default=-1) + 1)
        self._starts = deque(starts, STARTS)
        self._measured: dict[str, float] = {}

    @property
    def starts(self) -> tuple[float, ...]:
        """Return the recent start times, in seconds."""
        return tuple(self._starts)

    def take(self) -> str:
        """Return an unused name."""
        return f"{self.env}-{next(self._numbers)}"

    def mine(self, views: Mapping[str, ProcessView]) -> list[ProcessView]:
        """Return the workers of this environment that have not ended, by number."""
        found = [
            view for name, view in views.items() if env_of(name) == self.env and view.phase is not Phase.ENDED
        ]
        return sorted(found, key=lambda view: number_of(view.name))

    def crew(
        self, views: Mapping[str, ProcessView], heard: Mapping[str, WorkerStatus], now: float
    ) -> WorkerCounts:
        """Count the workers.

        Args:
            views: The supervisor's view.
            heard: The broker's last status of the running processes.
            now: Time, on the supervisor's clock.
        """
        crew = WorkerCounts(start_s=self._start_s(views, now))
        for view in self.mine(views):
            match view.phase:
                case Phase.FATAL:
                    crew = replace(crew, failed=crew.failed + 1)
                case Phase.STOPPING if not view.returns:
                    failing = view.failing  # nobody may start in its place yet
                    crew = replace(crew, draining=crew.draining + 1, failed=crew.failed + failing)
                case Phase.RUNNING if is_ready(heard.get(view.name)):
                    crew = replace(crew, ready=crew.ready + 1)
                case _:
                    again = view.was_ready and (view.ready_at is None or view.returns)
                    crew = replace(crew, starting=crew.starting + 1, restarting=crew.restarting + again)
        return crew

    def surplus(
        self, views: Mapping[str, ProcessView], heard: Mapping[str, WorkerStatus], target: int
    ) -> list[str]:
        """Choose the workers to remove: those not ready first, then the youngest.

        Of the given-up ones only as many remain as workers are missing; the last failures stay.
        """
        mine = self.mine(views)
        present = [view for view in mine if view.phase in {Phase.RUNNING, Phase.WAITING} or view.returns]
        present.sort(key=lambda view: _worth(view, heard.get(view.name)))
        failed = sorted((view for view in mine if view.phase is Phase.FATAL), key=lambda view: view.since)
        missing = max(0, target - len(present))
        leaving = failed[: max(0, len(failed) - missing)] + present[: max(0, len(present) - target)]
        return [view.name for view in leaving]

    def _start_s(self, views: Mapping[str, ProcessView], now: float) -> float:
        """Return the time from the start of a process until it is ready; 0 while unknown."""
        lives = [view for view in self.mine(views) if view.phase is Phase.RUNNING and not view.adopted]
        for view in lives:
            if view.ready_at is not None and self._measured.get(view.name) != view.since:
                self._measured[view.name] = view.since
                self._starts.append(round(view.ready_at - view.since, 3))
        self._measured = {name: since for name, since in self._measured.items() if name in views}
        if not self._starts:
            return 0.0
        under_way = [now - view.since for view in lives if view.ready_at is None]
        # One that hangs beside younger ones says nothing; if all of them take longer, a start takes longer now.
        return max(median(self._starts), median_low(under_way) if under_way else 0.0)


def with_joined(crew: WorkerCounts, joined: Iterable[WorkerStatus]) -> WorkerCounts:
    """Return the counts with the workers that joined by themselves. Those that drain are on their way out."""
    for status in joined:
        if status.draining or status.state is WorkerState.DRAINING:
            continue
        if is_ready(status):
            crew = replace(crew, ready=crew.ready + 1, joined=crew.joined + 1)
        else:
            crew = replace(crew, starting=crew.starting + 1, joined=crew.joined + 1)
    return crew


def is_ready(status: WorkerStatus | None) -> bool:
    """Return whether a worker said that it is ready; a draining one was."""
    return status is not None and status.state in {WorkerState.READY, WorkerState.DRAINING}


def _worth(view: ProcessView, status: WorkerStatus | None) -> tuple[bool, int]:
    return view.phase is Phase.RUNNING and is_ready(status), -number_of(view.name)
