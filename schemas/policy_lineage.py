"""The lineage of policies: their distance in optimizer steps across resumed trainers.

A trainer resumed at version (i, s) continues as incarnation j > i from step s. The distance between a policy of j
and one of i is the number of steps from each of them to that fork: lost steps after s count as well as new ones.
"""

from rolloutmq.schemas.wire.envelope import PolicyVersion


class PolicyLineage:
    """The fork of each incarnation."""

    def __init__(self) -> None:
        self.forks: dict[int, PolicyVersion] = {}
        """Version at which each incarnation resumed."""
        self.pending: PolicyVersion | None = None
        """Version of a resume whose new incarnation is not known yet."""

    def resumed(self, version: PolicyVersion) -> None:
        """Note the resume of a trainer at a version; its first pull shows the new incarnation."""
        self.pending = version

    def seen(self, version: PolicyVersion) -> None:
        """Note the policy version of a pull."""
        resumed = self.pending
        if resumed is not None and version.incarnation > resumed.incarnation:
            self.forks.setdefault(version.incarnation, resumed)
            self.pending = None

    def _fork(self, version: PolicyVersion) -> PolicyVersion | None:
        """Return the fork of a version's incarnation; the newest incarnation may still be pending."""
        fork = self.forks.get(version.incarnation, self.pending)
        return fork if fork is not None and fork.incarnation < version.incarnation else None

    def origin(self, version: PolicyVersion) -> PolicyVersion:
        """Return the oldest version number of a policy: up to its fork an incarnation shares those before it."""
        while (fork := self._fork(version)) is not None and version.step <= fork.step:
            version = PolicyVersion(fork.incarnation, version.step)
        return version

    def distance(self, policy: PolicyVersion, sampled: PolicyVersion) -> int:
        """Return the optimizer steps between two policies, along the forks between them."""
        steps = 0
        policy, sampled = self.origin(policy), self.origin(sampled)
        while policy.incarnation != sampled.incarnation:
            younger, other = max(policy, sampled), min(policy, sampled)
            fork = self._fork(younger)
            if fork is None:
                break
            steps += max(0, younger.step - fork.step)
            policy, sampled = self.origin(fork), other
        return steps + abs(policy.step - sampled.step)

    def staleness(self, policy: PolicyVersion, sampled: PolicyVersion) -> int:
        """Return by how many optimizer steps `policy` has moved on from the policy of a group.

        A group of a policy that descends from `policy` is not stale: its trainer only took up work again.
        """
        if (
            sampled.incarnation == policy.incarnation
        ):  # the way between them, across forks or not, is their steps
            return max(0, policy.step - sampled.step)
        return 0 if self._descends(sampled, policy) else self.distance(policy, sampled)

    def _descends(self, version: PolicyVersion, policy: PolicyVersion) -> bool:
        """Return whether a version is a policy or comes after it; incarnations of unknown fork come after all."""
        while version.incarnation > policy.incarnation:
            fork = self._fork(version)
            if fork is None:
                return True
            version = fork
        return version.incarnation == policy.incarnation and version.step >= policy.step

    def clear(self) -> None:
        self.forks.clear()
        self.pending = None
