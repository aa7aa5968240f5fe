"""The workers of one environment: names, counts, and the order of removal. Pure.

A worker is `<environment>-<number>`. A number is never reused within one life of the orchestrator: the broker keeps
telling a drained worker to drain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

from rolloutmq.schemas.wire.control import WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView


def env_of(worker: str) -> str:
    """Return the environment in a worker's name, or an empty string for any other name."""
    env, dash, number = worker.rpartition("-")
    return env if dash and number.isdigit() else ""


def number_of(worker: str) -> int:
    """Return the number of a worker."""
    return int(worker.rpartition("-")[2])


class WorkerTable:
    """Names of the workers of one environment."""

    def __init__(self, env: str, taken: Iterable[str] = ()) -> None:
        self.env = env
        used = [number_of(worker) for worker in taken if env_of(worker) == env]
        self._numbers = count(max(used, default=-1) + 1)

    def take(self) -> str:
        """Return an unused name."""
        return f"{self.env}-{next(self._numbers)}"

    def mine(self, views: Mapping[str, ProcessView]) -> list[ProcessView]:
        """Return the workers of this environment that have not ended, by number."""
        found = [
            view for name, view in views.items() if env_of(name) == self.env and view.phase is not Phase.ENDED
        ]
        return sorted(found, key=lambda view: number_of(view.name))

    def crew(self, views: Mapping[str, ProcessView], heard: Mapping[str, WorkerStatus]) -> WorkerCounts:
        """Count the workers.

        Args:
            views: The supervisor's view.
            heard: The broker's last status of the running processes.
        """
        crew = WorkerCounts()
        for view in self.mine(views):
            match view.phase:
                case _ if view.failing:
                    crew = replace(crew, failed=crew.failed + 1)
                case Phase.STOPPING:
                    crew = replace(crew, draining=crew.draining + 1)
                case Phase.RUNNING if _is_ready(heard.get(view.name)):
                    crew = replace(crew, ready=crew.ready + 1)
                case _:
                    crew = replace(crew, starting=crew.starting + 1)
        return crew

    def surplus(
        self, views: Mapping[str, ProcessView], heard: Mapping[str, WorkerStatus], number: int
    ) -> list[str]:
        """Choose the workers to remove: given-up ones first, then those not ready, then the youngest."""
        mine = self.mine(views)
        number -= sum(view.failing and view.phase is Phase.STOPPING for view in mine)  # already leaving
        candidates = [view for view in mine if view.phase is not Phase.STOPPING]
        candidates.sort(key=lambda view: _worth(view, heard.get(view.name)))
        return [view.name for view in candidates[: max(0, number)]]


def _is_ready(status: WorkerStatus | None) -> bool:
    return status is not None and status.state is not WorkerState.STARTING


def _worth(view: ProcessView, status: WorkerStatus | None) -> tuple[bool, bool, int]:
    running = view.phase is Phase.RUNNING
    return view.phase is not Phase.FATAL, running and _is_ready(status), -number_of(view.name)
