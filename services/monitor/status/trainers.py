"""Trouble with the trainers of a run: none is connected, one is silent, or several share the groups. Pure.

Without it a run whose trainer is away looks as if its workers waited for nothing but their staleness bound.
"""

from typing import Final, NamedTuple

from rolloutmq.schemas.wire.control import SILENT_S, Pressure, TrainerStatus
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.text import format

OWN_ABSENT_S: Final = 5.0
"""Time without a trainer of one's own after which its absence is told."""
ABSENT_S: Final = 30.0
"""The same for a trainer that the launcher starts: it first loads its model."""


class TrainerTrouble(NamedTuple):
    """A problem in a few words, and in one sentence with what to do."""

    short: str
    text: str


NO_TROUBLE: Final = TrainerTrouble("", "")


def trouble(pressure: Pressure, total_steps: int = 0, *, is_own: bool = False) -> TrainerTrouble:
    """Return what is wrong with the trainers of a run.

    Args:
        total_steps: Steps of the run; 0 if unknown. After the last no trainer is missed.
        is_own: No launcher starts the trainer.
    """
    connected = [one for one in pressure.leaders if one.connected]
    if not pressure.trainers and not connected:
        return _absence(pressure, total_steps, is_own=is_own)
    if (silent := next((one for one in connected if one.silent_s > SILENT_S), None)) is not None:
        text = (
            f"consumer {silent.consumer} has been silent for {format.clock(silent.silent_s)}{_step(silent)}"
        )
        return TrainerTrouble("the trainer is silent", f"{text}; its process is stopped, or it hangs")
    if len(connected) > 1:
        each = ", ".join(f"{one.consumer} at step {one.step}" for one in connected)
        return TrainerTrouble(
            f"{len(connected)} trainers",
            f"{len(connected)} trainers share the groups, each with steps of its own: {each}; end all but one, or give "
            "the ranks of one trainer `rank` and `world_size`",
        )
    return NO_TROUBLE


def _absence(pressure: Pressure, total_steps: int, *, is_own: bool) -> TrainerTrouble:
    is_done = 0 < total_steps <= pressure.step
    trains = any(lane.split is Split.TRAIN for lane in pressure.lanes)
    # A lease shows a trainer that the broker does not know again yet, after its restart.
    if is_done or not trains or pressure.ledger.leased:
        return NO_TROUBLE
    if pressure.untrained_s < (OWN_ABSENT_S if is_own else ABSENT_S):
        return NO_TROUBLE
    last = pressure.leaders[-1] if pressure.leaders else None
    if last is None:
        why = "none has come yet"
    else:
        why = f"{last.consumer} {'left' if last.has_left else 'fell silent'}{_step(last)}"
    remedy = "; start yours on this run directory" if is_own else ""
    text = f"no trainer has been connected for {format.clock(pressure.untrained_s)}: {why}{remedy}"
    return TrainerTrouble("no trainer is connected", text)


def _step(trainer: TrainerStatus) -> str:
    return f" after step {trainer.step}" if trainer.step else " before its first step"
