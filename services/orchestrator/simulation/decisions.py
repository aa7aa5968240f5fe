"""The decisions of the orchestrator's own controllers in one trial, with their reasons.

Only changes are kept: of the target, of the bound, and of the kind of the reason. Reasons of one kind differ in their
numbers alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rolloutmq.services.orchestrator.simulation.controllers import OwnControllers
from rolloutmq.services.orchestrator.simulation.site import Scenario
from rolloutmq.services.orchestrator.simulation.trial import Telemetry, try_out

PASSING: Final = frozenset({"not confirmed yet", "starving"})
"""Parts of a reason that come and go with each batch: they make no kind."""


@dataclass(frozen=True, slots=True)
class DecisionChange:
    """A decision that differs from the last one of its environment.

    Attributes:
        at: Seconds since the start, on the controllers' clock.
        env: The environment.
        target: Workers.
        ready, starting: Workers at that time.
        need: Workers that the demand needs at that time, as a real number; no controller knows it.
        queued_batches: Batches in the whole queue; None before the first telemetry.
        bound: Keyword of the limit that keeps the target lower, or empty.
        reason: Explanation with the numbers.
    """

    at: float
    env: str
    target: int
    ready: int
    starting: int
    need: float
    queued_batches: float | None
    bound: str
    reason: str


def changed_decisions(scenario: Scenario, seed: int) -> list[DecisionChange]:
    """Run one trial, and return the decisions that changed, in order of time."""
    found: list[DecisionChange] = []
    last: dict[str, tuple[int, str, str]] = {}
    try_out(scenario, lambda one, running: _Told(one, running, found, last), seed)
    return found


def decision_lines(changes: Sequence[DecisionChange]) -> Iterator[str]:
    """Yield a line for each change, as text."""
    width = max((len(one.env) for one in changes), default=0)
    for one in changes:
        queued = "-" if one.queued_batches is None else f"{one.queued_batches:.2f}"
        yield (
            f"{one.at:7.0f} s  {one.env:<{width}}  target {one.target:3d}  ready {one.ready:3d}"
            f"  starting {one.starting:3d}  need {one.need:5.1f}  queue {queued:>5}  {one.reason}\n"
        )


class _Told(OwnControllers):
    """Keeps what changes; a restart of the controllers continues the list."""

    def __init__(
        self,
        scenario: Scenario,
        running: Mapping[str, int],
        found: list[DecisionChange],
        last: dict[str, tuple[int, str, str]],
    ) -> None:
        super().__init__(scenario, running)
        self._of = scenario
        self._found = found
        self._last = last

    def decide(self, seen: Telemetry) -> dict[str, int]:
        """See `Controllers`."""
        targets = super().decide(seen)
        for scale in self.autoscaler.scales:
            decision, crew = scale.decision, seen.crews[scale.env]
            kind = decision.target, decision.bound, kind_of(decision.reason)
            if self._last.get(scale.env) == kind:
                continue
            self._last[scale.env] = kind
            self._found.append(
                DecisionChange(
                    at=seen.now,
                    env=scale.env,
                    target=decision.target,
                    ready=crew.ready,
                    starting=crew.starting,
                    need=self._of.site.need(scale.env, seen.now),
                    queued_batches=None if seen.pressure is None else seen.pressure.rollout_pressure,
                    bound=decision.bound,
                    reason=decision.reason,
                )
            )
        return targets


def kind_of(reason: str) -> str:
    """Return the kind of a reason: its first words and its conclusions, without the numbers."""
    head, *conclusions = re.sub(r"\d[\d.]*", "#", reason.removeprefix("hold: ")).split("; ")
    return "; ".join([head.partition(":")[0], *(text for text in conclusions if text not in PASSING)])
