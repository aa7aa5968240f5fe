"""Log of trained groups: `trained.jsonl`, one `SettledBatch` per line; and the ancestry of policies read from it.

The trainer writes a line before it settles. A trainer killed in between leaves a line without a settlement, never a
settlement without a line. Each line is appended with one write and survives the process; half a line, left by a crash
of the machine, is cut off when the next trainer opens the file.

`PolicyAncestry` knows which policies of earlier incarnations the current one descends from. A trainer that resumes
from a checkpoint takes the steps after it again. A step on the same groups, from the same policy, leads to the same
policy, and the fork between the two incarnations moves forward: groups of the earlier one keep their low staleness.
From the first step on other groups on, the steps of both incarnations count.

A killed trainer may have taken one step more than it logged: its weights were sampled from before the line was written.
The batch of that step was leased and is redelivered, so the repeated step is the same.

Equal groups lead to equal weights only with an equal configuration. Lines lost in a crash of the machine are unknown;
the staleness of such incarnations follows from their step numbers.
"""

import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from rolloutmq.bus.files import PRIVATE_DIRECTORY, decode_json, open_regular, private_fd
from rolloutmq.schemas.files import SettledBatch
from rolloutmq.schemas.policy_lineage import PolicyLineage
from rolloutmq.schemas.wire.envelope import PolicyVersion

logger = logging.getLogger(__name__)


_TAIL_BYTES: Final = 1 << 16


class TrainedLog:
    """The file, open for appending. Writing does not wait for the disk. One writer at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        self._fd = private_fd(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._cut_torn_line(path)

    def write(self, line: SettledBatch) -> None:
        """Append one line. The operating system has it on return."""
        data = memoryview(msgspec.json.encode(line) + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)

    def _cut_torn_line(self, path: Path) -> None:
        end = size = os.fstat(self._fd).st_size
        newline = -1
        while end and (newline := self._last_newline(end)) < 0:
            end = max(0, end - _TAIL_BYTES)
        whole = newline + 1
        if whole < size:
            logger.warning("torn line cut file=%s bytes=%d", path, size - whole)
            os.ftruncate(self._fd, whole)

    def _last_newline(self, end: int) -> int:
        """Return the position of the last newline before `end` if it is near, else -1."""
        start = max(0, end - _TAIL_BYTES)
        found = os.pread(self._fd, end - start, start).rfind(b"\n")
        return start + found if found >= 0 else -1


class PolicyAncestry(PolicyLineage):
    """The lineage of a trainer: its incarnations and their steps."""

    def __init__(self) -> None:
        super().__init__()
        self._reached: PolicyVersion | None = None
        """Newest known version of the current incarnation."""
        self._unsure: PolicyVersion | None = None
        """Step that the previous incarnation may have taken without a line."""
        self._taken: dict[int, tuple[PolicyVersion, int]] = {}
        """By step number: the policy it last led to, and a hash of its groups."""

    @classmethod
    def read(cls, journal: Path, version: PolicyVersion) -> Self:
        """Read the log of earlier incarnations, if any, and begin one that continues as `version`."""
        ancestry = cls()
        for line in _lines(journal):
            if line.resumed:
                ancestry.began(line.version)
            ancestry.took(line.version, line.trained)
        ancestry.began(version)
        return ancestry

    def began(self, version: PolicyVersion) -> None:
        """Record that an incarnation continues from a checkpoint, under its own version."""
        before, self._reached = self._reached, version
        if before is not None and before.incarnation < version.incarnation:
            self.forks[version.incarnation] = self.origin(PolicyVersion(before.incarnation, version.step))
            self._unsure = PolicyVersion(before.incarnation, before.step + 1)

    def took(self, version: PolicyVersion, groups: Collection[str]) -> None:
        """Record the step that led to a version, and its groups; without groups there was no step."""
        if not groups:
            return
        self._reached = version
        learned = hash(frozenset(groups))
        known, same = self._taken.get(version.step, (version, None))
        if learned == same and self._before(known) == self._before(version):
            self.forks[version.incarnation] = self.origin(known)
            return
        self._taken[version.step] = version, learned
        unsure = self._unsure
        if unsure and unsure.step == version.step and self._before(unsure) == self._before(version):
            self.forks[version.incarnation] = self.origin(unsure)

    def _before(self, version: PolicyVersion) -> PolicyVersion:
        return self.origin(PolicyVersion(version.incarnation, version.step - 1))


def _lines(journal: Path) -> Iterator[SettledBatch]:
    """Yield the readable lines; the last one may be incomplete."""
    if not journal.is_file():
        return
    with open_regular(journal) as file:
        for line in file:
            try:
                yield decode_json(line, SettledBatch)
            except msgspec.MsgspecError:
                continue
