"""Metrics of training: batches, steps, figures, evaluations, curricula, findings, and decisions about scaling. Pure."""

from collections import Counter
from collections.abc import Mapping
from math import isfinite

from rolloutmq.schemas.wire.control import ScaleDecision, StepDone
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.telemetry import CurriculumProgress, EngineDecision
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.telemetry.export.label_bound import OTHER
from rolloutmq.services.telemetry.export.prometheus.bounds import Bounds
from rolloutmq.services.telemetry.export.prometheus.families import Families
from rolloutmq.services.telemetry.export.prometheus.latest import Latest

ALL: str = "_all"
"""Label of the scores over all environments."""

TrainingEvent = (
    BatchSettled
    | StepDone
    | StepFigures
    | EvaluationDone
    | CurriculumProgress
    | HealthFinding
    | ScaleDecision
    | EngineDecision
)


class TrainingMetrics:
    """Metrics of the events of training. Its own counters begin with it."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._sums: dict[str, float] = {"trainer_pull_seconds_total": 0.0, "trainer_step_seconds_total": 0.0}
        self._settled: BatchSettled | None = None
        self._step: StepDone | None = None
        self._evaluation: EvaluationDone | None = None
        self._engines: EngineDecision | None = None
        self._targets: dict[str, int] = {}
        self._rewards = Latest[float](bounds.env)
        self._figures = Latest[float](bounds.name)
        self._curricula = Latest[CurriculumProgress](bounds.env)
        self._decisions = Latest[ScaleDecision](bounds.env)
        self._findings: dict[tuple[str, str], None] = {}

    def feed(self, event: TrainingEvent, now: float) -> None:
        """Take an event."""
        match event:
            case BatchSettled():
                self._settle(event, now)
            case StepDone():
                self._step = event
                self._sum("trainer_pull_seconds_total", event.pull_s)
                self._sum("trainer_step_seconds_total", event.step_s)
                self._figure(event.extra, now)
            case StepFigures():
                self._figure(event.figures, now)
            case EvaluationDone():
                self._evaluation = event
                self._counts["evaluation_points_total",] += 1
                self._sum("evaluation_seconds_total", event.seconds)
            case CurriculumProgress():
                self._curricula.put(event.env, event, now)
            case HealthFinding():
                self._find(event, now)
            case ScaleDecision():
                self._decide(event, now)
            case EngineDecision():
                self._engines = event

    def tell(self, families: Families, now: float) -> None:
        """Add the metrics."""
        for (name, *labels), count in self._counts.items():
            if name != "scale_decisions_total" or self._bounds.env.holds(labels[0]):
                families.add(name, count, *labels)
        for name, seconds in self._sums.items():
            families.add(name, seconds)
        self._tell_batch(families, now)
        if self._evaluation is not None:
            self._tell_evaluation(families, self._evaluation, now)
        for env, progress in self._curricula.items(now):
            _tell_curriculum(families, env, progress)
        for env, finding in self._findings:
            families.add("finding", 1, env, finding)
        for env, decision in self._decisions.items(now):
            families.add("workers_current", decision.current, env)
            families.add("workers_target", decision.target, env)
        if self._engines is not None:
            families.add("engines_current", self._engines.current)
            families.add("engines_target", self._engines.target)
            families.add("engines_busy", self._engines.busy)

    def _settle(self, event: BatchSettled, now: float) -> None:
        self._counts["batches_total", "step" if event.stepped else "without_signal"] += 1
        self._counts["settled_tokens_total",] += event.tokens
        for outcome in ("trained", "filtered", "rejected"):
            self._counts["settled_groups_total", outcome] += getattr(event, outcome)
        for scores in event.scores:
            self._rewards.put(scores.env, scores.mean, now)
        self._settled = event

    def _find(self, event: HealthFinding, now: float) -> None:
        key = (self._bounds.env.label(event.env, now), self._bounds.finding.label(event.finding, now))
        if OTHER in key:
            return
        if event.ended:
            self._findings.pop(key, None)
        else:
            self._findings[key] = None

    def _decide(self, event: ScaleDecision, now: float) -> None:
        env = self._bounds.env.label(event.env, now)
        if env != OTHER:
            before = self._targets.get(env)
            self._counts["scale_decisions_total", env] += before is not None and before != event.target
            self._targets[env] = event.target
        self._decisions.put(event.env, event, now)

    def _sum(self, name: str, seconds: float) -> None:
        """Add a duration as a process reports it: a counter must neither fall nor become infinite."""
        if isfinite(seconds) and seconds > 0:
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    def _figure(self, figures: Mapping[str, float], now: float) -> None:
        for name, value in figures.items():
            self._figures.put(name, value, now)

    def _tell_batch(self, families: Families, now: float) -> None:
        if (settled := self._settled) is not None:
            families.add("batch_reward", settled.reward)
            families.add("batch_staleness_max_steps", settled.staleness_max)
            families.add("batch_staleness_mean_steps", settled.staleness_mean)
        for env, reward in self._rewards.items(now):
            families.add("batch_env_reward", reward, env)
        if self._step is not None:
            families.add("training_loss", self._step.loss)
        for name, value in self._figures.items(now):
            families.add("figure", value, name)

    def _tell_evaluation(self, families: Families, done: EvaluationDone, now: float) -> None:
        families.add("evaluation_step", done.version.step)
        _tell_scores(families, ALL, done.all)
        for env, scores in done.environments.items():
            if (label := self._bounds.env.label(env, now)) != OTHER:
                _tell_scores(families, label, scores)


def _tell_scores(families: Families, env: str, scores: EnvironmentScores) -> None:
    for name in ("greedy", "mean", "pass_1", "pass_k"):
        families.add("evaluation_score", getattr(scores, name), env, name)


def _tell_curriculum(families: Families, env: str, progress: CurriculumProgress) -> None:
    families.add("curriculum_level", progress.level, env)
    families.add("curriculum_levels", progress.levels, env)
    families.add("curriculum_success_ratio", progress.success, env)
    families.add("curriculum_flat_ratio", progress.flat_share, env)
    families.add("curriculum_outcomes_total", progress.outcomes, env)
    families.add("curriculum_failed_total", progress.failed, env)
