"""The metrics of the endpoint: name, type, labels and help of each. A family that is not listed here is not exposed.

Names follow the conventions of Prometheus: base units, `_total` for counters, `_ratio` for parts of 1. A metric that
the gateway has too has the same name and labels here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIX: Final = "rolloutmq_"


class Kind(StrEnum):
    """Type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric.

    Attributes:
        name: Full name of its samples, `_total` included; of a histogram the common part.
        kind: Type.
        says: Help text.
        labels: Names of its labels.
    """

    name: str
    kind: Kind
    says: str
    labels: tuple[str, ...]


def _specs(kind: Kind, rows: Iterable[tuple[str, str, str]]) -> Iterator[Spec]:
    end = "_total" if kind is Kind.COUNTER else ""
    for name, labels, says in rows:
        yield Spec(f"{PREFIX}{name}{end}", kind, says, tuple(labels.split()))


_GAUGES: Final = (
    # The broker.
    ("up", "", "1 while the broker is heard."),
    ("run_info", "run", "Always 1; names the run."),
    ("policy_step", "", "Step of the newest policy."),
    ("rollout_pressure", "", "Queued sequences over the sequences of one batch."),
    ("batch_sequences", "", "Sequences of one batch."),
    ("held_bytes", "", "Queued bytes."),
    ("leased_bytes", "", "Leased bytes."),
    ("granted_bytes", "", "Bytes granted to producers and not arrived yet."),
    ("high_bytes", "", "Global high-water mark in bytes."),
    ("staleness_max_steps", "", "Largest staleness of a delivered group."),
    ("groups", "state", "Accepted groups by state."),
    ("tasks", "state", "Submitted tasks by state."),
    ("trainers", "", "Registered trainers with a recent heartbeat."),
    ("untrained_seconds", "", "Time since a trainer was heard; 0 while one is connected."),
    ("environments", "", "Environments with a queue."),
    ("queued_groups", "env split", "Queued groups."),
    ("queued_sequences", "env split", "Queued sequences."),
    ("leased_groups", "env split", "Groups in leases."),
    ("granted_rollouts", "env split", "Rollouts granted to producers and not arrived yet."),
    ("producers", "env split", "Connected producers."),
    ("waiting_producers", "env split", "Producers that wait for credit."),
    ("oldest_seconds", "env split", "Age of the oldest queued group."),
    ("reward_mean", "env split", "Mean raw score of the accepted groups."),
    ("reward_deviation", "env split", "Deviation of the raw scores."),
    # Workers and scaling.
    ("workers", "env state", "Workers by the state of their last heartbeat; silent without one for 3 s."),
    ("worker_rollouts", "worker env", "Rollouts in progress."),
    ("worker_silent_seconds", "worker env", "Time since the last heartbeat."),
    ("workers_current", "env", "Workers that count towards the target."),
    ("workers_target", "env", "Target number of workers."),
    ("engines_current", "", "Engines that count towards the target."),
    ("engines_target", "", "Target number of engines."),
    ("engines_busy", "", "Load of all ready engines, added up."),
    # Training.
    ("batch_reward", "", "Mean score of the last batch."),
    ("batch_env_reward", "env", "Mean score of the environment in its last batch."),
    ("batch_staleness_max_steps", "", "Largest staleness of a group of the last batch."),
    ("batch_staleness_mean_steps", "", "Mean staleness of the groups of the last batch."),
    ("training_loss", "", "Loss of the last step."),
    ("figure", "name", "Last value of a figure that the trainer logged."),
    ("evaluation_step", "", "Step of the policy of the last evaluation."),
    ("evaluation_score", "env score", "Score of the last evaluation; `_all` is over all environments."),
    ("curriculum_level", "env", "Recent mean level of the tasks."),
    ("curriculum_levels", "env", "Levels of the task space."),
    ("curriculum_success_ratio", "env", "Recent success rate."),
    ("curriculum_flat_ratio", "env", "Recent part of groups with equal scores."),
    ("finding", "env finding", "1 while a finding about rewards or trainer holds."),
    # Machines.
    ("host_cpus", "host", "Processor cores."),
    ("host_cpu_ratio", "host", "Use of all cores, 0 to 1."),
    ("host_load1", "host", "Load average over a minute."),
    ("host_memory_used_bytes", "host", "Used memory."),
    ("host_memory_total_bytes", "host", "Memory."),
    ("host_shm_free_bytes", "host", "Free shared memory."),
    ("host_disk_free_bytes", "host", "Free space on the disk of the run."),
    ("process_cpu_cores", "process", "Processor cores in use; 1 is one full core."),
    ("process_resident_memory_bytes", "process", "Resident memory."),
    ("gpu_info", "gpu host name index", "Always 1; describes the GPU."),
    ("gpu_up", "gpu", "1 while the driver reaches the GPU."),
    ("gpu_utilization_ratio", "gpu", "Part of the time with a running kernel."),
    ("gpu_memory_used_bytes", "gpu", "Used memory."),
    ("gpu_memory_total_bytes", "gpu", "Memory."),
    ("gpu_temperature_celsius", "gpu", "Temperature."),
    ("gpu_margin_celsius", "gpu", "Degrees below the temperature at which the GPU slows down."),
    ("gpu_xids", "gpu", "Distinct critical errors of the driver."),
    ("gpu_cordoned", "gpu", "1 while the GPU takes no new workers."),
    ("gpu_draining", "gpu", "1 while the workers of the GPU are drained."),
    ("gpu_workers", "gpu", "Workers on the GPU."),
    ("gpu_promised_bytes", "gpu", "Memory reserved for workers that are still loading."),
    ("gpu_ghost_bytes", "gpu", "Used memory that belongs to no worker of this run."),
    ("engine_requests", "engine", "Requests without an answer yet."),
    ("engine_busy_ratio", "engine", "Part of the last seconds with generation."),
    ("engine_draining", "engine", "1 while the engine takes no new requests."),
    # Latency.
    ("hop_clock_error_seconds", "hop env split", "Bound of the error between the two clocks of a hop."),
    ("process_gpu_info", "process gpu host", "Always 1; the GPUs of a process that measures latency."),
    # Telemetry.
    ("telemetry_merged_names", "label", "Names beyond the limit of a label, counted under `_other`."),
)

_COUNTERS: Final = (
    # The broker: since its start.
    ("accepted_groups", "env split", "Accepted groups."),
    ("accepted_sequences", "env split", "Accepted sequences."),
    ("settled_sequences", "env split", "Sequences trained, filtered or rejected."),
    ("trainer_wait_seconds", "reason", "Time trainers waited, by reason."),
    ("producer_wait_seconds", "reason", "Time producers waited, by reason."),
    ("trainer_starved_seconds", "", "Time in which a ready trainer had no batch."),
    ("blocked_seconds", "env", "Time that rollout slots waited for credit."),
    ("completions", "env", "Completions that the rollouts got from the policy."),
    ("completion_tokens", "env", "Sampled tokens of the completions."),
    ("late_members", "env", "Sequences left out of groups at a deadline."),
    ("worker_groups", "worker env", "Finished groups."),
    ("worker_abandoned_rollouts", "worker env", "Rollouts that raised, timed out or returned nothing."),
    ("worker_blocked_seconds", "worker env", "Time that rollout slots waited for credit or a task."),
    ("gpu_ecc_uncorrected_errors", "gpu", "Uncorrected memory errors since the driver was loaded."),
    # Telemetry: since its start.
    ("batches", "outcome", "Settled training batches, with a step or without a signal."),
    ("settled_groups", "outcome", "Groups of settled batches: trained, filtered or rejected."),
    ("settled_tokens", "", "Tokens of settled batches."),
    ("trainer_pull_seconds", "", "Time the trainer waited for its batches, as it reports."),
    ("trainer_step_seconds", "", "Time of the trainer's steps, as it reports."),
    ("evaluation_points", "", "Finished evaluations."),
    ("evaluation_seconds", "", "Time of the evaluations."),
    ("curriculum_outcomes", "env", "Groups that answered tasks of the curriculum."),
    ("curriculum_failed", "env", "Tasks of the curriculum whose every delivery failed."),
    ("scale_decisions", "env", "Decisions that changed the target number of workers."),
    ("hop_tokens", "hop env split", "Tokens of the groups that passed a hop."),
    ("call_tokens", "env engine status", "Tokens that calls sampled."),
    ("worker_finished_rollouts", "worker env", "Rollouts that the worker measured."),
    ("worker_rollout_seconds", "worker env", "Time of the rollouts that the worker measured."),
    ("latency_dropped_rows", "process", "Rows of latency that a process had no room for."),
    ("telemetry_events", "kind", "Events heard."),
    ("telemetry_malformed_events", "", "Events that failed to decode."),
    ("telemetry_lost_events", "", "Events that could not be written to metrics.jsonl."),
    ("export_points", "sink", "Points that a sink took; for `otel` traces."),
    ("export_dropped_points", "sink", "Points that a sink was too slow for, or that it refused."),
)

_HISTOGRAMS: Final = (
    ("hop_duration_seconds", "hop env split", "Duration of a part of the way of groups."),
    ("call_duration_seconds", "env engine status", "Duration of the calls of workers to inference servers."),
    ("http_request_duration_seconds", "process route status", "Duration of requests to an HTTP server."),
)

CATALOGUE: Final = {
    spec.name: spec
    for kind, rows in ((Kind.GAUGE, _GAUGES), (Kind.COUNTER, _COUNTERS), (Kind.HISTOGRAM, _HISTOGRAMS))
    for spec in _specs(kind, rows)
}
"""All metrics by their full name."""
