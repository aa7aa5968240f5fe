"""Use of time: how long trainer, rollout slots and inference servers worked or waited, from `metrics.jsonl`.

The broker counts waits since its start. All times and waits are summed from one recorded `pressure` to the next, over
the same intervals: those in which a trainer was there, and the record has no gap. They begin with the first settled
batch of each life of the broker: before it workers start and weights load, which does not say what limits the run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import TrainerPause

GAP_S: Final = 10.0
"""Longest time between two events that counts; beyond it nothing was recorded, for example between two lives."""
INFERENCE_BOUND: Final = "inference_bound"
POLLED: Final = frozenset({Wait.NO_BATCH, Wait.NO_EXACT_FIT, Wait.MIN_SHARE, Wait.TOO_FEW_GROUPS})
"""Waits of which `starved_s` counts the polls in vain too, which `trainer_waits_s` lacks."""
KINDS: Final = frozenset({"pressure", "engine_sample", "scale_decision"})
"""Events that tell of use."""
ROUNDING_S: Final = 1e-6
"""Difference of two counters that is none."""
AT_WORK: Final = frozenset({Wait.UNSETTLED.value, TrainerPause.EVALUATION.value})
"""Waits of a trainer that lacks no batch: it works on the groups that it has, or evaluates."""


class WorkerLine(msgspec.Struct, frozen=True):
    """A worker in an event of the broker."""

    env: str = ""
    state: str = ""


class LaneLine(msgspec.Struct, frozen=True):
    """A lane in an event of the broker."""

    split: int = 0
    accepted_sequences: int = 0
    queued_sequences: int = 0


class UsageLine(msgspec.Struct, frozen=True):
    """Fields of the events of `KINDS`."""

    t: float
    kind: str = ""
    epoch: int = 0
    trainers: int = 0
    starved_s: float = 0.0
    settled_busy_s: float = 0.0
    trainer_waits_s: dict[str, float] = {}
    producer_waits_s: dict[str, float] = {}
    blocked_s: dict[str, float] = {}
    workers: tuple[WorkerLine, ...] = ()
    worker_states: dict[str, int] = {}
    trimmed: tuple[str, ...] = ()
    lanes: tuple[LaneLine, ...] = ()
    name: str = ""
    busy: float = 0.0
    env: str = ""
    bound: str = ""
    want: float | None = None


@dataclass
class Usage:
    """Sums over a run.

    Attributes:
        is_unrecorded: The record has no event of the broker.
        has_settled: A batch was settled.
        run_starved_s: Seconds of the whole run in which the trainer was ready and had no batch: also those before the
            first settled batch.
        start_s: Seconds from the first event to the first settled batch, over all lives of the broker. Only the first
            life counts without a trainer.
        trainer_s: Seconds with a trainer from then on, as all that follows.
        trainer_waits_s: Seconds of these in which it waited, by reason; each rank counts for its share.
        workerless_s: Seconds in which workers were known, and none of them was ready.
        workers: Most workers that were ready at once; 0 if none was, or their number is not known.
        slot_s: Seconds of rollout slots of ready workers, by environment.
        unknown_slots_s: Seconds in which the number of slots is not known: the record leaves out the single workers of
            large fleets, and without them several environments cannot be told apart. No slot or wait of it counts.
        blocked_s: Seconds in which a slot waited for credit or a submitted task, by environment.
        producer_waits_s: Seconds of waits of all producers, by reason.
        made: Sequences for training that the broker accepted.
        grown: Sequences for training by which the queue has grown.
        busy: Mean part of the time in which an inference server sampled, 0 to 1; None without servers of the run.
        inference_bound: Environments whose workers were held back by the servers in most decisions with a demand.
    """

    is_unrecorded: bool = False
    has_settled: bool = False
    run_starved_s: float = 0.0
    start_s: float = 0.0
    trainer_s: float = 0.0
    trainer_waits_s: dict[str, float] = field(default_factory=dict)
    workerless_s: float = 0.0
    workers: int = 0
    slot_s: dict[str, float] = field(default_factory=dict)
    unknown_slots_s: float = 0.0
    blocked_s: dict[str, float] = field(default_factory=dict)
    producer_waits_s: dict[str, float] = field(default_factory=dict)
    made: int = 0
    grown: int = 0
    busy: float | None = None
    inference_bound: frozenset[str] = frozenset()

    @property
    def starving_s(self) -> dict[str, float]:
        """Seconds in which the trainer was ready and had no batch, by reason."""
        return {reason: seconds for reason, seconds in self.trainer_waits_s.items() if reason not in AT_WORK}

    @property
    def starved_s(self) -> float:
        """Seconds in which the trainer was ready and had no batch."""
        return sum(self.starving_s.values())

    @property
    def starved(self) -> float:
        """Part of the trainer's time from the first settled batch without a batch, 0 to 1."""
        return min(1.0, self.starved_s / self.trainer_s) if self.trainer_s else 0.0

    @property
    def knows_slots(self) -> bool:
        """Whether the part in which rollout slots waited is known."""
        return bool(self.slot_s) or not self.unknown_slots_s

    @property
    def blocked(self) -> float:
        """Part of the time of all rollout slots in which they waited, 0 to 1; 0 if it is not known."""
        slot_s = sum(self.slot_s.values())
        return min(1.0, sum(self.blocked_s.values()) / slot_s) if slot_s else 0.0

    @property
    def queued(self) -> float:
        """Part of the sequences made by which the queue has grown, 0 to 1."""
        return min(1.0, max(0.0, self.grown / self.made)) if self.made else 0.0


def read_usage(lines: Iterable[UsageLine], slots: Mapping[str, int]) -> Usage:
    """Sum the use of time over the events of a run.

    Args:
        lines: The recorded events, in order.
        slots: Rollout slots of a worker, by environment; of another environment a worker has one.
    """
    sums = UsageSums(slots)
    for line in lines:
        sums.add(line)
    return sums.usage()


def part_of_run(seconds: float, ran_s: float | None) -> float | None:
    """Return the part of the time that a run has run, its lives together, 0 to 1; None if that is not known."""
    return min(1.0, max(0.0, seconds / ran_s)) if ran_s else None


class UsageSums:
    """Sums that grow with each event.

    Args:
        slots: Rollout slots of a worker, by environment; of another environment a worker has one.
    """

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.slots = slots
        self._found = Usage()
        self._lives: dict[int, _Life] = {}
        self._life: _Life | None = None
        self._busy, self._samples = 0.0, 0
        self._bounds: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()

    def add(self, line: UsageLine) -> None:
        """Take an event; they come in order."""
        match line.kind:
            case "pressure":
                self._life = self._lives.setdefault(line.epoch, _Life(line, is_first=not self._lives))
                self._life.add(line, self._found, self.slots)
            case "engine_sample" if self._life is not None and self._life.has_settled:
                self._busy, self._samples = self._busy + line.busy, self._samples + 1
            case "scale_decision" if line.want is not None:
                self._decisions[line.env] += 1
                self._bounds[line.env] += line.bound == INFERENCE_BOUND

    def usage(self) -> Usage:
        """Return the sums so far: an object that later events change."""
        found, lives = self._found, self._lives.values()
        found.start_s = sum(one.start_s for one in lives)
        found.run_starved_s = sum(one.starved_s for one in lives)
        found.is_unrecorded = not lives
        found.has_settled = any(one.has_settled for one in lives)
        found.busy = self._busy / self._samples if self._samples else None
        found.inference_bound = frozenset(
            env for env, count in self._decisions.items() if 2 * self._bounds[env] > count
        )
        return found


class _Life:
    """The events of one life of the broker."""

    def __init__(self, first: UsageLine, *, is_first: bool) -> None:
        self.has_settled = False
        self._last = first
        self._waited_s = 0.0
        self._counts = is_first
        self._other_s = _other_waits_s(first.trainer_waits_s, first.trainers)

    @property
    def start_s(self) -> float:
        """Seconds to the first settled batch; 0 in a later life without a trainer, which looks at a run that ended."""
        return self._waited_s if self._counts else 0.0

    @property
    def starved_s(self) -> float:
        """Seconds in which the trainer was ready and had no batch, as far as they are known."""
        return self._last.starved_s + self._other_s

    def add(self, line: UsageLine, found: Usage, slots: Mapping[str, int]) -> None:
        """Add the time since the event before, in which everybody was as that one says."""
        seconds, before = line.t - self._last.t, self._last
        self._last = line
        grown = _grown(before.trainer_waits_s, line.trainer_waits_s)
        self._other_s += _other_waits_s(grown, max(before.trainers, line.trainers))
        self._counts |= line.trainers > 0
        if not self.has_settled:
            self.has_settled = line.settled_busy_s > 0.0
            self._waited_s += max(0.0, seconds)
        elif 0.0 < seconds <= GAP_S and before.trainers:
            found.trainer_s += seconds
            _add_trainer(found, before, line)
            _add_slots(found, before, line, slots)
            _add_queue(found, before, line)


def _other_waits_s(waits_s: Mapping[str, float], trainers: int) -> float:
    """Return the seconds of waits for a batch that more groups would not end: `starved_s` of the broker lacks them."""
    others = (
        seconds for reason, seconds in waits_s.items() if reason not in POLLED and reason not in AT_WORK
    )
    return sum(others) / max(1, trainers)


def _add_trainer(found: Usage, before: UsageLine, line: UsageLine) -> None:
    """Add the waits of the trainer: of all ranks, each for its share, and the polls in vain."""
    ranks = max(before.trainers, line.trainers)
    waits_s = _grown(before.trainer_waits_s, line.trainer_waits_s)
    for reason, seconds in waits_s.items():
        _add(found.trainer_waits_s, reason, seconds / ranks)
    waited_s = sum(seconds for reason, seconds in waits_s.items() if reason in POLLED) / ranks
    if (polled_s := line.starved_s - before.starved_s - waited_s) > ROUNDING_S:
        _add(found.trainer_waits_s, Wait.NO_BATCH.value, polled_s)


def _add_slots(found: Usage, before: UsageLine, line: UsageLine, slots: Mapping[str, int]) -> None:
    seconds = line.t - before.t
    ready = _ready(before, slots)
    counted = before.worker_states.get(WorkerState.READY, 0)
    found.workers = max(found.workers, counted, sum((ready or {}).values()))
    if ready is None:
        found.unknown_slots_s += seconds
        return
    if before.worker_states and not before.worker_states.get(WorkerState.READY):
        found.workerless_s += seconds
    for env, workers in ready.items():
        _add(found.slot_s, env, seconds * workers * slots.get(env, 1))
    for total, until, since in (
        (found.blocked_s, line.blocked_s, before.blocked_s),
        (found.producer_waits_s, line.producer_waits_s, before.producer_waits_s),
    ):
        for name, value in _grown(since, until).items():
            _add(total, name, value)


def _ready(line: UsageLine, slots: Mapping[str, int]) -> Mapping[str, int] | None:
    """Return the number of ready workers by environment; None if it is not known.

    The record leaves out the single workers of a large fleet, and keeps their number by state: enough for one
    environment.
    """
    if "workers" not in line.trimmed:
        return Counter(worker.env for worker in line.workers if worker.state == WorkerState.READY)
    envs = slots.keys() | line.blocked_s.keys()
    if len(envs) != 1:
        return None
    (env,) = envs
    return {env: line.worker_states.get(WorkerState.READY.value, 0)}


def _add_queue(found: Usage, before: UsageLine, line: UsageLine) -> None:
    """Add what entered the queue, and by how much it grew: groups that expire leave it untaken."""
    if not (before.lanes and line.lanes):
        return
    for sign, one in ((1, line), (-1, before)):
        lanes = [lane for lane in one.lanes if lane.split == Split.TRAIN]
        found.made += sign * sum(lane.accepted_sequences for lane in lanes)
        found.grown += sign * sum(lane.queued_sequences for lane in lanes)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _add(total: dict[str, float], name: str, value: float) -> None:
    total[name] = total.get(name, 0.0) + value
