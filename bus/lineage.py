"""How far apart two policies are, when a trainer has gone back to a checkpoint in between.

A trainer that resumes at version (i, s) goes on as incarnation j > i from step s. Between a policy of j and one of i
lie the steps from each of them to that fork: the steps after s that were lost count, and so do those taken since.
"""

from rolloutmq.schemas.envelope import PolicyVersion


class Lineage:
    """Where each incarnation began."""

    def __init__(self) -> None:
        self.forks: dict[int, PolicyVersion] = {}
        """The version that an incarnation resumed at."""
        self.pending: PolicyVersion | None = None
        """The version that an incarnation resumed at of which nothing is known yet."""

    def resumed(self, version: PolicyVersion) -> None:
        """Note that a trainer resumed at a version; its incarnation shows with its first pull."""
        self.pending = version

    def seen(self, version: PolicyVersion) -> None:
        """Note the policy of a trainer that pulls."""
        resumed = self.pending
        if resumed is not None and version.incarnation > resumed.incarnation:
            self.forks.setdefault(version.incarnation, resumed)
            self.pending = None

    def _fork(self, version: PolicyVersion) -> PolicyVersion | None:
        """Return where the incarnation of a version began; the youngest one may be about to show."""
        fork = self.forks.get(version.incarnation, self.pending)
        return fork if fork is not None and fork.incarnation < version.incarnation else None

    def origin(self, version: PolicyVersion) -> PolicyVersion:
        """Return the oldest name of a policy: up to its fork an incarnation has the policies of the one before."""
        while (fork := self._fork(version)) is not None and version.step <= fork.step:
            version = PolicyVersion(fork.incarnation, version.step)
        return version

    def distance(self, policy: PolicyVersion, sampled: PolicyVersion) -> int:
        """Return how many optimizer steps lie between two policies, by way of the forks between them."""
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

    def clear(self) -> None:
        self.forks.clear()
        self.pending = None
