"""Which policies of earlier lives the present one descends from, as the journal tells it.

A life that resumes at a checkpoint takes the steps after it again. Where it learns from the same groups, from the same
policy, it comes to the same policy, and the fork between it and the life before moves on with it: groups that the one
before sampled are then as fresh as they were. From the first step that learns from other groups on, the steps that the
life before took since count, and so do those of the present one.

A life that was killed may have taken one step more than it wrote down: its weights were there to be sampled from, and
the line was not yet. The batch of that step was under a lease and comes again, so the step is the same when it does.

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
        self._reached: PolicyVersion | None = None
        """How far the youngest life is known to have come."""
        self._unsure: PolicyVersion | None = None
        """The step that the life before it may have taken without a line."""
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
        before, self._reached = self._reached, version
        if before is not None and before.incarnation < version.incarnation:
            self.forks[version.incarnation] = self.origin(PolicyVersion(before.incarnation, version.step))
            self._unsure = PolicyVersion(before.incarnation, before.step + 1)

    def took(self, version: PolicyVersion, groups: Collection[str]) -> None:
        """Note the step that led to a version, and the groups that it learned from; without any it was none."""
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
    """Yield the lines that can be read; the last one may be half a line, or be written this moment."""
    if not journal.is_file():
        return
    with journal.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=SettledBatch)
            except msgspec.MsgspecError:
                continue
