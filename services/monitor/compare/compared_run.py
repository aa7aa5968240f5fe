"""One run of a comparison: its figures and its courses, read from its directory.

What cannot be read costs its own figures: each is None then, and a note says why. The other figures and the other runs
stay.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.bus.rundir import read_lives
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import DamagedFileError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life, paused_s
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import LatencySample
from rolloutmq.services.monitor.liveness import Fate, RunLiveness
from rolloutmq.services.monitor.profile.usage import UsageLine, part_of_run, read_usage
from rolloutmq.services.monitor.report.figure_course import WINDOW_STEPS
from rolloutmq.services.monitor.report.group_records import EnvRewards, group_records
from rolloutmq.services.monitor.report.history import ran_s
from rolloutmq.services.monitor.report.latencies import LatencyKey, LatencySums, Percentiles
from rolloutmq.services.monitor.report.settled_log import TrainerLog, mean, read_settled
from rolloutmq.services.monitor.text.jsonl import read_whole_lines

RATE_PARTS: Final = 100
"""Windows of the throughput over a run."""
LEAST_RATE_S: Final = 5.0
"""Shortest window of the throughput."""
LATENCY: Final = b'"kind":"latency_sample"'
COUNTS: Final = (
    *("steps", "wall_s", "tokens", "steps_per_s"),
    *("groups_accepted", "groups_trained", "groups_filtered", "groups_expired", "groups_dead", "groups_lost"),
    *("staleness_max", "staleness_bound"),
)
"""Figures of the summary that a comparison shows."""


class Course(NamedTuple):
    """Rewards of an environment: means at the first, the last and the best steps.

    Each is a mean over as many consecutive steps: a quarter of all, at most `WINDOW_STEPS`.
    """

    first: float
    last: float
    best: float


class Points(NamedTuple):
    """A series: steps, seconds that the run had run, and values."""

    steps: Sequence[int] = ()
    times: Sequence[float] = ()
    values: Sequence[float] = ()


class ComparedRun(NamedTuple):
    """Figures and courses of one run; None where nothing is known.

    Attributes:
        run_dir: Its directory, as it was named.
        config: Its configuration.
        fate: How it ended, or that it goes on.
        counts: Figures of its summary, by the names of `COUNTS`.
        evaluation: Scores of the first and of the last point of the evaluation.
        rewards: Course of the rewards of each environment.
        starved_of_run: Part of the whole run in which the trainer was ready and had no batch, 0 to 1.
        starved: The same part of the trainer's time from the first settled batch.
        blocked: Part of the time of the rollout slots from then on in which they waited, 0 to 1.
        latencies: Percentiles of the hops of the groups of training, by environment and hop.
        reward, throughput, staleness: Courses of the picture: mean score, groups settled a second, mean staleness.
        notes: What a reader must know of the figures.
    """

    run_dir: Path
    config: RunConfig
    fate: Fate
    counts: Mapping[str, float | None]
    evaluation: tuple[float | None, float | None]
    rewards: Mapping[str, Course]
    starved_of_run: float | None
    starved: float | None
    blocked: float | None
    latencies: Mapping[LatencyKey, Percentiles]
    reward: Points
    throughput: Points
    staleness: Points
    notes: tuple[str, ...]

    def per_s(self, name: str) -> float | None:
        """Return a count of the run by its seconds."""
        count, wall_s = self.counts.get(name), self.counts.get("wall_s")
        return None if count is None or not wall_s else count / wall_s


def compared(
    run_dir: Path,
    config: RunConfig,
    fate: Fate,
    summary: Mapping[str, Any] | None,
    problem: str = "",
    *,
    damaged_lines: int = 0,
) -> ComparedRun:
    """Read a run for a comparison. Blocks on the disk: seconds for a long run.

    Args:
        run_dir: Its directory.
        config: Its configuration.
        fate: How it ended, or that it goes on.
        summary: Its summary; None if there is none.
        problem: Why there is none.
        damaged_lines: Lines of `metrics.jsonl` that do not decode.
    """
    layout = RunLayout(run_dir)
    damaged = Counter({layout.metrics.name: damaged_lines})
    notes = ["goes on: these are its figures so far"] if fate.life is RunLiveness.LIVING else []
    notes += [fate.told] if fate.life is RunLiveness.DEAD else []
    notes += [problem] if problem else []
    read = partial(read_whole_lines, damaged=damaged)
    slots = {name: env.concurrency for name, env in config.environment.items()}
    usage = read_usage(read_whole_lines(layout.metrics, UsageLine, Counter()), slots)
    log = read_settled(layout, read)
    lives = read_lives(layout)
    rewards = _rewards(layout, log, notes)
    latencies = _latencies(layout.metrics)
    notes += [
        f"{count:,} line{'s' * (count != 1)} of {name} damaged, left out"
        for name, count in damaged.items()
        if count
    ]
    if usage.is_unrecorded and not log.batches:
        notes.append("nothing was recorded")
    return ComparedRun(
        run_dir,
        config,
        fate,
        {name: _number((summary or {}).get(name)) for name in COUNTS},
        _evaluation(summary or {}),
        rewards,
        None if usage.is_unrecorded else part_of_run(usage.run_starved_s, ran_s(layout, time.time())),
        usage.starved if usage.trainer_s else None,
        usage.blocked if usage.slot_s else None,
        latencies,
        _reward_points(log, lives),
        _throughput(log, lives),
        _staleness(log, lives),
        tuple(notes),
    )


def course(rewards: Sequence[float]) -> Course:
    """Return first, last and best mean of some rewards; there must be one."""
    window = max(1, min(WINDOW_STEPS, len(rewards) // 4))
    total = sum(rewards[:window])
    sums = [total]
    for left, entered in zip(rewards, rewards[window:], strict=False):
        total += entered - left
        sums.append(total)
    return Course(sums[0] / window, sums[-1] / window, max(sums) / window)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _evaluation(summary: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the scores of the first and the last point: of the greedy answers, or else of the sampled ones."""
    found = summary.get("evaluation")
    points = [found.get(name) for name in ("first", "last")] if isinstance(found, Mapping) else []
    scores = [
        _number(point.get("mean") if point.get("greedy") is None else point["greedy"])
        for point in points
        if isinstance(point, Mapping)
    ]
    return (scores[0], scores[1]) if len(scores) == 2 else (None, None)


def _rewards(layout: RunLayout, log: TrainerLog, notes: list[str]) -> dict[str, Course]:
    """Return the course of each environment; of all together, named `all`, where nothing tells them apart."""
    try:
        by_env = _by_env(layout, log)
    except DamagedFileError as error:
        notes.append(f"rewards of all environments together: {error}")
        by_env = {}
    if not by_env and (points := log.step_points()):
        by_env = {"all": [reward for _, reward in points]}
    return {env: course(rewards) for env, rewards in sorted(by_env.items()) if rewards}


def _by_env(layout: RunLayout, log: TrainerLog) -> dict[str, list[float]]:
    """Return the mean score of each step by environment. DamagedFileError: a log of producers or drops is damaged."""
    rewards = EnvRewards()
    with group_records(layout, log) as records:
        for part in records:
            rewards.add(part.settled, part.acks().env_of)
    return rewards.courses(len(log.step_points()))


def _latencies(path: Path) -> dict[LatencyKey, Percentiles]:
    sums = LatencySums()
    for line in read_whole_lines(path, msgspec.Raw, Counter(), LATENCY):
        if (sample := _sample(bytes(line))) is not None:
            sums.add(sample)
    return {key: one for key, one in sums.percentiles().items() if key.split is Split.TRAIN}


def _sample(line: bytes) -> LatencySample | None:
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        for name in ("t", "topic", "trimmed"):
            fields.pop(name, None)
        return msgspec.convert(fields, LatencySample)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _ran_s(at: float, start: float, lives: Sequence[Life]) -> float:
    """Return the seconds that the run had run at a time, without those between its lives."""
    return max(0.0, at - start - paused_s(lives, start, at))


def _start(log: TrainerLog, lives: Sequence[Life]) -> float:
    return lives[0].began if lives else min((batch.at for batch in log.batches), default=0.0)


def _reward_points(log: TrainerLog, lives: Sequence[Life]) -> Points:
    points, start = log.step_points(), _start(log, lives)
    times = [_ran_s(at, start, lives) for at, _ in points]
    return Points(range(1, len(points) + 1), times, [reward for _, reward in points])


def _staleness(log: TrainerLog, lives: Sequence[Life]) -> Points:
    start = _start(log, lives)
    points = [
        (batch.version.step, _ran_s(batch.at, start, lives), mean(batch.staleness))
        for batch in log.batches
        if batch.staleness
    ]
    return Points(*map(list, zip(*points, strict=True))) if points else Points()


def _throughput(log: TrainerLog, lives: Sequence[Life]) -> Points:
    """Return the groups settled a second, in windows of equal time."""
    start = _start(log, lives)
    batches = sorted(
        (_ran_s(one.at, start, lives), one.version.step, len(one.trained) + len(one.filtered))
        for one in log.batches
    )
    if len(batches) < 2:
        return Points()
    end = batches[-1][0]
    parts = max(1, min(RATE_PARTS, int(end / LEAST_RATE_S)))
    edges = [end * number / parts for number in range(parts + 1)]
    steps: list[int] = []
    values: list[float] = []
    at = 0
    for since, until in pairwise(edges):
        groups, step = 0, steps[-1] if steps else 0
        while at < len(batches) and batches[at][0] <= until:
            step, groups = max(step, batches[at][1]), groups + batches[at][2]
            at += 1
        steps.append(step)
        values.append(groups / (until - since) if until > since else 0.0)
    return Points(steps, edges[1:], values)
