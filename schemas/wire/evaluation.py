"""Evaluation: the scores of one point, as an event and as a line of `evaluations.jsonl`."""

import msgspec

from rolloutmq.schemas.wire.envelope import Count, Message, Name, PolicyVersion, Seconds


class EnvironmentScores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scores of one environment at one point, or of all of them. A figure over nothing is None.

    Attributes:
        tasks: Tasks asked.
        answered: Tasks with every answer asked for.
        failed: Tasks of which a worker gave up an answer, after every delivery failed.
        missing: Tasks of which an answer did not come before the end of the point.
        greedy: Mean score of the greedy answers.
        mean: Mean score of the sampled answers: the mean over tasks of each task's mean.
        mean_error: Standard error of `mean` over tasks: the standard deviation of the tasks' means, divided by the
            square root of their number. It covers the choice of tasks and the sampling.
        pass_1: Mean over tasks of the part of the sampled answers that pass.
        pass_k: Mean over tasks of the unbiased estimate of pass@k.
        k: The k of `pass_k`: sampled answers to each task.
        greedy_pass: Part of the greedy answers that pass.
    """

    tasks: Count = 0
    answered: Count = 0
    failed: Count = 0
    missing: Count = 0
    greedy: float | None = None
    mean: float | None = None
    mean_error: float | None = None
    pass_1: float | None = None
    pass_k: float | None = None
    k: Count = 0
    greedy_pass: float | None = None


class EvaluationDone(Message, tag="evaluation_done", frozen=True, kw_only=True):
    """One point of the evaluation; published on `telemetry.evaluation.<run>`.

    Attributes:
        run: Name of the run.
        id: Id of the point, the first part of the ids of its tasks.
        at: Its end, wall clock.
        version: Policy that was asked to be evaluated.
        oldest: Oldest policy that answered.
        newest: Newest policy that answered.
        all: Scores over all environments together, each task with the same weight.
        environments: Scores of each environment.
        rollouts: Groups that answered.
        sequences: Sequences of those groups.
        tokens: Their tokens, prompts included.
        seconds: Time from the first task to the last answer.
        total_s: Time of all points of the run so far, this one included.
        share: Part of the run's time that `total_s` is; None without the run's own trainer. Without a launcher, both
            count the present trainer process.
        waited: The trainer waited for this point, at one end of the run.
        why: Why the point ended early, or empty.
        seed: Seed of the tasks.
    """

    run: Name
    id: str
    at: Seconds
    version: PolicyVersion
    oldest: PolicyVersion
    newest: PolicyVersion
    all: EnvironmentScores
    environments: dict[str, EnvironmentScores]
    rollouts: Count = 0
    sequences: Count = 0
    tokens: Count = 0
    seconds: Seconds = 0.0
    total_s: Seconds = 0.0
    share: float | None = None
    waited: bool = False
    why: str = ""
    seed: Count = 0

    @property
    def one_policy(self) -> bool:
        """Whether one single policy gave all answers: the one asked for."""
        return self.rollouts > 0 and self.oldest == self.newest == self.version
