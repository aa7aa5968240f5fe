"""Figures of learning: the choice of a `step` event that views show, and their text. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

T = TypeVar("T")

SHOWN: Final = ("entropy", "kl", "kl_ref", "distill_kl", "clipped", "grad_norm", "learning_rate")
"""Shown figures of `StepDone.extra`. All figures that a trainer logs by itself are shown."""


def of_step(loss: T, extra: Mapping[str, T]) -> dict[str, T]:
    """Return the shown figures of a `step` event."""
    return {"loss": loss, **{name: extra[name] for name in SHOWN if name in extra}}


def line(figures: Mapping[str, float], not_finite: Iterable[str] = ()) -> str:
    """Return figures as one line, those that are not finite first."""
    parts = [f"{name} not finite" for name in not_finite]
    return " · ".join([*parts, *(f"{name} {value:.4g}" for name, value in figures.items())])
