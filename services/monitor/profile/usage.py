"""Use of time: how long trainer, rollout slots and inference servers worked or waited, from `metrics.jsonl`.

The broker counts waits since its start, so the last event of each of its lives has the sums. Time with a trainer, and
the time of rollout slots, are summed from one recorded `pressure` to the next.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from rolloutmq.schemas.wire.control import WorkerState

GAP_S: Final = 10.0
"""Longest time between two events that counts; beyond it nothing was recorded, for example between two lives."""
INFERENCE_BOUND: Final = "inference_bound"


class WorkerLine(msgspec.Struct, frozen=True):
    """A worker in an event of the broker."""

    env: str = ""
    state: str = ""


class UsageLine(msgspec.Struct, frozen=True):
    """Fields of the events that tell of use: `pressure`, `engine_sample` and `scale_decision`."""

    t: float
    kind: str = ""
    epoch: int = 0
    trainers: int = 0
    starved_s: float = 0.0
    trainer_waits_s: dict[str, float] = {}
    producer_waits_s: dict[str, float] = {}
    blocked_s: dict[str, float] = {}
    workers: tuple[WorkerLine, ...] = ()
    name: str = ""
    busy: float = 0.0
    env: str = ""
    bound: str = ""
    want: float | None = None


@dataclass
class Usage:
    """Sums over a run.

    Attributes:
        trainer_s: Seconds with a trainer.
        starved_s: Seconds of these in which it was ready and had no batch.
        trainer_waits_s: Seconds of waits of all ranks, by reason.
        slot_s: Seconds of rollout slots of ready workers, by environment.
        blocked_s: Seconds of these in which a slot waited for credit or a submitted task, by environment.
        producer_waits_s: Seconds of waits of all producers, by reason.
        busy: Mean part of the time in which an inference server sampled, 0 to 1; None without servers of the run.
        inference_bound: Environments whose workers were held back by the servers in most decisions with a demand.
    """

    trainer_s: float = 0.0
    starved_s: float = 0.0
    trainer_waits_s: dict[str, float] = field(default_factory=dict)
    slot_s: dict[str, float] = field(default_factory=dict)
    blocked_s: dict[str, float] = field(default_factory=dict)
    producer_waits_s: dict[str, float] = field(default_factory=dict)
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


def read_usage(lines: Iterable[UsageLine], slots: Mapping[str, int]) -> Usage:
    """Sum the use of time over the events of a run.

    Args:
        lines: The recorded events, in order.
        slots: Rollout slots of a worker, by environment; of another environment a worker has one.
    """
    found = Usage()
    last: UsageLine | None = None
    lives: dict[int, UsageLine] = {}
    busy: list[float] = []
    bounds: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    for line in lines:
        match line.kind:
            case "pressure":
                if last is not None and 0.0 < line.t - last.t <= GAP_S:
                    _add(found, last, line.t - last.t, slots)
                last = lives[line.epoch] = line
            case "engine_sample" if last is not None and last.trainers:
                busy.append(line.busy)
            case "scale_decision" if line.want is not None:
                decisions[line.env] += 1
                bounds[line.env] += line.bound == INFERENCE_BOUND
    for end in lives.values():
        found.starved_s += end.starved_s
        _sum(found.trainer_waits_s, end.trainer_waits_s)
        _sum(found.blocked_s, end.blocked_s)
        _sum(found.producer_waits_s, end.producer_waits_s)
    found.busy = sum(busy) / len(busy) if busy else None
    found.inference_bound = frozenset(env for env in decisions if 2 * bounds[env] > decisions[env])
    return found


def _add(found: Usage, line: UsageLine, seconds: float, slots: Mapping[str, int]) -> None:
    """Add the time after an event, in which everybody was as the event says."""
    if line.trainers:
        found.trainer_s += seconds
    for worker in line.workers:
        if worker.state == WorkerState.READY:
            _sum(found.slot_s, {worker.env: seconds * slots.get(worker.env, 1)})


def _sum(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value
