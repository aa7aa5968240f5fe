"""`[orchestrator]`, `[cluster]` and `[hardware]`: autoscaling, supervision, the hosts and the GPUs of workers."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from rolloutmq.schemas.config.base import MIB, PROCESSES_LIMIT, Fraction, Section

END_S: Final = 30.0
"""Time for rollouts at the end of a run, unless configured."""
LEASE_LEAST_S: Final = 5.0
"""Shortest lease: a host hears of its run every two seconds."""
DELIVERY_S: Final = 10.0
"""Time to deliver the last groups of a drain, beyond that of the rollouts."""


class ScalingConfig(Section):
    """`[orchestrator.scaling]`: parameters of the autoscaler.

    `docs/guides/autoscaling.md` describes the control law; `rolloutmq simulate --set orchestrator.scaling.KEY=VALUE`
    shows the effect of other values.
    """

    setpoint_batches: PositiveFloat = 1.5
    """Target length of the queue, in batches: the trainer takes one while workers produce the next."""
    refill_s: PositiveFloat = 60.0
    """Time in which the autoscaler refills the queue. It takes longer where workers or rollouts take longer."""
    integral_s: PositiveFloat = 240.0
    """Time constant of the integral term; it corrects small errors of the measured rates."""
    derivative_s: NonNegativeFloat = 0.0
    """Look-ahead of the derivative term: the autoscaler extrapolates the queue by this time. 0: off, because the queue
    jumps with every batch."""
    derivative_filter_s: PositiveFloat = 15.0
    """Time constant of the filter on the rate of change of the queue; it should cover several batches."""
    trim_part: Fraction = 0.05
    """Bound of the integral term, as a fraction of the wanted number of workers, but at least one worker."""
    band_part: Fraction = 0.1
    """Dead band below the target, as a fraction of it, but at least one worker. Rates are not measured more exactly."""
    confirm_up_s: NonNegativeFloat = 1.0
    """The autoscaler scales up once all pressure messages over this time agree: a single one may show a late batch."""
    confirm_down_s: NonNegativeFloat = 2.0
    """The autoscaler scales down once all pressure messages over this time agree: to keep a worker is cheaper than to
    start one."""
    down_window_s: NonNegativeFloat = 60.0
    """The autoscaler scales down only below the peak demand over this time, or over one start of a worker if that is
    longer. Raise it for trainers with long pauses."""
    up_factor: Annotated[float, Field(gt=1.0)] = 2.0
    """Largest growth of the target within `up_every_s`, as a factor."""
    up_least: PositiveInt = 4
    """Workers that may start within `up_every_s` in any case."""
    up_every_s: PositiveFloat = 5.0
    """Time between two steps up. Workers started at once compete for disk and driver."""
    down_part: Fraction = 0.5
    """Smallest fraction of the target left by one step down."""
    stale_s: PositiveFloat = 3.0
    """The autoscaler ignores pressure messages older than this; by then a dozen are missing."""


class OrchestratorConfig(Section):
    """`[orchestrator]`: the number of workers, and their supervision."""

    enabled: bool = True
    """Start and supervise workers with the run. Off: you start workers yourself."""
    start_workers: bool = True
    """Start the workers that the autoscaler wants, on this host or its cluster. Off: it only decides, and whoever
    starts workers elsewhere follows the metric `rolloutmq_workers_target`, such as KEDA in Kubernetes. Programs,
    `max_processes` and `cluster.engine = "ray"` need it on."""
    tick_s: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Time between two decisions. Rates are measured over one tick, so it must be short."""
    scaling: ScalingConfig = ScalingConfig.default()
    """Parameters of the autoscaler."""
    max_processes: Annotated[int, Field(ge=0, le=PROCESSES_LIMIT)] = 0
    """Most worker processes of all environments, divided so that their deliveries keep their weights. 0: only the
    limits of each environment."""
    backoff_s: PositiveFloat = 0.5
    """Pause before the first restart of a crashed process. It doubles with each crash, with jitter."""
    backoff_max_s: PositiveFloat = 30.0
    """Longest pause before a restart."""
    crash_limit: PositiveInt = 5
    """Crashes in a row, without `stable_s` of uptime in between, after which a process is not restarted."""
    stable_s: PositiveFloat = 10.0
    """Uptime after which a crash no longer counts as a failed start; of a worker, time since it was ready."""
    drain_deadline_s: PositiveFloat | None = None
    """Time for a draining worker to finish its rollouts; what is unfinished then is abandoned. None: as long as a
    rollout may take, `environment.NAME.rollout_timeout_s`, and 10 s to deliver. A shorter time is warned about."""
    end_deadline_s: PositiveFloat | None = None
    """The same at the end of a run, when all workers drain. None: `drain_deadline_s`; 30 s without one."""
    term_grace_s: PositiveFloat = 5.0
    """Time between SIGTERM and SIGKILL."""

    def drain_s(self, rollout_timeout_s: float) -> float:
        """Return the seconds of a drain, for workers whose rollouts may take this long."""
        if self.drain_deadline_s is not None:
            return self.drain_deadline_s
        return rollout_timeout_s + DELIVERY_S

    @property
    def end_s(self) -> float:
        """Seconds of a drain at the end of the run."""
        return self.end_deadline_s or self.drain_deadline_s or END_S


class ClusterConfig(Section):
    """`[cluster]`: workers and further engines run on this host, or where a cluster finds room.

    `docs/clusters.md` describes a run on Ray.
    """

    engine: Literal["local", "ray"] = "local"
    """`local`: this host runs all workers. `ray`: each worker is an actor, also one that is a program
    (`command`), and Ray chooses its node. It asks for `worker_cpus` and `environment.NAME.gpus`. Needs the extra
    `ray`."""
    address: str = ""
    """Address of the cluster, such as `10.0.0.1:6379`. Empty: the cluster of this host."""
    worker_cpus: NonNegativeFloat = 1.0
    """CPUs that the cluster reserves for each worker."""
    place_engines: bool = True
    """The cluster also runs the engines beyond the first, each with a relay of the weights. The run then has the
    weights backend `stream`, and needs the extra `cluster`. False: this host runs all engines."""
    engine_cpus: NonNegativeFloat = 1.0
    """CPUs for each engine beyond the first, with its relay, on the cluster."""
    engine_gpus: NonNegativeFloat = 0.0
    """GPUs for each engine beyond the first on the cluster; a part of one, such as 0.5, is allowed."""
    reserve_cpus: NonNegativeFloat = 0.0
    """CPUs of this host that the cluster keeps for the run's own processes here, such as the trainer. 0: none."""
    reserve_gpus: NonNegativeFloat = 0.0
    """GPUs of this host that the cluster keeps for the trainer and the first engine. They see these alone, by
    `CUDA_VISIBLE_DEVICES`."""
    placement_timeout_s: PositiveFloat = 60.0
    """Longest wait of a process for a node. After it the process counts as crashed, and the reason names the missing
    resources."""
    autoscale: bool = True
    """Ask Ray's autoscaler for room for the workers and engines that the run wants. A cluster keeps one such request:
    of two runs the last one counts."""
    lease_s: Annotated[float, Field(ge=LEASE_LEAST_S)] = 60.0
    """After this silence of the run a node ends its processes."""
    host: str = ""
    """Address of this host for the nodes of the cluster. Empty: the one that Ray uses."""

    @property
    def reserves(self) -> bool:
        """Whether the cluster keeps something of this host."""
        return self.engine != "local" and self.reserve_cpus + self.reserve_gpus > 0.0

    @field_validator("engine_gpus", "reserve_gpus")
    @classmethod
    def _part_or_whole(cls, gpus: float) -> float:
        if gpus > 1.0 and not gpus.is_integer():
            raise ValueError(f"must be a part of one GPU, or a whole number (got {gpus:g})")
        return gpus


class HardwareConfig(Section):
    """`[hardware]`: the GPUs for workers, and the rules for cordoning one: a cordoned GPU takes no new workers.

    There are no temperature limits: every GPU reports its margin to its own slow-down temperature.
    """

    use: tuple[str, ...] = ()
    """UUIDs, or prefixes of UUIDs, of the GPUs for workers. Empty: all visible GPUs."""
    stale_s: PositiveFloat = 5.0
    """Age after which a GPU sample is ignored. Without a fresh sample a GPU takes no worker, and every measured
    duration restarts."""
    hot_window: PositiveInt = 5
    """Number of recent samples for `hot_samples` and `busy_percent`. A single sample at the limit is harmless."""
    hot_samples: PositiveInt = 3
    """A GPU is hot if it slowed down for its temperature in this many of the last `hot_window` samples."""
    hot_margin_s: NonNegativeFloat = 10.0
    """A GPU is also hot after this time without margin to its slow-down temperature."""
    cool_margin_c: NonNegativeFloat = 5.0
    """Margin in degrees Celsius of a hot GPU to count as cool. With less, the next worker heats it again."""
    clean_s: PositiveFloat = 60.0
    """The cordon ends after this time without a sign of its cause."""
    relapse_s: PositiveFloat = 600.0
    """A cordon within this time after the previous one doubles the clean time it needs. Each such time without a cordon
    halves it again."""
    hold_off_max_s: PositiveFloat = 3600.0
    """Longest clean time of a cordoned GPU."""
    drain_hot_s: PositiveFloat = 300.0
    """The orchestrator drains the workers of a GPU that stays hot this long: the cordon alone has not cooled it."""
    breaker: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Largest fraction of the GPUs, but at least one, that is cordoned for heat. If more are hot, the room is hot."""
    full_percent: Annotated[float, Field(gt=0.0, le=100.0)] = 95.0
    """A GPU takes no worker while this much of its memory is in use."""
    busy_percent: Annotated[float, Field(gt=0.0)] = 98.0
    """A GPU takes no worker while its utilisation over `hot_window` samples is this high. Above 100: no limit."""
    settle_bytes: PositiveInt = 256 * MIB
    """The used memory of a GPU counts as settled when two samples differ by at most this or `settle_part`."""
    settle_part: Fraction = 0.02
    """Like `settle_bytes`, as a fraction of the GPU's memory."""
    settle_s: PositiveFloat = 2.0
    """Longest wait for settled memory after a process ended. Drivers take tens to hundreds of milliseconds."""
    loading_s: PositiveFloat = 120.0
    """Longest reservation of memory for a worker that is ready but has not allocated it. It may need less."""
    ghost_s: PositiveFloat = 30.0
    """The orchestrator reports memory still in use this long after the last worker of a GPU ended."""

    @model_validator(mode="after")
    def _spans(self) -> Self:
        if self.hot_samples > self.hot_window:
            raise ValueError(
                f"hot_samples must not exceed hot_window {self.hot_window} (got {self.hot_samples})"
            )
        if self.clean_s > self.hold_off_max_s:
            raise ValueError(
                f"clean_s must not exceed hold_off_max_s {self.hold_off_max_s:g} (got {self.clean_s:g})"
            )
        return self
