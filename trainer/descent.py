"""Which policies of earlier lives the present one descends from, as the journal tells it.

A life that resumes at a checkpoint takes the steps after it again. Where it learns from the same groups, from the same
policy, it comes to the same policy, and the fork between it and the life before moves on with it: groups that the one
before sampled are then as fresh as they were. From the first step that learns from other groups on, the steps that the
life before took since count, and so do those of the present one.

That the same groups lead to the same weights takes the same configuration. What a journal lost with its machine is not
known; such lives are measured by the numbers of their steps.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Self

import msgspec

from rolloutmq.bus.lineage import Lineage
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.records import SettledBatch


class Descent(Lineage):
    """The lineage of a trainer: each life that began, and each step that was taken."""

    def __init__(self) -> None:
        super().__init__()
        self._life: int | None = None
        """The youngest that is known."""
        self._taken: dict[int, tuple[PolicyVersion, int]] = {}
        """By number of the step: the policy that it led to last, and what it learned from, hashed."""

    @classmethod
    def told(cls, journal: Path, version: PolicyVersion) -> Self:
        """Read what earlier lives wrote, if anything, and begin one that goes on as `version`."""
        descent = cls()
        for line in _lines(journal):
            if line.resumed:
                descent.began(line.version)
            descent.took(line.version, line.trained)
        descent.began(version)
        return descent

    def began(self, version: PolicyVersion) -> None:
        """Note that a life goes on from a checkpoint of those before it, under a version of its own."""
        if self._life is not None and self._life < version.incarnation:
            self.forks[version.incarnation] = self.origin(PolicyVersion(self._life, version.step))
        self._life = version.incarnation

    def took(self, version: PolicyVersion, groups: Collection[str]) -> None:
        """Note the step that led to a version, and the groups that it learned from; without any it was none."""
        if not groups:
            return
        self._life = version.incarnation
        learned = hash(frozenset(groups))
        known, same = self._taken.get(version.step, (version, None))
        if learned == same and self._before(known) == self._before(version):
            self.forks[version.incarnation] = self.origin(known)
        else:
            self._taken[version.step] = version, learned

    def _before(self, version: PolicyVersion) -> PolicyVersion:
        return self.origin(PolicyVersion(version.incarnation, version.step - 1))


def _lines(journal: Path) -> Iterator[SettledBatch]:
    """Yield the lines that can be read; the last one may be half a line, or be written this moment."""
    if not journal.is_file():
        return
    with journal.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=SettledBatch)
            except msgspec.MsgspecError:
                continue
