"""Seconds waited over all lives of a broker: its own sums begin with its start. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from rolloutmq.services.dashboard.record.lines import PressureLine


class Waited(NamedTuple):
    """Sums of seconds.

    Attributes:
        starved_s: Seconds in which the trainer had no batch.
        trainer_waits_s: Waits of trainers by reason.
        producer_waits_s: Waits of producers by reason.
    """

    starved_s: float = 0.0
    trainer_waits_s: Mapping[str, float] = {}
    producer_waits_s: Mapping[str, float] = {}

    def plus(self, line: PressureLine) -> "Waited":
        """Return the sums with those of the last line of a life."""
        return Waited(
            self.starved_s + line.starved_s,
            added(self.trainer_waits_s, line.trainer_waits_s),
            added(self.producer_waits_s, line.producer_waits_s),
        )


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by reason."""
    return {reason: one.get(reason, 0.0) + other.get(reason, 0.0) for reason in {**one, **other}}
