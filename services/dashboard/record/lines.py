"""Lines of the record, as far as the series need their fields: a pressure of a thousand workers is passed over quickly.

A figure that is not finite is null in JSON.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.evaluation import EnvironmentScores
from rolloutmq.schemas.wire.latency import Hop, LatencyRow
from rolloutmq.services.monitor.profile.usage import KINDS as USAGE_KINDS
from rolloutmq.services.monitor.profile.usage import UsageLine

HEAD_BYTES: Final = 1024
"""Beginning of a line that has its time, topic and kind."""
DAMAGE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a line that does not decode."""
_KIND: Final = re.compile(rb'"kind": ?"([a-z_]{1,40})"')

Number = float | None
Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
"""A number that a series can hold."""


class Line(msgspec.Struct, frozen=True):
    """Fields of every line: wall clock of its arrival, and its topic."""

    t: float
    topic: str = ""


class LaneLine(msgspec.Struct, frozen=True):
    """One lane of a pressure."""

    env: str
    producers: Whole = 0


class PressureLine(Line, frozen=True):
    """State of the broker, without the single workers. Sums of seconds grow since the start of the broker, `epoch`."""

    epoch: Whole = 0
    rollout_pressure: Number = None
    queued_sequences: Number = None
    produced_per_s: Number = None
    consumed_per_s: Number = None
    starved_s: float = 0.0
    trainer_waits_s: dict[str, float] = {}
    producer_waits_s: dict[str, float] = {}
    worker_states: dict[str, Whole] = {}
    lanes: tuple[LaneLine, ...] = ()

    @property
    def producers(self) -> int:
        """Number of producers, at least one."""
        return max(1, sum(lane.producers for lane in self.lanes))


class ScoresLine(msgspec.Struct, frozen=True):
    """Scores of one environment in a batch."""

    env: str
    mean: Number = None
    low: Number = None
    high: Number = None


class StepLine(Line, frozen=True):
    """A step, as the trainer or the broker reported it, or a batch that was none."""

    incarnation: Whole = 0
    step: Whole = 0
    stepped: bool = True
    reward: Number = None
    tokens: float = 0.0
    staleness_max: Number = None
    staleness_mean: Number = None
    loss: Number = None
    scores: tuple[ScoresLine, ...] = ()


class DecisionLine(Line, frozen=True):
    """Decision about the workers of an environment, or about the engines."""

    env: str = "inference"
    current: Whole = 0
    target: Whole = 0
    reason: str = ""


class EvaluationLine(Line, frozen=True):
    """One point of the evaluation."""

    version: PolicyVersion = PolicyVersion()
    all: EnvironmentScores = EnvironmentScores()


class LatencyLine(Line, frozen=True):
    """Latencies that one process measured; see `LatencySample`."""

    name: str = ""
    host: str = ""
    at: float = 0.0
    since_s: float = 0.0
    gpus: tuple[str, ...] = ()
    rows: tuple[LatencyRow, ...] = ()
    dropped_rows: Whole = 0

    @property
    def counted(self) -> Sequence[LatencyRow]:
        """The rows that add up over processes: the broker tells the rollouts of all workers, and each worker its own
        once more.
        """
        if self.name == Role.BROKER:
            return self.rows
        return [row for row in self.rows if row.hop is not Hop.ROLLOUT]


class GpuLine(Line, frozen=True):
    """One GPU."""

    uuid: str = ""
    utilisation_percent: Number = None
    memory_used_bytes: Number = None


class StandingLine(Line, frozen=True):
    """Cordon of a GPU, as the orchestrator has it."""

    uuid: str = ""
    name: str = ""
    causes: tuple[str, ...] = ()
    reason: str = ""


class FindingLine(Line, frozen=True):
    """A finding about the rewards of an environment, or its end."""

    env: str = ""
    finding: str = ""
    problem: str = ""
    ended: bool = False


LINES: Final[Mapping[str, type[Any]]] = {
    "pressure": PressureLine,
    "step_done": StepLine,
    "batch_settled": StepLine,
    "scale_decision": DecisionLine,
    "engine_decision": DecisionLine,
    "evaluation_done": EvaluationLine,
    "latency_sample": LatencyLine,
    "gpu_sample": GpuLine,
    "gpu_standing": StandingLine,
    "health_finding": FindingLine,
}
"""Type of the lines of each kind that series and decisions are made of."""


class DecodedLine(NamedTuple):
    """A line of the record.

    Attributes:
        kind: Its kind; empty if it names none.
        event: Its fields, of the type that `LINES` has for the kind.
        usage: Its fields as far as they tell of the use of time, if it does.
    """

    kind: str
    event: Any
    usage: UsageLine | None


def decoded(line: bytes) -> DecodedLine:
    """Return a line of the record; raises one of `DAMAGE` if it does not decode."""
    found = _KIND.search(line, 0, HEAD_BYTES)
    kind = found[1].decode() if found else ""
    usage = msgspec.json.decode(line, type=UsageLine) if kind in USAGE_KINDS else None
    return DecodedLine(kind, msgspec.json.decode(line, type=LINES.get(kind, Line)), usage)
