"""Reasons why trainer and workers wait, in one line with the relevant numbers. Pure, except `outside` and `unserved`.

`crew` is the number of workers by state, as the orchestrator and the broker know them together. Without it only those
that the broker heard count.

A trainer that waits for vLLM to receive its weights, or for an evaluation, asks for no batch meanwhile. Workers wait
for an inference server, which waits for the weights of a trainer. The broker cannot report these waits; they are read
from files of the run.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from rolloutmq.bus.rundir import read_json, read_run
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import OpenPoint, RunLayout, SentAddress
from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.control import LaneStatus, Pressure, WorkerState
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.services.monitor.status.trainers import NO_TROUBLE, TrainerTrouble
from rolloutmq.services.monitor.status.worker_view import in_order
from rolloutmq.services.monitor.text import format
from rolloutmq.services.monitor.text.network import ENGINE_AWAY

Found = TypeVar("Found")
EXPIRED_PART: Final = 0.1
"""Part of the accepted groups from which the expired ones are named: a batch may never form."""


def is_waiting(reason: str) -> bool:
    """Return whether a wire reason means a wait."""
    return reason not in {"", Wait.NONE.value}


def trainer(pressure: Pressure, crew: Mapping[str, int] | None = None) -> str:
    """Return why the trainer waits: the counted reason and its explanation; empty if it does not wait."""
    reason = pressure.trainer_wait
    if not is_waiting(reason):
        return ""
    tell = TRAINER_WAITS.get(reason)
    text = f"{reason}, {tell(pressure)}" if tell else reason
    return f"{text}; {_at_work(pressure, crew)}" if reason == Wait.NO_BATCH else text


def workers(pressure: Pressure, unserved: str = "", crew: Mapping[str, int] | None = None) -> str:
    """Return the most frequent wait of workers, and the other waiting environments; empty if none waits.

    Waits outside the broker come first: the groups of those workers have not arrived yet.

    Args:
        unserved: Why no inference server can sample, see the function `unserved`.
    """
    return "; ".join(
        filter(None, (before_start(pressure, unserved, crew), _outside(pressure), _lanes(pressure)))
    )


def before_start(pressure: Pressure, unserved: str, crew: Mapping[str, int] | None = None) -> str:
    """Return `unserved` if workers wait for an inference server before they are ready; empty if none does."""
    counts = _counts(pressure, crew)
    return unserved if counts[WorkerState.STARTING] and not counts[_READY] else ""


def _counts(pressure: Pressure, crew: Mapping[str, int] | None) -> Counter[str]:
    return Counter(worker.counts_as for worker in pressure.workers) if crew is None else Counter(crew)


def _outside(pressure: Pressure) -> str:
    """Return the first wait of a worker outside the broker."""
    waiting = [worker for worker in pressure.workers if worker.waits_for and not worker.is_silent]
    if not waiting:
        return ""
    first, others = waiting[0], len(waiting) - 1
    is_apart = first.state is WorkerState.STARTING or first.engines_away
    reason = ENGINE_AWAY if is_apart else TEACHER_AWAY
    text = f"{reason}, worker {first.worker}: {printable(first.waits_for)}"
    return f"{text}; {others} other worker{'s wait' if others > 1 else ' waits'} too" if others else text


def _lanes(pressure: Pressure) -> str:
    lanes = [lane for lane in pressure.lanes if is_waiting(lane.wait)]
    if not lanes:
        return ""
    lanes.sort(key=lambda lane: -lane.waiting)
    first, others = lanes[0], Counter(lane.wait for lane in lanes[1:])
    tell = WORKER_WAITS.get(first.wait)
    text = f"{first.wait}, {tell(pressure, first)}" if tell else f"{first.wait}, environment {first.env}"
    if waiting := waiting_text(first):
        text += f"; {waiting}"
    if not others:
        return text
    more = ", ".join(f"{count} for {reason}" for reason, count in others.items())
    return f"{text}; other environments wait: {more}"


def waiting_text(lane: LaneStatus) -> str:
    """Return how many producers of a lane wait, such as `3 of 8 producers wait`; empty if none does."""
    if not lane.waiting:
        return ""
    all_of = "" if lane.producers < lane.waiting else f" of {lane.producers:,}"
    is_one = max(lane.waiting, lane.producers) == 1
    return f"{lane.waiting:,}{all_of} producer{'' if is_one else 's'} wait{'s' if lane.waiting == 1 else ''}"


def explain(
    pressure: Pressure,
    outside: str = "",
    *,
    unserved: str = "",
    has_workers: bool = True,
    trainers: TrainerTrouble = NO_TROUBLE,
    crew: Mapping[str, int] | None = None,
    engines: str = "",
) -> str:
    """Return one line on all waits, or state that nobody waits; then the engines that lag or do not answer.

    Args:
        outside: Why the trainer does not ask the broker now, see the function `outside`.
        unserved: Why no inference server can sample, see the function `unserved`.
        has_workers: Whether the run has workers by design. A broker with producers of one's own has none, nor has a
            gateway.
        trainers: What is wrong with the trainers, see `trainers.trouble`.
        crew: Number of workers by state.
        engines: Which engines are out of reach, lag or do not answer, see `text.network.engine_trouble`.
    """
    why = _waits(pressure, outside, unserved, trainers, crew) or _no_wait(pressure, crew, has_workers)
    return "; ".join(filter(None, (why, engines)))


def _waits(
    pressure: Pressure,
    outside: str,
    unserved: str,
    trainers: TrainerTrouble,
    crew: Mapping[str, int] | None,
) -> str:
    reasons = {
        "trainer waits": outside or trainer(pressure, crew),
        "workers wait": workers(pressure, unserved, crew),
    }
    parts = [trainers.text] if trainers.text else []
    parts += [f"{who}: {why}" for who, why in reasons.items() if why]
    return "; ".join(parts)


def _no_wait(pressure: Pressure, crew: Mapping[str, int] | None, has_workers: bool) -> str:
    counts = _counts(pressure, crew)
    if (has_workers or counts) and not counts[_READY]:
        return "no worker is ready"
    return "nobody waits"


def _no_batch(pressure: Pressure) -> str:
    text = f"{pressure.queued_sequences:,} of {pressure.batch_sequences:,} sequences queued"
    missing = pressure.batch_sequences - pressure.queued_sequences
    if pressure.leased_bytes and 2 * (pressure.queued_bytes + pressure.leased_bytes) > pressure.high_bytes:
        text += f", {_bytes(pressure)} held, of which {format.amount(pressure.leased_bytes)} in training"
    if pressure.produced_per_s > 0 and missing > 0:
        text += f", the rest takes {missing / pressure.produced_per_s:.0f} s"
    if many := expired(pressure):
        text += f"; {many}, too stale to train on (the broker's log has remedies)"
    return text


def _at_work(pressure: Pressure, crew: Mapping[str, int] | None) -> str:
    """Return who produces the missing groups."""
    counts, producers = _counts(pressure, crew), sum(lane.producers for lane in pressure.lanes)
    if producers and not counts:  # of one's own, or of the gateway: they send no heartbeats
        return f"{producers} producer{'s' * (producers != 1)}"
    ready = counts.pop(_READY, 0)
    return ", ".join([f"{ready} worker{'s' * (ready != 1)} ready", *map(" ".join, in_order(counts))])


def expired(pressure: Pressure) -> str:
    """Return how many groups expired, if they are so many that a batch may never form; else nothing."""
    ledger = pressure.ledger
    many = ledger.expired > EXPIRED_PART * ledger.accepted
    return f"{ledger.expired:,} of {ledger.accepted:,} groups expired" if many else ""


def _no_exact_fit(pressure: Pressure) -> str:
    queued, batch = pressure.queued_sequences, pressure.batch_sequences
    return f"{queued:,} sequences queued, but no whole groups make exactly {batch:,}"


def _min_share(pressure: Pressure) -> str:
    """Name the environment furthest below its minimum share."""

    def missing(lane: LaneStatus) -> int:
        return int(lane.min_share * pressure.batch_sequences) - lane.queued_sequences

    lane = max((lane for lane in pressure.lanes if lane.split is Split.TRAIN), key=missing, default=None)
    if lane is None:
        return "an environment has not filled its minimum share"
    least = int(lane.min_share * pressure.batch_sequences)
    return (
        f"environment {lane.env}: {lane.queued_sequences:,} of at least {least:,} sequences queued; "
        f"waits at most {pressure.exact_wait_s:g} s, then later batches make up for it"
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
    return f"{pressure.ledger.leased:,} groups of another step are still leased"


def _unsettled(pressure: Pressure) -> str:
    return f"it holds {pressure.ledger.leased:,} groups, and no other comes before it settles some of them"


def _step_mismatch(_pressure: Pressure) -> str:
    return "a rank pulls a step that the other ranks have settled; it is refused unless they start over"


def _journal_slow(_pressure: Pressure) -> str:
    return "the broker's disk is full or too slow"


def _too_few_groups(pressure: Pressure) -> str:
    return f"{pressure.queued_groups:,} groups queued, fewer than the trainer has ranks"


def _end_of_replay(_pressure: Pressure) -> str:
    return "every recorded batch was served"


def _stale_guard(_pressure: Pressure, lane: LaneStatus) -> str:
    ahead = lane.queued_groups + lane.leased_groups + lane.granted
    bound = f"{lane.max_staleness} version{'s' * (lane.max_staleness != 1)}"
    return f"environment {lane.env}: {ahead:,} groups ahead of the trainer, bound {bound}"


def _no_tasks(_pressure: Pressure, lane: LaneStatus) -> str:
    return f"environment {lane.env}: its workers wait for submitted tasks"


def _lane_full(_pressure: Pressure, lane: LaneStatus) -> str:
    return f"environment {lane.env}: {_lane_bytes(lane)} held, its own high-water mark"


def _global_full(pressure: Pressure, lane: LaneStatus) -> str:
    held = pressure.ledger.queued + pressure.ledger.leased
    groups = f"{held:,} of {pressure.high_groups:,} groups"
    return f"environment {lane.env}: {_bytes(pressure)} held{_reserved(pressure)}, {groups}"


def _no_credit(pressure: Pressure, lane: LaneStatus) -> str:
    granted = format.amount(pressure.granted_bytes)
    held = f"{_bytes(pressure)} held{_reserved(pressure)}"
    return f"environment {lane.env}: {held}, and {granted} granted to other workers"


def _reserved(pressure: Pressure) -> str:
    """Return the reserve as a part of a sentence; empty if there is none."""
    return f", {format.amount(pressure.reserved_bytes)} reserved" if pressure.reserved_bytes else ""


def _lane_bytes(lane: LaneStatus) -> str:
    return format.portion(lane.held_bytes, lane.high_bytes)


def _bytes(pressure: Pressure) -> str:
    return format.portion(pressure.queued_bytes + pressure.leased_bytes, pressure.high_bytes)


_READY: Final = WorkerState.READY

TEACHER_AWAY: Final = "teacher_away"
"""Finished rollouts wait for the teacher's log-probabilities."""

TRAINER_WAITS: Final[Mapping[str, Callable[[Pressure], str]]] = {
    Wait.NO_BATCH: _no_batch,
    Wait.NO_EXACT_FIT: _no_exact_fit,
    Wait.MIN_SHARE: _min_share,
    Wait.BATCH_EXCEEDS_CAP: _batch_exceeds_cap,
    Wait.LEASED_ELSEWHERE: _leased_elsewhere,
    Wait.UNSETTLED: _unsettled,
    Wait.STEP_MISMATCH: _step_mismatch,
    Wait.JOURNAL_SLOW: _journal_slow,
    Wait.TOO_FEW_GROUPS: _too_few_groups,
    Wait.END_OF_REPLAY: _end_of_replay,
}
"""Explanation of each reason why a trainer waits."""

WORKER_WAITS: Final[Mapping[str, Callable[[Pressure, LaneStatus], str]]] = {
    Wait.STALE_GUARD: _stale_guard,
    Wait.NO_TASKS: _no_tasks,
    Wait.LANE_FULL: _lane_full,
    Wait.GLOBAL_FULL: _global_full,
    Wait.NO_CREDIT: _no_credit,
    Wait.JOURNAL_SLOW: lambda pressure, _: _journal_slow(pressure),
}
"""Explanation of each reason why the producers of a lane wait."""


def outside(layout: RunLayout) -> str:
    """Return why a running trainer does not ask the broker now: the reason and its explanation; empty if it does."""
    return _unsent(layout) or _evaluation(layout)


def unserved(layout: RunLayout) -> str:
    """Return why no inference server of the run can sample: the reason and its explanation; empty if one can."""
    if layout.weights.exists():
        return ""
    try:
        config, _ = read_run(layout.root)
    except RolloutMQError:
        return ""
    if config.inference.kind not in {"tiny", "vllm"}:
        return ""
    return (
        f'weights_missing, inference.kind "{config.inference.kind}" samples from the weights of a trainer, and none '
        "has published any"
    )


def _unsent(layout: RunLayout) -> str:
    found = _read(layout.weights, SentAddress)
    if found is None or not found.waits or not SegmentOwner(*found.sender).alive():
        return ""
    return f"weights_unsent, {found.waits}"


def _evaluation(layout: RunLayout) -> str:
    found = _read(layout.evaluation, OpenPoint)
    if found is None or found.waiter is None or not SegmentOwner(*found.waiter).alive():
        return ""
    return f"evaluation, point {found.id} of {len(found.tasks):,} tasks"


def _read(path: Path, kind: type[Found]) -> Found | None:
    try:
        return read_json(path, kind)
    except (msgspec.DecodeError, OSError):
        return None
