"""The scores of a point, from the answers to its tasks. Pure.

    pass@k of a task with n sampled answers of which c pass:  1 - C(n - c, k) / C(n, k)

This is the unbiased estimator of the probability that at least one of k answers passes (Chen et al. 2021, Evaluating
Large Language Models Trained on Code, arXiv:2107.03374, equation 1). The plain estimate 1 - (1 - c/n)^k is biased.

A task is *answered* if every answer asked for is there, else it is *failed* (a worker gave up) or *missing*. Its other
answers count nevertheless, and pass@k leaves out a task with fewer than k sampled answers: each figure is a mean over
the tasks that have it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, inf, isfinite, prod, sqrt
from typing import Final

from rolloutmq.bus.evaluation.plan import PlannedTask
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.evaluation import EnvironmentScores


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, see above; computed as a product, without large binomials.

    Args:
        n: Sampled answers, at least `k`.
        c: Those that pass, at most `n`.
        k: Answers to choose, at least 1.

    Raises:
        ValueError: The numbers contradict each other.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k: needs 0 <= c <= n and 1 <= k <= n (got n={n}, c={c}, k={k})")
    # C(n-c, k) / C(n, k) = prod over i = n-c+1..n of (i - k) / i, and 0 if fewer than k answers fail.
    return 1.0 if n - c < k else 1.0 - prod((i - k) / i for i in range(n - c + 1, n + 1))


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of at least two values, from their standard deviation with n - 1."""
    if len(values) < 2:
        return None
    largest = max(map(abs, values))
    if not 0 < largest < inf:
        return 0.0 if largest == 0 else None
    scaled = [value / largest for value in values]  # of no square an overflow
    mean = fsum(scaled) / len(scaled)
    variance = fsum((value - mean) ** 2 for value in scaled) / (len(scaled) - 1)
    return _finite(largest * sqrt(variance / len(scaled)))


@dataclass(slots=True)
class TaskAnswers:
    """The answers to one task of the set.

    Attributes:
        wanted: Answers asked for, greedy and sampled.
        greedy: Scores of the greedy answers; usually one.
        sampled: Scores of the sampled answers.
        failed: A worker gave up one of its groups.
        pass_score: Least score of an answer that passes.
    """

    pass_score: float
    wanted: tuple[int, int] = (0, 0)
    greedy: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def is_whole(self) -> bool:
        return len(self.greedy) >= self.wanted[0] and len(self.sampled) >= self.wanted[1]

    def passing(self, scores: Sequence[float]) -> int:
        """Return how many of some answers to it pass."""
        return sum(score >= self.pass_score for score in scores)


NO_OTHERS: Final[Mapping[str, float]] = {}


class PointScores:
    """Collects the answers to the tasks of one point.

    Args:
        tasks: The plan.
        pass_score: Least score of an answer that passes.
        by_env: The same of environments with another one.

    Attributes:
        rollouts, sequences, tokens: Groups that answered, their sequences and tokens.
        oldest, newest: Oldest and newest policy of those groups; None before the first.
        started_at: Start of the first rollout, wall clock; None before the first answer.
    """

    def __init__(
        self, tasks: Iterable[PlannedTask], pass_score: float, by_env: Mapping[str, float] = NO_OTHERS
    ) -> None:
        self._left: dict[str, PlannedTask] = {}
        self._of: defaultdict[str, dict[int, TaskAnswers]] = defaultdict(dict)
        for task in tasks:
            self._left[task.id] = task
            own = TaskAnswers(by_env.get(task.env, pass_score))
            answers = self._of[task.env].setdefault(task.index, own)
            greedy, sampled = answers.wanted
            answers.wanted = (greedy + task.size, sampled) if task.greedy else (greedy, sampled + task.size)
        self.k = max((one.wanted[1] for own in self._of.values() for one in own.values()), default=0)
        self.rollouts = self.sequences = self.tokens = 0
        self.oldest: PolicyVersion | None = None
        self.newest: PolicyVersion | None = None
        self.started_at: float | None = None

    @property
    def left(self) -> int:
        """Submitted tasks without an outcome."""
        return len(self._left)

    def expects(self, task_id: str) -> bool:
        """Return whether a task is of this point and has no outcome yet."""
        return task_id in self._left

    def answer(
        self,
        task_id: str,
        scores: Sequence[float],
        tokens: int,
        oldest: PolicyVersion,
        newest: PolicyVersion,
        started_at: float = 0.0,
    ) -> bool:
        """Add the scores of the group that answered a task; False if the task is not expected, or no longer."""
        task = self._left.pop(task_id, None)
        if task is None:
            return False
        answers = self._of[task.env][task.index]
        (answers.greedy if task.greedy else answers.sampled).extend(scores)
        self.rollouts += 1
        self.sequences += len(scores)
        self.tokens += tokens
        self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
        self.newest = newest if self.newest is None else max(self.newest, newest)
        if started_at:
            self.started_at = min(started_at, self.started_at or started_at)
        return True

    def give_up(self, task_id: str) -> None:
        """Note that a worker gave up a task."""
        task = self._left.pop(task_id, None)
        if task is not None:
            self._of[task.env][task.index].failed = True

    def lose(self, task_id: str) -> None:
        """Note that no answer to a task will come."""
        self._left.pop(task_id, None)

    def of_environments(self) -> dict[str, EnvironmentScores]:
        """Return the scores of each environment."""
        return {env: self._scores(list(own.values())) for env, own in self._of.items()}

    def of_all(self) -> EnvironmentScores:
        """Return the scores over all environments; each task has the same weight."""
        return self._scores([one for own in self._of.values() for one in own.values()])

    def _scores(self, tasks: Sequence[TaskAnswers]) -> EnvironmentScores:
        whole = sum(one.is_whole for one in tasks)
        failed = sum(one.failed and not one.is_whole for one in tasks)
        greedy = [one for one in tasks if one.greedy]
        sampled = [one for one in tasks if one.sampled]
        means = [_mean_of(one.sampled) for one in sampled]
        enough = [one for one in sampled if len(one.sampled) >= self.k] if self.k else []
        return EnvironmentScores(
            tasks=len(tasks),
            answered=whole,
            failed=failed,
            missing=len(tasks) - whole - failed,
            greedy=_mean([_mean_of(one.greedy) for one in greedy]),
            greedy_pass=_mean([one.passing(one.greedy) / len(one.greedy) for one in greedy]),
            mean=_mean(means),
            mean_error=standard_error(means),
            pass_1=_mean([one.passing(one.sampled) / len(one.sampled) for one in sampled]),
            pass_k=_mean([pass_at_k(len(one.sampled), one.passing(one.sampled), self.k) for one in enough]),
            k=self.k,
        )


def _mean(values: Sequence[float]) -> float | None:
    return _finite(_mean_of(values)) if values else None


def _mean_of(values: Sequence[float]) -> float:
    """Return the mean of at least one value; it is between them, so it does not overflow."""
    return fsum(value / len(values) for value in values)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
