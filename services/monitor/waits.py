"""Why somebody waits, in one line with the numbers that matter: the answer to "why is it not faster?". Pure."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from rolloutmq.schemas.control import LaneStatus, Pressure, WorkerState
from rolloutmq.schemas.delivery import Wait
from rolloutmq.schemas.envelope import Split
from rolloutmq.services.monitor import figures


def is_waiting(reason: str) -> bool:
    """Whether a reason, as it travels, says that somebody waits."""
    return reason not in {"", Wait.NONE.value}


def trainer(pressure: Pressure) -> str:
    """Say why the trainer waits: the reason as it is counted, and what it means; empty if it does not wait."""
    reason = pressure.trainer_wait
    if not is_waiting(reason):
        return ""
    tell = TRAINER_WAITS.get(reason)
    return f"{reason}, {tell(pressure)}" if tell else reason


def workers(pressure: Pressure) -> str:
    """Say why most of the workers that wait do so, and which other environments wait; empty if none does.

    Whoever waits for somebody else than the broker comes first: nothing of theirs has arrived here yet.
    """
    return "; ".join(filter(None, (_outside(pressure), _lanes(pressure))))


def _outside(pressure: Pressure) -> str:
    """Say whom workers wait for beside the broker, by the first of them."""
    waiting = [worker for worker in pressure.workers if worker.waits_for]
    if not waiting:
        return ""
    first, others = waiting[0], len(waiting) - 1
    text = f"{TEACHER_AWAY}, worker {first.worker}: {first.waits_for}"
    return f"{text}; {others} other worker{'s wait' if others > 1 else ' waits'} too" if others else text


def _lanes(pressure: Pressure) -> str:
    lanes = [lane for lane in pressure.lanes if is_waiting(lane.wait)]
    if not lanes:
        return ""
    lanes.sort(key=lambda lane: -lane.waiting)
    first, others = lanes[0], Counter(lane.wait for lane in lanes[1:])
    tell = WORKER_WAITS.get(first.wait)
    text = f"{first.wait}, {tell(pressure, first)}" if tell else f"{first.wait}, environment {first.env}"
    if not others:
        return text
    more = ", ".join(f"{count} for {reason}" for reason, count in others.items())
    return f"{text}; other environments wait too: {more}"


def explain(pressure: Pressure, unsent: str = "") -> str:
    """Answer in one line why anybody waits, or say that nobody does.

    Args:
        unsent: Why the trainer asks the broker for nothing yet, see `sending`.
    """
    told = {"trainer waits": unsent or trainer(pressure), "workers wait": workers(pressure)}
    parts = [f"{who}: {why}" for who, why in told.items() if why]
    if parts:
        return "; ".join(parts)
    if not any(worker.state is WorkerState.READY for worker in pressure.workers):
        return "no worker is ready"
    return "nobody waits"


def _no_batch(pressure: Pressure) -> str:
    text = f"{pressure.queued_sequences:,} of {pressure.batch_sequences:,} sequences queued"
    missing = pressure.batch_sequences - pressure.queued_sequences
    if pressure.produced_per_s > 0 and missing > 0:
        text += f", the rest takes {missing / pressure.produced_per_s:.0f} s"
    counts = Counter(worker.state for worker in pressure.workers)
    ready = counts[WorkerState.READY]
    others = [f", {counts[state]} {state}" for state in WorkerState if counts[state] and state is not _READY]
    return f"{text}; {ready} worker{'s' * (ready != 1)} ready{''.join(others)}"


def _no_exact_fit(pressure: Pressure) -> str:
    queued, batch = pressure.queued_sequences, pressure.batch_sequences
    return f"{queued:,} sequences queued, but no whole groups make exactly {batch:,}"


def _min_share(pressure: Pressure) -> str:
    """Name the environment that is furthest from its minimum."""

    def missing(lane: LaneStatus) -> int:
        return int(lane.min_share * pressure.batch_sequences) - lane.queued_sequences

    lane = max((lane for lane in pressure.lanes if lane.split is Split.TRAIN), key=missing, default=None)
    if lane is None:
        return "an environment has not filled its minimum share"
    least = int(lane.min_share * pressure.batch_sequences)
    return (
        f"environment {lane.env}: {lane.queued_sequences:,} of its at least {least:,} sequences queued; "
        f"after {pressure.silent_env_s:g} s without any it waits no longer for it"
    )


def _batch_exceeds_cap(pressure: Pressure) -> str:
    full = [lane for lane in pressure.lanes if lane.high_bytes and lane.wait == Wait.LANE_FULL]
    if full:
        what, key = _lane_bytes(full[0]), f"env.{full[0].env}.high_bytes"
    else:
        what, key = _bytes(pressure), "broker.high_bytes or broker.high_groups"
    return (
        f"a batch of {pressure.batch_sequences:,} sequences does not fit: {what} hold "
        f"{pressure.queued_sequences:,}; raise {key}"
    )


def _leased_elsewhere(pressure: Pressure) -> str:
    return f"{pressure.ledger.leased:,} groups of another step are leased, to be settled or taken back first"


def _journal_slow(_pressure: Pressure) -> str:
    return "the disk of the broker is full, or does not keep up"


def _too_few_groups(pressure: Pressure) -> str:
    return f"{pressure.queued_groups:,} groups queued, fewer than the trainer has ranks"


def _end_of_replay(_pressure: Pressure) -> str:
    return "every recorded batch was served"


def _stale_guard(_pressure: Pressure, lane: LaneStatus) -> str:
    ahead = lane.queued_groups + lane.leased_groups + lane.granted
    bound = f"{lane.max_staleness} version{'s' * (lane.max_staleness != 1)}"
    return f"environment {lane.env}: {ahead:,} groups ahead of the trainer, bound {bound}"


def _lane_full(_pressure: Pressure, lane: LaneStatus) -> str:
    return f"environment {lane.env}: {_lane_bytes(lane)} held, the mark of its own"


def _global_full(pressure: Pressure, lane: LaneStatus) -> str:
    held = pressure.ledger.queued + pressure.ledger.leased
    return f"environment {lane.env}: {_bytes(pressure)} held, {held:,} of {pressure.high_groups:,} groups"


def _no_credit(pressure: Pressure, lane: LaneStatus) -> str:
    granted = figures.amount(pressure.granted_bytes)
    return f"environment {lane.env}: {_bytes(pressure)} held, and {granted} promised to other workers"


def _lane_bytes(lane: LaneStatus) -> str:
    return figures.portion(lane.held_bytes, lane.high_bytes)


def _bytes(pressure: Pressure) -> str:
    return figures.portion(pressure.queued_bytes + pressure.leased_bytes, pressure.high_bytes)


_READY: Final = WorkerState.READY
TEACHER_AWAY: Final = "teacher_away"
"""Rollouts are over, and the teacher has not said yet what it thinks of them."""
TRAINER_WAITS: Final[Mapping[str, Callable[[Pressure], str]]] = {
    Wait.NO_BATCH: _no_batch,
    Wait.NO_EXACT_FIT: _no_exact_fit,
    Wait.MIN_SHARE: _min_share,
    Wait.BATCH_EXCEEDS_CAP: _batch_exceeds_cap,
    Wait.LEASED_ELSEWHERE: _leased_elsewhere,
    Wait.JOURNAL_SLOW: _journal_slow,
    Wait.TOO_FEW_GROUPS: _too_few_groups,
    Wait.END_OF_REPLAY: _end_of_replay,
}
"""What each reason of a trainer means."""
WORKER_WAITS: Final[Mapping[str, Callable[[Pressure, LaneStatus], str]]] = {
    Wait.STALE_GUARD: _stale_guard,
    Wait.LANE_FULL: _lane_full,
    Wait.GLOBAL_FULL: _global_full,
    Wait.NO_CREDIT: _no_credit,
    Wait.JOURNAL_SLOW: lambda pressure, _: _journal_slow(pressure),
}
"""What each reason of a lane's producers means."""
