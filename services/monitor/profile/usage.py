"""Use of time: how long trainer, rollout slots and inference servers worked or waited, from `metrics.jsonl`.

The broker counts waits since its start, so the last event of each of its lives has the sums. Time with a trainer, and
the time of rollout slots, are summed from one recorded `pressure` to the next. Both begin with the first settled batch
of each life: before it workers start and weights load, and nothing of that says what limits the run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.schemas.wire.envelope import Split

GAP_S: Final = 10.0
"""Longest time between two events that counts; beyond it nothing was recorded, for example between two lives."""
INFERENCE_BOUND: Final = "inference_bound"


class WorkerLine(msgspec.Struct, frozen=True):
    """A worker in an event of the broker."""

    env: str = ""
    state: str = ""


class LaneLine(msgspec.Struct, frozen=True):
    """A lane in an event of the broker."""

    split: int = 0
    accepted_sequences: int = 0
    settled_sequences: int = 0


class UsageLine(msgspec.Struct, frozen=True):
    """Fields of the events that tell of use: `pressure`, `engine_sample` and `scale_decision`."""

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
        start_s: Seconds from the first event to the first settled batch, over all lives of the broker.
        trainer_s: Seconds with a trainer from then on, as all that follows.
        starved_s: Seconds of these in which it was ready and had no batch.
        trainer_waits_s: Seconds of waits of all ranks, by reason.
        slot_s: Seconds of rollout slots of ready workers, by environment.
        blocked_s: Seconds of these in which a slot waited for credit or a submitted task, by environment.
        producer_waits_s: Seconds of waits of all producers, by reason.
        made: Sequences for training that the broker accepted.
        taken: Sequences for training that were settled.
        busy: Mean part of the time in which an inference server sampled, 0 to 1; None without servers of the run.
        inference_bound: Environments whose workers were held back by the servers in most decisions with a demand.
    """

    start_s: float = 0.0
    trainer_s: float = 0.0
    starved_s: float = 0.0
    trainer_waits_s: dict[str, float] = field(default_factory=dict)
    slot_s: dict[str, float] = field(default_factory=dict)
    blocked_s: dict[str, float] = field(default_factory=dict)
    producer_waits_s: dict[str, float] = field(default_factory=dict)
    made: int = 0
    taken: int = 0
    busy: float | None = None
    inference_bound: frozenset[str] = frozenset()

    @property
    def starved(self) -> float:
        """Part of the trainer's time without a batch, 0 to 1."""
        return min(1.0, self.starved_s / self.trainer_s) if self.trainer_s else 0.0

    @property
    def blocked(self) -> float:
        """Part of the time of all rollout slots in which they waited, 0 to 1."""
        slot_s = sum(self.slot_s.values())
        return min(1.0, sum(self.blocked_s.values()) / slot_s) if slot_s else 0.0

    @property
    def queued(self) -> float:
        """Part of the sequences that nobody has taken, so that the queue grew by it, 0 to 1."""
        return max(0.0, 1.0 - self.taken / self.made) if self.made else 0.0


def read_usage(lines: Iterable[UsageLine], slots: Mapping[str, int]) -> Usage:
    """Sum the use of time over the events of a run.

    Args:
        lines: The recorded events, in order.
        slots: Rollout slots of a worker, by environment; of another environment a worker has one.
    """
    found = Usage()
    lives: dict[int, _Life] = {}
    busy: list[float] = []
    bounds: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    life: _Life | None = None
    for line in lines:
        match line.kind:
            case "pressure":
                life = lives.setdefault(line.epoch, _Life(line))
                life.add(line, found, slots)
            case "engine_sample" if life is not None and life.settled is not None:
                busy.append(line.busy)
            case "scale_decision" if line.want is not None:
                decisions[line.env] += 1
                bounds[line.env] += line.bound == INFERENCE_BOUND
    for one in lives.values():
        one.end(found)
    found.busy = sum(busy) / len(busy) if busy else None
    found.inference_bound = frozenset(env for env in decisions if 2 * bounds[env] > decisions[env])
    return found


class _Life:
    """The events of one life of the broker."""

    def __init__(self, first: UsageLine) -> None:
        self.settled: UsageLine | None = None
        """The first event after a settled batch."""
        self._last = first

    def add(self, line: UsageLine, found: Usage, slots: Mapping[str, int]) -> None:
        """Add the time since the event before, in which everybody was as that one says."""
        seconds, before = line.t - self._last.t, self._last
        self._last = line
        if self.settled is None:
            self.settled = line if line.settled_busy_s else None
            found.start_s += max(0.0, seconds)
        elif 0.0 < seconds <= GAP_S:
            found.trainer_s += seconds if before.trainers else 0.0
            for worker in before.workers:
                if worker.state == WorkerState.READY:
                    _add(found.slot_s, worker.env, seconds * slots.get(worker.env, 1))

    def end(self, found: Usage) -> None:
        """Add the waits since the first settled batch."""
        if (first := self.settled) is None:
            return
        found.starved_s += self._last.starved_s - first.starved_s
        for sign, line in ((1, self._last), (-1, first)):
            lanes = [lane for lane in line.lanes if lane.split == Split.TRAIN]
            found.made += sign * sum(lane.accepted_sequences for lane in lanes)
            found.taken += sign * sum(lane.settled_sequences for lane in lanes)
        for total, until, since in (
            (found.trainer_waits_s, self._last.trainer_waits_s, first.trainer_waits_s),
            (found.blocked_s, self._last.blocked_s, first.blocked_s),
            (found.producer_waits_s, self._last.producer_waits_s, first.producer_waits_s),
        ):
            for name, value in until.items():
                _add(total, name, value - since.get(name, 0.0))


def _add(total: dict[str, float], name: str, value: float) -> None:
    total[name] = total.get(name, 0.0) + value
