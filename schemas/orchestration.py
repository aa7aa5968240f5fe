"""The configuration of the orchestrator: how many workers live, and how they die."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rolloutmq.schemas.section import Fraction, Section


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
    down_window_s: NonNegativeFloat = 30.0
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
    tick_s: PositiveFloat = 1.0
    """Time between two decisions."""
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
