"""Restarts ordered by an operator: the process ends, and autoscaling starts another in its place.

An order is for one process, by its pid: a repeated order, also one that an earlier orchestrator carried out, ends no
other. The replacement has another name, and starts at once if there is room beside the old process, else after its end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from rolloutmq.schemas.files import RestartOutcome
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import RestartWorker
from rolloutmq.services.orchestrator.supervision.core import KILL_LADDER, Ladder, Phase, ProcessView

KEPT_S: Final = 120.0
"""Time an outcome is kept: the broker repeats an order for a minute."""
PLACE: Final = "another takes its place"


class Processes(Protocol):
    """Subset of the supervisor's interface."""

    def views(self) -> Mapping[str, ProcessView]: ...
    def identity(self, name: str) -> ProcessIdentity | None: ...
    def retire(self, name: str, ladder: Ladder, reason: str) -> None: ...
    def forget(self, name: str) -> None: ...


class Restarts:
    """Carries out orders, each once.

    Args:
        fleets: Supervised processes, each with the drain ladder of a process by name.
        on_done: Called with the name of the worker or engine whose restart was carried out.
    """

    def __init__(
        self,
        fleets: Sequence[tuple[Processes, Callable[[str], Ladder]]],
        on_done: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._fleets, self._on_done = fleets, on_done
        self._done: dict[str, tuple[RestartOutcome, float]] = {}

    def look(self, orders: Iterable[RestartWorker], now: float) -> dict[str, RestartOutcome]:
        """Carry out new orders; return the outcome of each recent one, by its id. `now` in monotonic seconds."""
        self._done = {name: one for name, one in self._done.items() if now - one[1] < KEPT_S}
        for order in orders:
            if order.order not in self._done:
                self._done[order.order] = self._carry_out(order), now
        return {name: outcome for name, (outcome, _) in self._done.items()}

    def _carry_out(self, order: RestartWorker) -> RestartOutcome:
        for processes, ladder in self._fleets:
            view = processes.views().get(order.worker)
            if view is not None and view.phase is not Phase.ENDED:
                outcome = _restart(processes, ladder, view, order)
                if outcome.done:
                    self._on_done(order.worker)
                return outcome
        return RestartOutcome(
            done=False, text="no such worker or engine; `rolloutmq workers` lists the workers"
        )


def _restart(
    processes: Processes, ladder: Callable[[str], Ladder], view: ProcessView, order: RestartWorker
) -> RestartOutcome:
    name, identity = view.name, processes.identity(view.name)
    pid = identity.pid if identity is not None else 0
    if pid != order.pid:
        return RestartOutcome(done=False, text=f"is process {pid} by now, not {order.pid}; try again")
    match view.phase:
        case Phase.FATAL:
            processes.forget(name)
            return RestartOutcome(done=True, text=f"was given up; {PLACE}")
        case Phase.WAITING:
            processes.retire(name, KILL_LADDER, "restarted by an operator")
            return RestartOutcome(done=True, text=f"waited for its next start; {PLACE}")
        case _ if order.at_once:
            processes.retire(name, KILL_LADDER, "killed by an operator")
            return RestartOutcome(done=True, text=f"killed; {PLACE}")
        case _:
            processes.retire(name, ladder(name), "restarted by an operator")
            return RestartOutcome(done=True, text=f"draining; {PLACE}")
