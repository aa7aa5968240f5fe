"""The records of every group that the logs of a run name, in parts that fit into memory.

The logs of producers, trainer and broker name each group in an order of their own, so a join needs all records of a
group at once. Records of a long run are first written to temporary files by the hash of their group's id; each file is
a part, with all records of its groups. Temporary files take about as much room as the logs.
"""

import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import fsum, inf
from pathlib import Path
from sys import intern
from typing import Any, Final
from zlib import crc32

import msgspec

from rolloutmq.schemas.errors import UnusablePathError
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.report.settled_log import SettledIds, TrainerLog, scored
from rolloutmq.services.monitor.text.jsonl import read_lines

PART_BYTES: Final = 8 << 20
"""Bytes of the logs for each part."""
BUFFER_BYTES: Final = 32 << 10
"""Bytes of a part that are written at once."""
OUTCOMES: Final = ("trained", "filtered", "rejected")

ReadAny = Callable[[Path, type[Any]], Iterable[Any]]
"""Reads the lines of a log."""


class Acked(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A line of a producer's ack log."""

    producer: str
    group: AckedGroup


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A group of a settled batch.

    Attributes:
        outcome: One of `OUTCOMES`.
        is_void: A later resume voided the batch.
        step: Number of the step that it was pulled for, from 0; the last number may have no step yet.
        reward: Its mean score; None if the log has none.
    """

    group_id: str
    outcome: str
    is_void: bool
    step: int = 0
    reward: float | None = None


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A line of the broker's log of dropped groups."""

    group: DroppedGroup


Record = Acked | Settled | Dropped
KINDS: Final[frozenset[type[Record]]] = frozenset({Acked, Settled, Dropped})
NO_LOG: Final = TrainerLog((), (), ())
"""Log of a run without settled batches."""


@dataclass(slots=True)
class AckLog:
    """Ids of the groups that were acked to producers."""

    ids: set[str] = field(default_factory=set)
    evaluated: set[str] = field(default_factory=set)
    """Those of the groups for evaluation, which no trainer gets; `ids` does not have them."""
    since: set[str] = field(default_factory=set)
    """Those of `ids` that were acked after a running broker was read."""
    repeated: int = 0
    """Ids acked under two numbers: two groups of one name, or one group accepted twice."""
    env_of: dict[str, str] = field(default_factory=dict)
    """Environment of each group, without those of lines that name none."""


class EnvRewards:
    """Mean raw score of each step by environment, from the records of all parts: 8 bytes for each group.

    The sums are exact, so that the order of the parts changes nothing.
    """

    def __init__(self) -> None:
        self._scores: defaultdict[str, dict[int, array[float]]] = defaultdict(dict)

    def add(self, settled: Iterable[Settled], env_of: Mapping[str, str]) -> None:
        """Take settled groups; those without an environment are left out."""
        for one in settled:
            if one.reward is not None and not one.is_void and (env := env_of.get(one.group_id)):
                self._scores[env].setdefault(one.step, array("d")).append(one.reward)

    def courses(self, steps: int) -> dict[str, list[float]]:
        """Return the means of each environment, by step; steps without its groups are left out.

        Args:
            steps: Number of steps: later groups wait for one.
        """
        found = {
            env: [_exact_mean(scores) for step, scores in sorted(by_step.items()) if step < steps]
            for env, by_step in self._scores.items()
        }
        return {env: rewards for env, rewards in found.items() if rewards}


def _exact_mean(values: Sequence[float]) -> float:
    try:
        return fsum(values) / len(values)
    except OverflowError:  # of huge scores; a sum of floats is infinite then
        return sum(values) / len(values)


@dataclass(slots=True)
class GroupPart:
    """All records of some groups, each kind in the order of its logs.

    Attributes:
        number: Number of this part.
        parts: Number of all parts.
    """

    number: int = 0
    parts: int = 1
    acked: list[Acked] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)

    def has(self, group_id: str) -> bool:
        """Return whether the records of a group are in this part."""
        return _part_of(group_id, self.parts) == self.number

    def take(self, record: Record) -> None:
        """Add a record."""
        if isinstance(record, Acked):
            self.acked.append(record)
        elif isinstance(record, Settled):
            self.settled.append(record)
        else:
            self.dropped.append(record.group)

    def ids(self) -> SettledIds:
        """Return the ids of settled groups."""
        found = SettledIds(Counter(), set(), set(), set())
        for one in self.settled:
            if one.is_void:
                found.voided.add(one.group_id)
            elif one.outcome == "trained":
                found.trained[one.group_id] += 1
            else:
                (found.filtered if one.outcome == "filtered" else found.rejected).add(one.group_id)
        return found

    def acks(self, as_of: float = inf) -> AckLog:
        """Return the acked groups; `as_of` is when a running broker was read, wall-clock seconds."""
        numbers: dict[str, tuple[str, int, int]] = {}
        log = AckLog()
        for one in self.acked:
            line = one.group
            number = (one.producer, line.session, line.seq)
            if numbers.setdefault(line.group_id, number) != number:
                log.repeated += 1
            if line.env:
                log.env_of[line.group_id] = intern(line.env)
            if line.split is Split.EVAL:
                log.evaluated.add(line.group_id)
            elif line.at >= as_of:
                log.since.add(line.group_id)
        log.ids = numbers.keys() - log.evaluated
        return log


def _part_of(group_id: str, parts: int) -> int:
    return crc32(group_id.encode()) % parts if parts > 1 else 0


class GroupRecords:
    """All parts; iterate over them any number of times. See `group_records`."""

    def __init__(self, parts: int, directory: Path | None, only: GroupPart | None) -> None:
        self.parts = parts
        self._directory = directory
        self._only = only

    def __iter__(self) -> Iterator[GroupPart]:
        if self._only is not None:
            yield self._only
            return
        assert self._directory is not None
        decoder = msgspec.json.Decoder(Record)
        for number in range(self.parts):
            part = GroupPart(number, self.parts)
            path = self._directory / str(number)
            if path.exists():
                with path.open("rb") as file:
                    for line in file:
                        part.take(decoder.decode(line))
            yield part


@contextmanager
def group_records(
    layout: RunLayout, log: TrainerLog, read: ReadAny = read_lines, kinds: Collection[type[Record]] = KINDS
) -> Iterator[GroupRecords]:
    """Read the records of all groups, for the block. Blocks on the disk.

    Args:
        layout: Of the run; a missing log counts as empty.
        log: Its settled batches.
        read: Reads a log.
        kinds: Kinds of records that are read.

    Raises:
        DamagedFileError: A log is damaged, and `read` is strict.
        UnusablePathError: Temporary files cannot be written.
    """
    parts = 1 + _size(layout) // PART_BYTES
    records = _records(layout, log, read, kinds)
    if parts == 1:
        only = GroupPart()
        for _, record in records:
            only.take(record)
        yield GroupRecords(1, None, only)
        return
    with ExitStack() as stack:
        with _writable(tempfile.gettempdir):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolloutmq-")))
        _spill(records, parts, directory)
        yield GroupRecords(parts, directory, None)


def _size(layout: RunLayout) -> int:
    logs = (layout.trained, layout.settled, layout.dropped, *layout.acks.glob("*.jsonl"))
    return sum(path.stat().st_size for path in logs if path.exists())


def _records(
    layout: RunLayout, log: TrainerLog, read: ReadAny, kinds: Collection[type[Record]]
) -> Iterator[tuple[str, Record]]:
    """Yield each record with the id of its group."""
    for path in sorted(layout.acks.glob("*.jsonl")) if Acked in kinds else ():
        for line in read(path, AckedGroup):
            yield line.group_id, Acked(path.stem, line)
    if Settled in kinds:
        for step, _, batch in log.by_step():
            yield from _settled(batch, step)
        for batch in log.voided:
            yield from _settled(batch, None)
    for dropped in read(layout.dropped, DroppedGroup) if Dropped in kinds else ():
        yield dropped.group_id, Dropped(dropped)


def _settled(batch: SettledBatch, step: int | None) -> Iterator[tuple[str, Settled]]:
    """Yield the groups of a batch; of a void one without a step."""
    rewards = [reward for _, reward in scored(batch)]
    number = 0
    for outcome in OUTCOMES:
        for name in getattr(batch, outcome):
            reward = rewards[number] if number < len(rewards) else None
            yield name, Settled(name, outcome, step is None, step or 0, reward)
            number += 1


def _spill(records: Iterable[tuple[str, Record]], parts: int, directory: Path) -> None:
    """Write each record to the file of its part."""
    encode = msgspec.json.Encoder().encode
    buffers = [bytearray() for _ in range(parts)]
    for name, record in records:
        number = _part_of(name, parts)
        buffer = buffers[number]
        buffer += encode(record)
        buffer += b"\n"
        if len(buffer) > BUFFER_BYTES:
            _append(directory / str(number), buffer)
    for number, buffer in enumerate(buffers):
        _append(directory / str(number), buffer)


def _append(path: Path, buffer: bytearray) -> None:
    with _writable(lambda: path.parent), path.open("ab") as file:
        file.write(buffer)
    buffer.clear()


@contextmanager
def _writable(where: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        with suppress(OSError):  # there may be no temporary directory at all
            raise UnusablePathError(f"temporary directory {where()}", str(error)) from error
        raise UnusablePathError("temporary directory", str(error)) from error
