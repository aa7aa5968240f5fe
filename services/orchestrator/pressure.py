"""What a control law sees and what it says. Pure.

Pressure is what lies queued, in batches of the trainer. Much queued means that *fewer* workers would do. A law is
`decide(state, sample, now)`: all it knows is in its state and the sample, all it wants is in the decision, with the
reason; the clock is passed in. See `controller` for the law that is used.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rolloutmq.schemas.control import LaneStatus, Pressure, WorkerState
from rolloutmq.schemas.envelope import Split


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one environment as the supervisor sees them."""

    ready: int = 0
    starting: int = 0
    """Started and not heard to be ready, or waiting to be started again."""
    draining: int = 0
    failed: int = 0
    """Given up for good; they keep their place, so that nobody is started into the same failure."""

    @property
    def current(self) -> int:
        """Workers that count towards the target."""
        return self.ready + self.starting + self.failed


@dataclass(frozen=True, slots=True)
class Room:
    """How many workers there is room for, and what bounds that, in a word such as `budget`, and in more words."""

    workers: int
    why: str
    details: str = ""


@dataclass(frozen=True, slots=True)
class PressureSample:
    """What a law sees at one tick, for one environment. Counters grow within one `epoch`.

    Attributes:
        crew: The workers.
        heard_at: When all but the crew arrived, on the clock of `now`; -inf if never.
        epoch: Life of the broker.
        number: Number of the `Pressure` it is from: the same one twice is no news.
        pressure: Queued sequences over what one batch takes from this environment.
        batch_sequences: What one batch takes from this environment.
        trainers: Trainers that live.
        eaten, made: Sequences of this environment that trainers settled, and that its workers brought.
        starved_s: Time in which trainers could have learned and had nothing.
        blocked_s: Time waited for credit, by each slot of each worker.
        wait: Why its producers wait, or empty.
        untaught: Ready workers whose finished rollouts wait for the teacher, for longer than it usually takes.
        slots: Rollouts that one worker has under way at once.
        group_sequences: Sequences of one group.
        rollout_s: Mean time in which a group is rolled out; 0 while nobody has told.
        engines: Inference servers that serve; 0 if that is not known.
        room: What else bounds the workers, if anything does.
        wanted: Number of workers that an operator asked for.
    """

    crew: Crew = Crew()
    heard_at: float = -math.inf
    epoch: int = 0
    number: int = 0
    pressure: float = 0.0
    batch_sequences: float = 1.0
    trainers: int = 1
    eaten: int = 0
    made: int = 0
    starved_s: float = 0.0
    blocked_s: float = 0.0
    wait: str = ""
    untaught: int = 0
    slots: int = 1
    group_sequences: int = 1
    rollout_s: float = 0.0
    engines: int = 0
    room: Room | None = None
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers there should be, and why.

    Attributes:
        target: Workers.
        reason: Why, in words, with the numbers.
        want: Workers that would do if nothing bounded them, as a real number; None while that is not known.
        bound: What keeps the target below that, in a word: `inference_bound`, `max_workers`, or that of the room.
    """

    target: int
    reason: str
    want: float | None = None
    bound: str = ""

    @property
    def short(self) -> float:
        """Workers that are wanted beyond the bound."""
        return max(0.0, self.want - self.target) if self.bound and self.want is not None else 0.0


_S = TypeVar("_S")


class Rule(Protocol[_S]):
    """A control law."""

    def initial(self, workers: int) -> _S:
        """Return the state to begin with, with so many workers alive already."""
        ...

    def decide(self, state: _S, sample: PressureSample, now: float) -> tuple[_S, Decision]:
        """Decide once a tick; `now` in seconds, monotonic."""
        ...


def sample_of(
    env: str, split: Split, slots: int, group_sequences: int, pressure: Pressure | None, heard_at: float
) -> PressureSample:
    """Take what concerns one environment from a `Pressure`, but for its crew; None if none was ever heard.

    Only those who train are counted when they starve: of what is for evaluation as much is wanted as is eaten.
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
        blocked_s=pressure.blocked_s.get(env, 0.0),
        slots=slots,
        group_sequences=group_sequences,
        wanted=pressure.wanted.get(env),
        untaught=sum(
            bool(worker.waits_for)
            for worker in pressure.workers
            if worker.env == env and worker.state is WorkerState.READY
        ),
    )
    lane = next((lane for lane in pressure.lanes if lane.env == env and lane.split is split), None)
    if lane is None:
        return sample
    batch = max(1.0, pressure.batch_sequences * _share(lane, pressure))
    return replace(
        sample,
        pressure=lane.queued_sequences / batch,
        batch_sequences=batch,
        eaten=lane.settled_sequences,
        made=lane.accepted_sequences,
        wait=lane.wait,
        rollout_s=lane.rollout_s,
    )


def _share(lane: LaneStatus, pressure: Pressure) -> float:
    """Return the part of a batch that one environment is expected to give; all of it if nobody is expected to."""
    weights = sum(other.weight for other in pressure.lanes if other.split is lane.split)
    share = lane.weight / weights if weights > 0.0 else 0.0
    return max(share, lane.min_share) or 1.0
