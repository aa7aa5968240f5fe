"""The settled batches of a run, from the log of its trainer, or else from that of the broker.

A line of a resume voids the earlier lines with a higher step. A long log is not kept in memory: one pass finds which
lines count, and whoever iterates over the batches reads it again. Lines that are added meanwhile are left out.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Final, overload

import numpy as np

from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.monitor.text.jsonl import read_lines, read_whole_lines

KEPT_BYTES: Final = 16 << 20
"""Longest log whose batches are kept in memory."""
STEP_MOST: Final = 2**62
"""Highest step that is told apart: a damaged line may have any."""

Read = Callable[[Path, type[SettledBatch]], Iterable[SettledBatch]]
"""Reads the lines of a log."""


class _Fate(IntEnum):
    """Whether a line counts."""

    SKIPPED = 0
    COUNTED = 1
    VOID = 2


class LoggedBatches(Sequence[SettledBatch]):
    """The batches of one fate in a log, read anew by each iteration. Blocks on the disk.

    Args:
        path: The log.
        fates: Fate of each line that decodes.
        fate: The wanted one.
    """

    def __init__(self, path: Path, fates: bytes, fate: _Fate) -> None:
        self._path = path
        self._fates = fates
        self._fate = fate

    def __len__(self) -> int:
        return self._fates.count(self._fate)

    def __iter__(self) -> Iterator[SettledBatch]:
        # The log may have grown since: the shorter one ends the loop.
        lines = read_whole_lines(self._path, SettledBatch, Counter())
        for fate, line in zip(self._fates, lines, strict=False):
            if fate == self._fate:
                yield line

    @overload
    def __getitem__(self, index: int) -> SettledBatch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[SettledBatch]: ...

    def __getitem__(self, index: int | slice) -> SettledBatch | Sequence[SettledBatch]:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return next(islice(self, numbers, None))
        wanted = frozenset(numbers)
        return [
            batch
            for number, batch in enumerate(islice(self, max(wanted, default=-1) + 1))
            if number in wanted
        ]


@dataclass(frozen=True, slots=True)
class SettledIds:
    """Ids of settled groups.

    Attributes:
        trained: How often each was trained.
        filtered, rejected: Groups without a step.
        voided: Every group of a voided batch.
    """

    trained: Counter[str]
    filtered: set[str]
    rejected: set[str]
    voided: set[str]


@dataclass(frozen=True, slots=True)
class TrainerLog:
    """Valid lines of `trained.jsonl`, or else of `settled.jsonl`: those no later `resumed` line voided.

    Attributes:
        batches: Valid batches, in order.
        voided: Void batches: the weights they led to are gone.
        resumed_at: Times at which a trainer resumed.
    """

    batches: Sequence[SettledBatch]
    voided: Sequence[SettledBatch]
    resumed_at: tuple[float, ...]

    def ids(self) -> SettledIds:
        """Return the ids of all groups: of a long log by parts only, see `GroupRecords`."""
        return SettledIds(
            Counter(name for batch in self.batches for name in batch.trained),
            {name for batch in self.batches for name in batch.filtered},
            {name for batch in self.batches for name in batch.rejected},
            {name for batch in self.voided for name in (*batch.trained, *batch.filtered, *batch.rejected)},
        )

    def rivals(self) -> dict[str, int]:
        """Return the last step of each consumer, if several took the same step of one policy; else nothing."""
        takers: defaultdict[PolicyVersion, set[str]] = defaultdict(set)
        for batch in self.batches:
            if batch.trained and batch.consumer:
                takers[batch.version].add(batch.consumer)
        if not any(len(names) > 1 for names in takers.values()):
            return {}
        last: dict[str, int] = {}
        for version in sorted(takers):
            last |= dict.fromkeys(sorted(takers[version]), version.step)
        return last

    def step_points(self) -> list[tuple[float, float]]:
        """Return time and mean raw score of each step, over all groups pulled for it.

        A batch without a step (all its groups filtered) belongs to the next step.
        """
        points: list[tuple[float, float]] = []
        pulled: list[float] = []
        for _, is_last, batch in self.by_step():
            pulled.extend(reward for _, reward in scored(batch))
            if is_last:
                points.append((batch.at, mean(pulled)))
                pulled = []
        return points

    def by_step(self) -> Iterator[tuple[int, bool, SettledBatch]]:
        """Yield each valid batch with the number of its step from 0, and whether it is the last batch of that step."""
        number = taken = 0
        for batch in self.batches:
            is_last = batch.version.step > taken
            yield number, is_last, batch
            if is_last:
                number, taken = number + 1, batch.version.step


def scored(batch: SettledBatch) -> Iterator[tuple[str, float]]:
    """Yield id and mean score of every group that was pulled with a batch."""
    return zip((*batch.trained, *batch.filtered), batch.rewards, strict=False)


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def read_settled(layout: RunLayout, read: Read = read_lines) -> TrainerLog:
    """Return the log of the trainer; if it wrote none, that of the broker. Blocks on the disk."""
    own = read_log(layout.trained, read)
    return own if own.batches or own.voided or own.resumed_at else read_log(layout.settled, read)


def read_log(path: Path, read: Read = read_lines) -> TrainerLog:
    """Return a log of settled batches; a long one is read anew by each iteration. Blocks on the disk."""
    if not path.exists() or path.stat().st_size <= KEPT_BYTES:
        return read_trainer_log(read(path, SettledBatch))
    fates, resumed_at = _fates(read(path, SettledBatch))
    counted, void = (LoggedBatches(path, fates, fate) for fate in (_Fate.COUNTED, _Fate.VOID))
    return TrainerLog(counted, void, resumed_at)


def read_trainer_log(lines: Iterable[SettledBatch]) -> TrainerLog:
    """Return the log of some lines in memory."""
    kept = list(lines)
    fates, resumed_at = _fates(kept)
    by_fate: dict[int, list[SettledBatch]] = {fate: [] for fate in _Fate}
    for fate, line in zip(fates, kept, strict=True):
        by_fate[fate].append(line)
    return TrainerLog(tuple(by_fate[_Fate.COUNTED]), tuple(by_fate[_Fate.VOID]), resumed_at)


def _fates(lines: Iterable[SettledBatch]) -> tuple[bytes, tuple[float, ...]]:
    """Return the fate of each line, and the times of resumes: each voids the earlier lines with a higher step."""
    fates, steps = bytearray(), array("q")
    resumed_at: list[float] = []
    for line in lines:
        step = min(line.version.step, STEP_MOST)
        if line.resumed:
            resumed_at.append(line.at)
            known = np.frombuffer(fates, np.uint8)
            known[(known == _Fate.COUNTED) & (np.frombuffer(steps, np.int64) > step)] = _Fate.VOID
            del known  # it holds the buffer, which could not grow
        is_batch = not line.resumed or bool(line.trained or line.filtered or line.rejected)
        fates.append(_Fate.COUNTED if is_batch else _Fate.SKIPPED)
        steps.append(step)
    return bytes(fates), tuple(resumed_at)
