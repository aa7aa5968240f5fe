"""The configuration of the orchestrator: how many workers live, on which GPUs, and how they die."""

from typing import Annotated, Final, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rolloutmq.schemas.section import Fraction, Section

MIB: Final = 1 << 20


class ScalingConfig(Section):
    """`[orchestrator.scaling]`: the numbers of the law by which workers come and go.

    The law itself is described in `docs/scaling.md`; `rolloutmq simulate` shows what other numbers would do.
    """

    setpoint_batches: PositiveFloat = 1.5
    """Batches that should lie queued: one is taken while the next is still being made."""
    refill_s: PositiveFloat = 60.0
    """Time in which the queue is filled again; longer by itself where workers or rollouts take longer."""
    integral_s: PositiveFloat = 240.0
    """Time in which the integral adds the same correction once more: it makes up for rates that are a little off."""
    derivative_s: NonNegativeFloat = 0.0
    """The queue is taken for what it will be so much later if it goes on as it does. 0: off; batches make it jump."""
    derivative_filter_s: PositiveFloat = 15.0
    """Memory of how fast the queue changes: several batches."""
    trim_part: Fraction = 0.05
    """Most of the integral, as a part of what is wanted; one worker if that is more."""
    band_part: Fraction = 0.1
    """Dead band, as a part of the target; one worker if that is more. Rates are not known better than that."""
    confirm_up_s: NonNegativeFloat = 1.0
    """So long all news must agree before workers are started: one alone may be a batch that came late."""
    confirm_down_s: NonNegativeFloat = 14.0
    """The same before workers go: it is cheaper to keep one than to start it again."""
    down_window_s: NonNegativeFloat = 24.0
    """Workers go only for what was not wanted for so long. More for workers that are slow to start, and for trainers
    that pause for long."""
    up_factor: Annotated[float, Field(gt=1.0)] = 2.0
    """Most that the target may grow to within `up_every_s`, in times of what it was."""
    up_least: PositiveInt = 4
    """Workers that may be started within `up_every_s` in any case."""
    up_every_s: PositiveFloat = 5.0
    """Starts that come all at once fight for the same disk and the same driver."""
    down_part: Fraction = 0.5
    """Least part of the target that is left by one step down."""
    stale_s: PositiveFloat = 3.0
    """Age at which news say nothing any more: a dozen of them were missed."""


class OrchestratorConfig(Section):
    """`[orchestrator]`: how many workers live, and how they die."""

    enabled: bool = True
    """Start workers with the run; off where workers are started by hand."""
    tick_s: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Time between two decisions. Rates are measured from one to the next, so it may not be long."""
    scaling: ScalingConfig = ScalingConfig()
    """How many workers there are."""
    max_processes: NonNegativeInt = 0
    """Most worker processes of all environments together, shared by their weights; 0: no bound but their own."""
    backoff_s: PositiveFloat = 0.5
    """First pause before a crashed process is started again; doubles each time, with jitter."""
    backoff_max_s: PositiveFloat = 30.0
    crash_limit: PositiveInt = 5
    """Crashes in a row, each within `stable_s` of its start, after which a process is given up for good."""
    stable_s: PositiveFloat = 10.0
    """A process that lived that long has started well."""
    drain_deadline_s: PositiveFloat = 30.0
    """Time that a worker gets to finish the rollouts in hand."""
    term_grace_s: PositiveFloat = 5.0
    """Time between SIGTERM and SIGKILL."""


class HardwareConfig(Section):
    """`[hardware]`: which GPUs workers are put on, and when one is cordoned, that is, takes no new workers.

    No temperatures: what is hot for a GPU, the GPU itself knows and tells.
    """

    use: tuple[str, ...] = ()
    """UUIDs, or how they begin, of the GPUs that workers may be put on; empty is all that this process may see."""
    stale_s: PositiveFloat = 5.0
    """Age from which a sample says nothing: nobody is put on its GPU, and nothing that lasts goes on lasting."""
    hot_window: PositiveInt = 5
    """Samples that are looked at together: a GPU that touches its limit for a moment is not ill."""
    hot_samples: PositiveInt = 3
    """So many of them in which the GPU slows down for its temperature make it hot."""
    hot_margin_s: NonNegativeFloat = 10.0
    """A GPU without margin to its slow-down temperature for so long is hot, too."""
    cool_margin_c: NonNegativeFloat = 5.0
    """Degrees of margin that a GPU needs to be called cool; less, and it would be hot again with the next worker."""
    clean_s: PositiveFloat = 60.0
    """A GPU is used again after so long without a sign of what it was cordoned for."""
    relapse_s: PositiveFloat = 600.0
    """A GPU that is cordoned again within it must be clean for twice as long; each such time without halves that."""
    hold_off_max_s: PositiveFloat = 3600.0
    """The longest that a GPU must be clean."""
    drain_hot_s: PositiveFloat = 300.0
    """The workers of a GPU that is hot for so long are drained: new ones kept off has not cooled it."""
    breaker: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Most of the GPUs, and at least one, that may be cordoned for heat: if more are hot, it is the room."""
    full_percent: Annotated[float, Field(gt=0.0, le=100.0)] = 95.0
    """A GPU with so much of its memory in use takes no more workers."""
    busy_percent: Annotated[float, Field(gt=0.0)] = 98.0
    """A GPU that was so busy over `hot_window` samples takes no more workers; above 100 it does."""
    settle_bytes: PositiveInt = 256 * MIB
    """Memory in use has settled when two samples differ by no more than this or `settle_part`."""
    settle_part: Fraction = 0.02
    """The same as a part of all memory of the GPU."""
    settle_s: PositiveFloat = 2.0
    """Longest wait for it after a process has ended: drivers take tens to hundreds of milliseconds."""
    loading_s: PositiveFloat = 120.0
    """Memory is kept for a worker that is ready until it shows, and no longer than this: it may need less."""
    ghost_s: PositiveFloat = 30.0
    """Memory that stays in use so long after the last worker of a GPU has ended is reported."""

    @model_validator(mode="after")
    def _spans(self) -> Self:
        if self.hot_samples > self.hot_window:
            raise ValueError("hot_samples must not exceed hot_window")
        if self.clean_s > self.hold_off_max_s:
            raise ValueError("clean_s must not exceed hold_off_max_s")
        return self
