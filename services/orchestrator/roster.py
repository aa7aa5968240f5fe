"""The workers of one environment: their names, how many there are of each kind, who goes first. Pure.

A worker is `<environment>-<number>`. A number is not given twice in one life of the orchestrator:
the broker still tells a worker that was drained to drain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

from rolloutmq.schemas.control import WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.pressure import Crew
from rolloutmq.services.orchestrator.supervisor import Phase, View


def env_of(worker: str) -> str:
    """Return the environment of a worker, or an empty text if this is no worker's name."""
    env, dash, number = worker.rpartition("-")
    return env if dash and number.isdigit() else ""


def number_of(worker: str) -> int:
    """Return the number of a worker."""
    return int(worker.rpartition("-")[2])


class Roster:
    """Names of the workers of one environment."""

    def __init__(self, env: str, taken: Iterable[str] = ()) -> None:
        self.env = env
        used = [number_of(worker) for worker in taken if env_of(worker) == env]
        self._numbers = count(max(used, default=-1) + 1)

    def take(self) -> str:
        """Return a name that nobody had."""
        return f"{self.env}-{next(self._numbers)}"

    def mine(self, views: Mapping[str, View]) -> list[View]:
        """Return the workers of this environment that have not ended, by number."""
        found = [
            view for name, view in views.items() if env_of(name) == self.env and view.phase is not Phase.ENDED
        ]
        return sorted(found, key=lambda view: number_of(view.name))

    def crew(self, views: Mapping[str, View], heard: Mapping[str, WorkerStatus]) -> Crew:
        """Count them.

        Args:
            views: What the supervisor sees.
            heard: What the broker last heard of the processes that live now.
        """
        crew = Crew()
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

    def surplus(self, views: Mapping[str, View], heard: Mapping[str, WorkerStatus], number: int) -> list[str]:
        """Choose who goes: the given up first, then those not ready yet, then the youngest."""
        mine = self.mine(views)
        number -= sum(
            view.failing and view.phase is Phase.STOPPING for view in mine
        )  # they count, and go already
        candidates = [view for view in mine if view.phase is not Phase.STOPPING]
        candidates.sort(key=lambda view: _worth(view, heard.get(view.name)))
        return [view.name for view in candidates[: max(0, number)]]


def _is_ready(status: WorkerStatus | None) -> bool:
    return status is not None and status.state is not WorkerState.STARTING


def _worth(view: View, status: WorkerStatus | None) -> tuple[bool, bool, int]:
    running = view.phase is Phase.RUNNING
    return view.phase is not Phase.FATAL, running and _is_ready(status), -number_of(view.name)
