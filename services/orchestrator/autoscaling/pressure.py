"""Inputs and outputs of a controller. Pure.

Pressure is the queue in batches of the trainer: a long queue means that *fewer* workers suffice. A controller is
`decide(state, sample, now)`: its state and the sample are all of its input, the decision with its reason is all of its
output, and the caller passes the clock. `control_law` has the controller in use.
"""

import math
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.wire.control import LaneStatus, Pressure, WorkerState
from rolloutmq.schemas.wire.envelope import Split


class WorkerCounts(msgspec.Struct, frozen=True):
    """Worker counts of one environment, as the supervisor sees them."""

    ready: int = 0
    starting: int = 0
    """Started and not ready yet, or waiting for a restart."""
    draining: int = 0
    """On their way out; they hold a process until it has ended."""
    failed: int = 0
    """Given up and not replaced yet; they count for nothing. One that is still being ended is also in `draining`."""
    restarting: int = 0
    """Those of `starting` that were ready before: they crashed."""
    start_s: float = 0.0
    """Recent time from the start of a worker until it is ready; 0 while unknown."""
    joined: int = 0
    """Those of `ready` and `starting` that joined by themselves, most from other hosts: nobody here ends or restarts
    them, and no limit of this host holds for them."""

    @property
    def current(self) -> int:
        """Return the workers that count towards the target."""
        return self.ready + self.starting


class WorkerRoom(msgspec.Struct, frozen=True):
    """Limit on the number of workers, its bound as a keyword such as `budget`, and details."""

    workers: int
    why: str
    details: str = ""


class ServerLimit(msgspec.Struct, frozen=True):
    """What the inference servers allow an environment; see `saturation`.

    Attributes:
        most: Workers beyond which throughput does not grow; 0 while unknown.
        reach: Largest number to try until the present workers are measured.
        tried: Its part of the workers that were not slower than fewer; they need no steps.
        slow: A worker makes clearly less than among fewer; whether the servers are full is not confirmed yet.
        best: Sequences per second of one worker of this environment alone; 0 while unknown.
        capacity: Sequences per second that the servers can feed all environments; 0 while unknown.
        proven: Sequences per second of all environments that were tried without a slower worker.
        made: Throughput before the present test of the capacity; 0 without one.
        above: Size that made it.
        tests_fewer: That test is one of fewer workers.
    """

    most: int = 0
    reach: int = 1_000_000
    tried: int = 0
    slow: bool = False
    best: float = 0.0
    capacity: float = 0.0
    proven: float = 0.0
    made: float = 0.0
    above: float = 0.0
    tests_fewer: bool = False


class PressureSample(msgspec.Struct, frozen=True):
    """Input of a controller at one tick, for one environment. Counters grow within one `epoch`.

    Attributes:
        crew: Worker counts.
        heard_at: Arrival time of everything but `crew`, on the clock of `now`; -inf if never.
        epoch: Life of the broker.
        number: Number of its `Pressure` message; the same number twice is no update.
        pressure: Queued sequences over the share of a batch from this environment.
        batch_sequences: The share of a batch from this environment, in sequences.
        trainers: Connected trainers.
        eaten: Sequences settled by trainers, from all environments: how many came from this one depends on how many
            workers it may have. For an evaluation, those from it alone.
        share: The part of them that this environment should deliver.
        made: Sequences accepted from its workers.
        starved_s: Time in which trainers waited without a batch.
        settled_busy_s: Time in which they trained, until the last settlement, from any origin; 0 while unknown.
        blocked_s: Time waited for credit or a task, summed over the slots of all workers.
        wait: Wait reason of its producers, or empty.
        untaught: Ready workers with finished rollouts that wait unusually long for the teacher.
        slots: Concurrent rollouts of one worker.
        group_sequences: Sequences of one group.
        rollout_s: Mean rollout time of a group; 0 while unknown.
        completions: Completions that its training rollouts got from the policy.
        completion_tokens: Their sampled tokens.
        engines: Inference servers that serve; 0 if unknown.
        server: What they allow.
        room: Other limit on the workers, if any.
        wanted: Number of workers set by an operator.
    """

    crew: WorkerCounts = WorkerCounts()
    heard_at: float = -math.inf
    epoch: int = 0
    number: int = 0
    pressure: float = 0.0
    batch_sequences: float = 1.0
    trainers: int = 1
    eaten: int = 0
    share: float = 1.0
    made: int = 0
    starved_s: float = 0.0
    settled_busy_s: float = 0.0
    blocked_s: float = 0.0
    wait: str = ""
    untaught: int = 0
    slots: int = 1
    group_sequences: int = 1
    rollout_s: float = 0.0
    completions: int = 0
    completion_tokens: int = 0
    engines: int = 0
    server: ServerLimit = ServerLimit()
    room: WorkerRoom | None = None
    wanted: int | None = None


class Decision(msgspec.Struct, frozen=True):
    """Target number of workers, and the reason.

    Attributes:
        target: Workers.
        reason: Explanation with the numbers.
        want: Unbounded number of workers needed, as a real number; None while unknown.
        bound: Keyword of the limit that keeps the target lower: `inference_bound`, `unmeasured`, `max_workers`, or that
            of the room.
    """

    target: int
    reason: str
    want: float | None = None
    bound: str = ""

    @property
    def short(self) -> float:
        """Return the workers wanted beyond the bound."""
        return max(0.0, self.want - self.target) if self.bound and self.want is not None else 0.0


_S = TypeVar("_S")


class ScalingRule(Protocol[_S]):
    """A controller."""

    def initial(self, workers: int) -> _S:
        """Return the initial state, with this many workers running."""
        ...

    def decide(self, state: _S, sample: PressureSample, now: float) -> tuple[_S, Decision]:
        """Decide once a tick; `now` in monotonic seconds."""
        ...


def sample_of(
    env: str, split: Split, slots: int, group_sequences: int, pressure: Pressure | None, heard_at: float
) -> PressureSample:
    """Return the part of a `Pressure` about one environment, without its crew; empty if there was none.

    Only training environments count as starving. Demand for evaluation equals its consumption.
    """
    if pressure is None:
        return PressureSample(slots=slots, group_sequences=group_sequences)
    sample = PressureSample(
        heard_at=heard_at,
        epoch=pressure.epoch,
        number=pressure.number,
        pressure=pressure.rollout_pressure,
        batch_sequences=max(1.0, pressure.batch_sequences),
        trainers=pressure.trainers,
        starved_s=pressure.starved_s if split is Split.TRAIN else 0.0,
        settled_busy_s=pressure.settled_busy_s if split is Split.TRAIN else 0.0,
        blocked_s=pressure.blocked_s.get(env, 0.0),
        slots=slots,
        group_sequences=group_sequences,
        completions=pressure.completions.get(env, 0),
        completion_tokens=pressure.completion_tokens.get(env, 0),
        wanted=pressure.wanted.get(env),
        untaught=sum(
            bool(worker.waits_for) and not worker.engines_away
            for worker in pressure.workers
            if worker.env == env and worker.state is WorkerState.READY
        ),
    )
    lane = next((lane for lane in pressure.lanes if lane.env == env and lane.split is split), None)
    if lane is None:
        return sample
    share = _share(lane, pressure)
    batch = max(1.0, pressure.batch_sequences * share)
    return replace(
        sample,
        pressure=lane.queued_sequences / batch,
        batch_sequences=batch,
        eaten=_consumed(lane, pressure),
        share=share if split is Split.TRAIN else 1.0,
        made=lane.accepted_sequences,
        wait=lane.wait,
        rollout_s=lane.rollout_s,
    )


def _consumed(lane: LaneStatus, pressure: Pressure) -> int:
    """Return the sequences that trainers consumed; for an evaluation, those of this environment."""
    if lane.split is not Split.TRAIN:
        return lane.settled_sequences
    return sum(other.settled_sequences for other in pressure.lanes if other.split is lane.split)


def _share(lane: LaneStatus, pressure: Pressure) -> float:
    """Return the expected share of a batch from one environment; the whole batch if nobody's share is known."""
    others = [other for other in pressure.lanes if other.split is lane.split]
    weights = sum(other.weight for other in others)
    if not weights and not any(other.min_share for other in others):
        return 1.0
    return max(lane.weight / weights if weights else 0.0, lane.min_share)
