"""Why somebody waits, as a sentence: the answer to "why is it not faster?"."""

from collections.abc import Mapping
from typing import Final

from rolloutmq.schemas.control import LaneStatus, Pressure, WorkerState
from rolloutmq.schemas.delivery import Wait

TRAINER_WAITS: Final[Mapping[str, str]] = {
    Wait.NO_BATCH: "{queued} of {batch} sequences are queued; the workers are slower",
    Wait.NO_EXACT_FIT: "{queued} sequences are queued, but no whole groups make exactly {batch}",
    Wait.MIN_SHARE: "an environment has not yet filled the minimum share it is promised",
    Wait.BATCH_EXCEEDS_CAP: "a batch of {batch} does not fit below the queue's high mark",
    Wait.LEASED_ELSEWHERE: "another step is leased, and must be settled or taken back first",
}
WORKER_WAITS: Final[Mapping[str, str]] = {
    Wait.STALE_GUARD: "a rollout begun now would come too stale; the trainer is slower",
    Wait.LANE_FULL: "the queue of their environment is full; the trainer is slower",
    Wait.GLOBAL_FULL: "the queue is at its high mark of bytes or groups",
    Wait.JOURNAL_SLOW: "the disk of the broker is full, or does not keep up",
    Wait.NO_CREDIT: "they have no byte credit left: the queue is nearly full",
}


def is_waiting(reason: str) -> bool:
    """Whether a reason, as it travels, says that somebody waits."""
    return reason not in {"", Wait.NONE.value}


def trainer(pressure: Pressure) -> str:
    """Say why the trainer waits; empty if it does not."""
    reason = pressure.trainer_wait
    if not is_waiting(reason):
        return ""
    text = TRAINER_WAITS.get(reason, reason)
    return text.format(queued=pressure.queued_sequences, batch=pressure.batch_sequences)


def workers(lane: LaneStatus) -> str:
    """Say why the producers of an environment wait; empty if they do not."""
    return WORKER_WAITS.get(lane.wait, lane.wait) if is_waiting(lane.wait) else ""


def explain(pressure: Pressure) -> str:
    """Answer in one line why anybody waits, or say that nobody does."""
    parts = []
    if reason := trainer(pressure):
        parts.append(f"trainer waits: {reason}")
    for lane in pressure.lanes:
        if reason := workers(lane):
            who = "workers wait" if len(pressure.lanes) == 1 else f"{lane.env} workers wait"
            parts.append(f"{who}: {reason}")
    if parts:
        return "; ".join(parts)
    if not any(worker.state is WorkerState.READY for worker in pressure.workers):
        return "no worker is ready"
    return "nobody waits"
