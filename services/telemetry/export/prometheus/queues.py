"""Metrics of the broker's newest state: queues, ledger, waits, workers. Pure.

Counters of the broker begin with its life. They are passed on as they are, so a restart of telemetry does not show in
them. Those of environments beyond the bound add up in `_other`, and stay there when one of these leaves: the sum of a
counter must not fall.
"""

from collections import Counter
from typing import Final

from rolloutmq.schemas.wire.control import LaneStatus, Pressure, WorkerStatus
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.telemetry.export.label_bound import OTHER, LabelBound
from rolloutmq.services.telemetry.export.prometheus.bounds import Bounds
from rolloutmq.services.telemetry.export.prometheus.families import Families

STATES: Final = (
    *("accepted", "queued", "leased", "trained", "committed"),
    *("filtered", "expired", "dead", "discarded"),
)
TASK_STATES: Final = ("queued", "leased", "done", "failed", "expired", "cancelled")
SILENT_S: Final = 5.0
"""Silence after which the broker counts as away; it is heard several times a second."""

_LANE_COUNTERS: Final = {
    "accepted_groups_total": "accepted_groups",
    "accepted_sequences_total": "accepted_sequences",
    "settled_sequences_total": "settled_sequences",
}
_LANE_GAUGES: Final = {
    "queued_groups": "queued_groups",
    "queued_sequences": "queued_sequences",
    "leased_groups": "leased_groups",
    "granted_rollouts": "granted",
    "producers": "producers",
    "waiting_producers": "waiting",
}
_WORKER_COUNTERS: Final = {
    "worker_groups_total": "produced",
    "worker_abandoned_rollouts_total": "abandoned",
    "worker_blocked_seconds_total": "blocked_s",
}


class _Departed:
    """Last counts of names beyond the bound that are gone, added up in the life of one broker."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}
        self._gone: Counter[str] = Counter()

    def clear(self) -> None:
        self._last.clear()
        self._gone.clear()

    def seen(self, now_there: dict[str, dict[str, float]]) -> None:
        """Take the counts of the names beyond the bound that are there now."""
        for key, counts in self._last.items():
            if key not in now_there:
                self._gone.update(counts)
        self._last = now_there

    @property
    def sums(self) -> Counter[str]:
        """Counts of those that are gone, by metric."""
        return self._gone


class QueueMetrics:
    """Metrics of `pressure`.

    Args:
        bounds: Bounds of the labels.
        run: Name of the run.
    """

    def __init__(self, bounds: Bounds, run: str) -> None:
        self._bounds = bounds
        self._run = run
        self._pressure: Pressure | None = None
        self._heard_at = 0.0
        self._gone: dict[Split, _Departed] = {split: _Departed() for split in Split}
        self._gone_workers = _Departed()

    def feed(self, event: Pressure, now: float) -> None:
        """Take the newest state."""
        if self._pressure is None or event.epoch != self._pressure.epoch:
            for departed in (*self._gone.values(), self._gone_workers):
                departed.clear()
        self._pressure, self._heard_at = event, now

    def tell(self, families: Families, now: float) -> None:
        """Add the metrics."""
        pressure = self._pressure
        families.add("run_info", 1, self._run)
        families.add("up", float(pressure is not None and now - self._heard_at < SILENT_S))
        if pressure is None:
            return
        _tell_run(families, pressure)
        self._tell_waits(families, pressure, now)
        self._tell_lanes(families, pressure, now)
        self._tell_workers(families, pressure, now)

    def _tell_waits(self, families: Families, pressure: Pressure, now: float) -> None:
        for name, waits in (
            ("trainer_wait_seconds_total", pressure.trainer_waits_s),
            ("producer_wait_seconds_total", pressure.producer_waits_s),
        ):
            for why, seconds in waits.items():
                families.add(name, seconds, self._bounds.reason.label(why, now))
        for name, counts in (
            ("blocked_seconds_total", pressure.blocked_s),
            ("completions_total", pressure.completions),
            ("completion_tokens_total", pressure.completion_tokens),
            ("late_members_total", pressure.late_members),
        ):
            for env, count in counts.items():
                families.add(name, count, self._bounds.env.label(env, now))

    def _tell_lanes(self, families: Families, pressure: Pressure, now: float) -> None:
        beyond: dict[Split, dict[str, dict[str, float]]] = {split: {} for split in Split}
        for lane in pressure.lanes:
            env, split = self._bounds.env.label(lane.env, now), lane.split.name.lower()
            for name, field in _LANE_GAUGES.items():
                families.add(name, getattr(lane, field), env, split)
            families.most("oldest_seconds", lane.oldest_age_s, env, split)
            families.own("reward_mean", lane.reward_mean, env, split)
            families.own("reward_deviation", lane.reward_deviation, env, split)
            counts = _counts(lane, _LANE_COUNTERS)
            if env == OTHER:
                beyond[lane.split][lane.env] = counts
            for name, count in counts.items():
                families.add(name, count, env, split)
        for split_, departed in self._gone.items():
            departed.seen(beyond[split_])
            for name, count in departed.sums.items():
                families.add(name, count, OTHER, split_.name.lower())

    def _tell_workers(self, families: Families, pressure: Pressure, now: float) -> None:
        beyond: dict[str, dict[str, float]] = {}
        for worker in pressure.workers:
            env = self._bounds.env.label(worker.env, now)
            families.add("workers", 1, env, worker.counts_as)
            name = self._bounds.worker.label(worker.worker, now)
            where = (OTHER, OTHER) if name == OTHER else (name, env)
            families.add("worker_rollouts", worker.in_hand, *where)
            families.most("worker_silent_seconds", worker.silent_s, *where)
            counts = _counts(worker, _WORKER_COUNTERS)
            if name == OTHER:
                beyond[worker.worker] = counts
            for metric, count in counts.items():
                families.add(metric, count, *where)
        self._gone_workers.seen(beyond)
        for metric, count in self._gone_workers.sums.items():
            families.add(metric, count, OTHER, OTHER)


def _counts(source: LaneStatus | WorkerStatus, fields: dict[str, str]) -> dict[str, float]:
    return {name: float(getattr(source, field)) for name, field in fields.items()}


def _tell_run(families: Families, pressure: Pressure) -> None:
    families.add("policy_step", pressure.step)
    families.add("rollout_pressure", pressure.rollout_pressure)
    families.add("batch_sequences", pressure.batch_sequences)
    families.add("held_bytes", pressure.queued_bytes)
    families.add("leased_bytes", pressure.leased_bytes)
    families.add("granted_bytes", pressure.granted_bytes)
    families.add("high_bytes", pressure.high_bytes)
    families.add("staleness_max_steps", pressure.staleness_max)
    families.add("trainers", pressure.trainers)
    families.add("untrained_seconds", pressure.untrained_s)
    families.add("trainer_starved_seconds_total", pressure.starved_s)
    families.add("environments", len({lane.env for lane in pressure.lanes}))
    for state in STATES:
        families.add("groups", getattr(pressure.ledger, state), state)
    for state in TASK_STATES:
        families.add("tasks", getattr(pressure.tasks, state), state)


def tell_merged(families: Families, label: str, bound: LabelBound) -> None:
    """Add how many names of a label share `_other`."""
    families.add("telemetry_merged_names", bound.merged, label)
