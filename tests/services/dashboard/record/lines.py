"""Lines of a record, as telemetry writes them."""

from typing import Any

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.control import (
    LaneStatus,
    LedgerCounts,
    Pressure,
    ScaleDecision,
    StepDone,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.health import HealthFinding, LaneScores
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.schemas.wire.telemetry import Event, GpuSample, HostSample, ProcessSample
from rolloutmq.schemas.wire.training import BatchSettled
from rolloutmq.services.telemetry.recorder import line_of

T = 1_700_000_000.0
"""Wall clock at which a played run begins."""


def line(event: Event, after_s: float, topic: bytes = b"telemetry.x") -> bytes:
    """Return the line of an event, without its newline."""
    return line_of(topic, event, T + after_s).rstrip(b"\n")


def worker(
    number: int, env: str = "sort3", state: WorkerState = WorkerState.READY, **fields: Any
) -> WorkerStatus:
    known: dict[str, Any] = {
        "worker": f"{env}-{number}",
        "env": env,
        "state": state,
        "pid": 1,
        "host": "elsewhere",
        "in_hand": 2,
        "produced": 10 * number,
        "abandoned": 0,
        "blocked_s": 1.0,
        "silent_s": 0.1,
        "draining": False,
        "error": "",
    }
    return WorkerStatus(**{**known, **fields})


def pressure(number: int = 1, workers: tuple[WorkerStatus, ...] = (), **fields: Any) -> Pressure:
    known: dict[str, Any] = {
        "epoch": 1,
        "number": number,
        "at": float(number),
        "rollout_pressure": 0.5,
        "queued_sequences": 32,
        "batch_sequences": 64,
        "queued_groups": 8,
        "queued_bytes": 1000,
        "leased_bytes": 0,
        "high_bytes": 1 << 20,
        "step": number,
        "consumed_per_s": 10.0,
        "produced_per_s": 12.0,
        "staleness_max": 1,
        "trainer_wait": "",
        "ledger": LedgerCounts(accepted=10, queued=8, trained=2),
        "lanes": (
            LaneStatus(
                env="sort3", split=Split.TRAIN, weight=1.0, min_share=0.0, producers=2, max_staleness=4
            ),
        ),
        "workers": workers,
    }
    return Pressure(**{**known, **fields})


def step(number: int, reward: float = 0.5, **fields: Any) -> StepDone:
    known: dict[str, Any] = {
        "run": "run",
        "incarnation": 1,
        "step": number,
        "at": 0.0,
        "reward": reward,
        "loss": 0.25,
        "tokens": 100,
        "groups": 4,
        "filtered": 0,
        "staleness_max": 1,
        "staleness_mean": 0.5,
        "pull_s": 0.1,
        "step_s": 0.2,
    }
    return StepDone(**{**known, **fields})


def settled(number: int, reward: float = 0.5, **fields: Any) -> BatchSettled:
    known: dict[str, Any] = {
        "run": "run",
        "incarnation": 1,
        "step": number,
        "at": 0.0,
        "stepped": True,
        "reward": reward,
        "sequences": 64,
        "tokens": 100,
        "trained": 4,
        "filtered": 0,
        "rejected": 0,
        "staleness_max": 1,
        "staleness_mean": 0.5,
        "scores": (scores("sort3", reward),),
    }
    return BatchSettled(**{**known, **fields})


def scores(env: str, mean: float) -> LaneScores:
    return LaneScores(
        env=env,
        groups=4,
        flat=0,
        sequences=64,
        mean=mean,
        m2=1.0,
        low=0.0,
        high=1.0,
        at_low=1,
        at_high=1,
        tokens=100,
        sxx=0.0,
        syy=0.0,
        sxy=0.0,
    )


def decision(target: int, reason: str, env: str = "sort3", current: int = 2) -> ScaleDecision:
    return ScaleDecision(env=env, at=0.0, rollout_pressure=0.5, current=current, target=target, reason=reason)


def finding(name: str, env: str = "sort3", *, ended: bool = False) -> HealthFinding:
    return HealthFinding(env=env, at=0.0, finding=name, problem=f"{name} was found", ended=ended)


def latencies(hop: Hop, *seconds: float, env: str = "sort3", tokens: int = 0, **fields: Any) -> LatencySample:
    row = LatencyRow(
        hop=hop, env=env, durations=HistogramBuilder().add(seconds).histogram(), tokens=tokens, **fields
    )
    return LatencySample(name="broker", number=1, at=0.0, since_s=1.0, rows=(row,))


def gpu(uuid: str = "GPU-1", used: float = 50.0) -> GpuSample:
    return GpuSample(uuid=uuid, number=1, at=0.0, name="H100", utilisation_percent=used, memory_used_bytes=1)


def host() -> HostSample:
    return HostSample(
        host="here",
        number=1,
        at=0.0,
        cpus=2,
        cpu_percent=50.0,
        memory_used_bytes=1,
        memory_total_bytes=2,
        shm_free_bytes=1,
        disk_free_bytes=1,
        load_1m=1.0,
    )


def process(name: str) -> ProcessSample:
    return ProcessSample(name=name, pid=1, number=1, at=0.0, cpu_percent=1.0, rss_bytes=1)


TOPICS = {
    "pressure": topics.PRESSURE,
    "step": topics.STEP,
    "settled": topics.telemetry("settled", "run"),
    "scale": topics.telemetry("scale", "sort3"),
    "process": topics.telemetry("process", "broker"),
}
