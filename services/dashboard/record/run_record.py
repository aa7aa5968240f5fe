"""What the record of a run shows: series over its time, percentiles of hops, decisions in words, and the last event of
each kind, which is the state of a run that has ended. Pure: lines in.

The size is bounded for a run of any length. A line that does not decode is counted and passed over. A resumed trainer
takes steps again: both are in the series, at their times.
"""

import re
from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.schemas.statistics.histogram import Histogram
from rolloutmq.schemas.statistics.series import Fold, SeriesBook
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.dashboard.record.latencies import Latencies
from rolloutmq.services.dashboard.record.latency_parts import LatencyParts
from rolloutmq.services.dashboard.record.lines import (
    DAMAGE,
    DecisionLine,
    EvaluationLine,
    FindingLine,
    GpuLine,
    LatencyLine,
    PressureLine,
    StandingLine,
    StepLine,
    decoded,
)
from rolloutmq.services.monitor.profile.usage import Usage, UsageSums
from rolloutmq.services.monitor.report import history
from rolloutmq.services.monitor.report.waited import Waited, WaitedLives, Waiting

DECISIONS_KEPT: Final = 200
STEPS_KEPT: Final = 64
"""Last events of training that a view begins with."""
SUBJECTS_LIMIT: Final = 4096
"""Most subjects whose last event is kept, such as processes and GPUs; and most findings."""
TEXT_CHARS: Final = 2000
"""Longest text of a decision."""
HOP_KEYS: Final = 320
"""Most series of hops: the five of 64 environments."""
HOP_WINDOW_S: Final = 5.0
"""Time whose durations make one point of the percentiles of a hop."""
_DIGITS: Final = re.compile(r"[\d.]+")
_TRAINING: Final = frozenset({"step_done", "batch_settled", "step_figures"})
_LASTING: Final = frozenset(
    {
        "pressure",
        "host_sample",
        "process_sample",
        "gpu_sample",
        "gpu_standing",
        "gpu_absence",
        "engine_sample",
    }
    | {"curriculum", "evaluation_done", "scale_decision", "engine_decision"}
)
"""Kinds whose last event of each subject is a part of the state."""
_MEANS: Final = dict.fromkeys
SERIES: Final[Mapping[str, Mapping[str, Fold]]] = {
    "queue": {
        "rollout_pressure": Fold.MEAN,
        "rollout_pressure_low": Fold.LOW,
        "rollout_pressure_high": Fold.HIGH,
        **_MEANS(("queued_sequences", "ready", "workers", "produced_per_s", "consumed_per_s"), Fold.MEAN),
        **_MEANS(("trainer_wait", "blocked"), Fold.MEAN),
    },
    "steps": {
        "step": Fold.LAST,
        "reward": Fold.MEAN,
        "staleness_max": Fold.HIGH,
        "staleness_mean": Fold.MEAN,
        "tokens": Fold.SUM,
        "steps": Fold.SUM,
        "loss": Fold.MEAN,
    },
    "reward": {"step": Fold.LAST, "mean": Fold.MEAN, "low": Fold.LOW, "high": Fold.HIGH},
    "target": _MEANS(("target", "current"), Fold.LAST),
    "evaluation": _MEANS(("step", "mean", "greedy", "pass_1", "pass_k"), Fold.LAST),
    "wait": {"share": Fold.MEAN},
    "hop": {"p50_s": Fold.MEAN, "p99_s": Fold.HIGH, "count": Fold.SUM},
    "gpu": _MEANS(("utilisation_percent", "memory_used_bytes"), Fold.MEAN),
}
"""Columns of each series."""


class Recorded(NamedTuple):
    """An event of the record, and its wall clock."""

    at: float
    event: Event


class RunRecord:
    """Everything read from the record so far.

    Args:
        slots: Rollout slots of a worker, by environment.
    """

    def __init__(self, slots: Mapping[str, int] | None = None) -> None:
        self.series = SeriesBook(SERIES, more={"hop": HOP_KEYS})
        self.latencies = Latencies()
        self.latency_parts = LatencyParts()
        self.decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_KEPT)
        self.lines = 0
        self.damaged = 0
        """Lines that do not decode."""
        self._pressure: PressureLine | None = None
        self._lives = WaitedLives()
        self._use = UsageSums(slots or {})
        self._step = -1, -1
        self._targets: dict[str, tuple[int, str]] = {}
        self._cordons: dict[str, tuple[str, ...]] = {}
        self._windows: dict[str, tuple[float, Histogram, float]] = {}
        self._training: deque[tuple[int, bytes]] = deque(maxlen=STEPS_KEPT)
        self._last: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._findings: dict[tuple[str, str], tuple[int, bytes]] = {}

    def take(self, line: bytes) -> None:
        """Take one line of the record."""
        self.lines += 1
        try:
            found = decoded(line)
            if found.usage is not None:
                self._use.add(found.usage)
            self._take(found.kind, found.event, line)
        except (*DAMAGE, OverflowError):
            self.damaged += 1

    def _take(self, kind: str, event: Any, line: bytes) -> None:
        if kind in _TRAINING:
            self._training.append((self.lines, line))
        match event:
            case PressureLine():
                self._take_pressure(event)
            case StepLine():
                self._take_step(event)
            case DecisionLine():
                self._take_decision(event)
            case EvaluationLine():
                scores = msgspec.structs.asdict(event.all)
                values = {name: scores[name] for name in ("mean", "greedy", "pass_1", "pass_k")}
                self.series.add("evaluation", "", event.t, {**values, "step": event.version.step})
            case LatencyLine():
                self._take_latencies(event)
            case GpuLine():
                self.series.add("gpu", event.uuid, event.t, msgspec.structs.asdict(event))
            case StandingLine():
                self._take_standing(event)
            case FindingLine():
                self._take_finding(event, line)
        if kind in _LASTING:
            subject = kind, event.topic
            if subject in self._last or len(self._last) < SUBJECTS_LIMIT:
                self._last[subject] = self.lines, line

    def _take_pressure(self, line: PressureLine) -> None:
        states = {state: count for state, count in line.worker_states.items() if state != "gone"}
        values: dict[str, float | None] = {
            "rollout_pressure": line.rollout_pressure,
            "rollout_pressure_low": line.rollout_pressure,
            "rollout_pressure_high": line.rollout_pressure,
            "queued_sequences": line.queued_sequences,
            "produced_per_s": line.produced_per_s,
            "consumed_per_s": line.consumed_per_s,
            "ready": states.get("ready", 0),
            "workers": sum(states.values()),
        }
        before, self._pressure = self._pressure, line
        self._lives.take(line)
        if before is not None and before.epoch == line.epoch and (gap_s := line.t - before.t) > 0:
            waits = self._waits(before, line, gap_s)
            values["trainer_wait"] = _share(line.starved_s - before.starved_s, gap_s)
            values["blocked"] = min(1.0, sum(waits.values()))
        self.series.add("queue", "", line.t, values)

    def waited(self, present: Waiting) -> Waited:
        """Return the waits of all lives of the broker; `present` is its last word."""
        lives = self._lives.copy()
        lives.take(present)
        return lives.sum()

    def use(self) -> Usage:
        """Return how trainer and rollout slots used their time, see `UsageSums.usage`."""
        return self._use.usage()

    def set_slots(self, slots: Mapping[str, int]) -> None:
        """Set the rollout slots of a worker, by environment; for what is read from now on."""
        self._use.slots = slots

    def _waits(self, before: PressureLine, line: PressureLine, gap_s: float) -> dict[str, float]:
        """Add the part of the time that trainers and producers waited, by reason; return that of producers."""
        shares: dict[str, float] = {}
        for who, now, then, count in (
            ("trainer", line.trainer_waits_s, before.trainer_waits_s, 1),
            ("workers", line.producer_waits_s, before.producer_waits_s, line.producers),
        ):
            for reason, seconds in now.items():
                share = _share(seconds - then.get(reason, 0.0), gap_s * count)
                self.series.add("wait", f"{who}:{reason}", line.t, {"share": share})
                if who == "workers":
                    shares[reason] = share
        return shares

    def _take_step(self, line: StepLine) -> None:
        """Take a step; a second report of it, by the trainer or by the broker, only adds its loss."""
        if not line.stepped:
            return
        version = line.incarnation, line.step
        if version == self._step:
            if line.loss is not None:
                self.series.add("steps", "", line.t, {"loss": line.loss})
            return
        self._step = version
        values = {name: getattr(line, name) for name in SERIES["steps"] if name != "steps"}
        self.series.add("steps", "", line.t, {**values, "steps": 1.0})
        for one in line.scores:
            self.series.add(
                "reward", one.env, line.t, {"step": line.step, **msgspec.structs.asdict(one), "env": None}
            )

    def _take_decision(self, line: DecisionLine) -> None:
        """Take a decision. It is repeated every second: one that changes the target, or its reason, is told."""
        self.series.add("target", line.env, line.t, {"target": line.target, "current": line.current})
        told = line.target, _DIGITS.sub("", line.reason)
        before, self._targets[line.env] = self._targets.get(line.env), told
        if told == before or len(self._targets) > SUBJECTS_LIMIT:
            return
        what = "inference servers" if line.env == "inference" else "workers"
        change = f"{before[0]} to {line.target}" if before and before[0] != line.target else f"{line.target}"
        self._tell(line.t, line.env, f"{change} {what}: {line.reason}")

    def _take_latencies(self, line: LatencyLine) -> None:
        rows = line.counted
        self.latencies.add(rows, line.t)
        self.latency_parts.add(line)
        for row in rows:
            if row.hop.has_status:
                continue  # no curve is drawn of calls and requests, and their names would take the place of hops
            key = f"{row.hop}:{'eval:' if row.split is Split.EVAL else ''}{row.env}"
            began, durations, slowest_s = self._windows.get(key, (line.t, Histogram(), 0.0))
            durations, slowest_s = durations.merged(row.durations), max(slowest_s, row.slowest_s)
            if line.t - began >= HOP_WINDOW_S or line.t < began:
                values = {
                    "p50_s": durations.percentile_s(50, slowest_s) if durations.count else None,
                    "p99_s": durations.percentile_s(99, slowest_s) if durations.count else None,
                    "count": durations.count,
                }
                self.series.add("hop", key, line.t, values)
                began, durations, slowest_s = line.t, Histogram(), 0.0
            if key in self._windows or len(self._windows) < SUBJECTS_LIMIT:
                self._windows[key] = began, durations, slowest_s

    def _take_standing(self, line: StandingLine) -> None:
        before, self._cordons[line.uuid] = self._cordons.get(line.uuid, ()), line.causes
        if bool(before) != bool(line.causes) and len(self._cordons) <= SUBJECTS_LIMIT:
            what = f"cordoned: {line.reason}" if line.causes else "in use again"
            self._tell(line.t, "", f"GPU {line.uuid} {what}")

    def _take_finding(self, line: FindingLine, raw: bytes) -> None:
        subject = line.env, line.finding
        is_known = subject in self._findings
        if line.ended:
            self._findings.pop(subject, None)
            if is_known:
                self._tell(line.t, line.env, f"finding {line.finding} ended")
        elif is_known or len(self._findings) < SUBJECTS_LIMIT:
            self._findings[subject] = self.lines, raw
            if not is_known:
                self._tell(line.t, line.env, f"finding {line.finding}: {line.problem}")

    def _tell(self, t: float, env: str, text: str) -> None:
        self.decisions.append({"at": t, "env": env, "text": text[:TEXT_CHARS]})

    def training(self) -> list[history.Event]:
        """Return the last events of training, the findings, and the last points and curricula, in order."""
        shown = (self._last[key] for key in self._last if key[0] in {"curriculum", "evaluation_done"})
        lines = sorted(chain(self._training, self._findings.values(), shown))
        return [found for _, line in lines if (found := history.decoded(line)) is not None]

    def state(self) -> list[Recorded]:
        """Return the last event of each kind and subject, in order."""
        return [found for _, line in sorted(self._last.values()) if (found := _recorded(line)) is not None]


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else 0.0


def _recorded(line: bytes) -> Recorded | None:
    """Return the event of a line; None if it does not decode, for example because it was trimmed."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        t = float(fields.pop("t"))
        for name in ("topic", "trimmed", "worker_states"):
            fields.pop(name, None)
        return Recorded(t, msgspec.convert(fields, Event))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, ValueError):
        return None
