"""Seconds waited over all lives of a broker: its own sums begin with its start. Pure.

A life is told apart by its epoch; the last line of each has its sums.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

LIVES_LIMIT: Final = 64
"""Lives that are kept apart; the oldest ones count together."""


class Waiting(Protocol):
    """What a broker tells of waits: `Pressure`, or its line in the record."""

    @property
    def epoch(self) -> int: ...
    @property
    def starved_s(self) -> float: ...
    @property
    def trainer_waits_s(self) -> Mapping[str, float]: ...
    @property
    def producer_waits_s(self) -> Mapping[str, float]: ...


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

    def plus(self, other: "Waited") -> "Waited":
        """Return the sums of both."""
        return Waited(
            self.starved_s + other.starved_s,
            added(self.trainer_waits_s, other.trainer_waits_s),
            added(self.producer_waits_s, other.producer_waits_s),
        )

    @property
    def waits_s(self) -> dict[str, float]:
        """Seconds by reason, of trainers and producers together."""
        return added(self.trainer_waits_s, self.producer_waits_s)


class WaitedLives:
    """The waits of each life; the newest word of a life replaces those before."""

    def __init__(self) -> None:
        self._lives: dict[int, Waited] = {}
        self._older = Waited()

    def take(self, told: Waiting) -> None:
        """Take the sums of a life as far as it is known."""
        if told.epoch not in self._lives and len(self._lives) >= LIVES_LIMIT:
            oldest = min(self._lives)
            self._older = self._older.plus(self._lives.pop(oldest))
        self._lives[told.epoch] = Waited(told.starved_s, told.trainer_waits_s, told.producer_waits_s)

    def join(self, earlier: "WaitedLives") -> None:
        """Take the lives of a record that was read; what is known already stays."""
        self._older = self._older.plus(earlier._older)
        self._lives = {**earlier._lives, **self._lives}

    def sum(self) -> Waited:
        """Return the sums of all lives."""
        total = self._older
        for one in self._lives.values():
            total = total.plus(one)
        return total

    def copy(self) -> "WaitedLives":
        """Return the lives as they are now."""
        twin = WaitedLives()
        twin._lives, twin._older = dict(self._lives), self._older
        return twin


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by reason."""
    return {reason: one.get(reason, 0.0) + other.get(reason, 0.0) for reason in {**one, **other}}
