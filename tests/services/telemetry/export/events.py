"""Events of a run, for the tests of the exporters."""

from collections.abc import Iterable, Iterator
from typing import Any

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
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.schemas.wire.health import HealthFinding, LaneScores
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.schemas.wire.telemetry import (
    CurriculumProgress,
    EngineDecision,
    EngineSample,
    Event,
    GpuAbsence,
    GpuSample,
    HostSample,
    ProcessSample,
)
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures


def lane(env: str = "math", split: Split = Split.TRAIN, **fields: Any) -> LaneStatus:
    return LaneStatus(env=env, split=split, weight=1.0, min_share=0.0, **fields)


def worker(
    name: str, env: str = "math", state: WorkerState = WorkerState.READY, **fields: Any
) -> WorkerStatus:
    given: dict[str, Any] = {"pid": 1, "host": "h", "in_hand": 1, "produced": 0, "abandoned": 0}
    given |= {"blocked_s": 0.0, "silent_s": 0.5, "draining": False, "error": ""}
    return WorkerStatus(worker=name, env=env, state=state, **(given | fields))


def pressure(
    lanes: Iterable[LaneStatus] = (), workers: Iterable[WorkerStatus] = (), epoch: int = 1, **fields: Any
) -> Pressure:
    given: dict[str, Any] = {
        "number": 1,
        "at": 0.0,
        "rollout_pressure": 1.5,
        "queued_sequences": 6,
        "batch_sequences": 4,
        "queued_groups": 3,
        "queued_bytes": 300,
        "leased_bytes": 200,
        "high_bytes": 1000,
        "step": 7,
        "consumed_per_s": 2.0,
        "produced_per_s": 3.0,
        "staleness_max": 1,
        "trainer_wait": "",
        "ledger": LedgerCounts(accepted=5, queued=3, leased=2),
        "trainer_waits_s": {"no_batch": 2.5},
        "producer_waits_s": {"high_water": 0.5},
    }
    return Pressure(epoch=epoch, lanes=tuple(lanes), workers=tuple(workers), **(given | fields))


def latency(*rows: LatencyRow, name: str = "broker", at: float = 0.0, **fields: Any) -> LatencySample:
    return LatencySample(name=name, number=1, at=at, since_s=1.0, host="h", rows=rows, **fields)


def row(hop: Hop, durations_s: Iterable[float], **fields: Any) -> LatencyRow:
    return LatencyRow(hop=hop, durations=HistogramBuilder().add([*durations_s]).histogram(), **fields)


def settled(step: int = 1, *, stepped: bool = True, env: str = "math", reward: float = 0.5) -> BatchSettled:
    return BatchSettled(
        run="run",
        incarnation=0,
        step=step,
        at=0.0,
        stepped=stepped,
        reward=reward,
        sequences=8,
        tokens=100,
        trained=3 if stepped else 0,
        filtered=1,
        rejected=0,
        staleness_max=2,
        staleness_mean=0.5,
        scores=(scores(env, reward),),
    )


def scores(env: str, mean: float) -> LaneScores:
    numbers = dict.fromkeys(("m2", "low", "high", "sxx", "syy", "sxy"), 0.0)
    return LaneScores(
        env=env, groups=4, flat=0, sequences=8, mean=mean, at_low=1, at_high=1, tokens=100, **numbers
    )


def step(number: int = 1, **fields: Any) -> StepDone:
    given: dict[str, Any] = {
        "incarnation": 0,
        "at": 0.0,
        "reward": 0.5,
        "loss": 0.25,
        "tokens": 100,
        "groups": 4,
    }
    given |= {"filtered": 1, "staleness_max": 2, "staleness_mean": 0.5, "pull_s": 0.5, "step_s": 1.5}
    return StepDone(run="run", step=number, **(given | fields))


def evaluation(step: int = 5, mean: float = 0.75) -> EvaluationDone:
    version = PolicyVersion(0, step)
    points = EnvironmentScores(tasks=4, answered=4, mean=mean, pass_1=0.5)
    return EvaluationDone(
        run="run",
        id="e1",
        at=0.0,
        version=version,
        oldest=version,
        newest=version,
        all=points,
        environments={"math": points},
        seconds=3.0,
    )


def decision(target: int, env: str = "math") -> ScaleDecision:
    return ScaleDecision(env=env, at=0.0, rollout_pressure=1.0, current=2, target=target, reason="r")


def finding(name: str, env: str = "math", *, ended: bool = False) -> HealthFinding:
    return HealthFinding(env=env, at=0.0, finding=name, problem="p", ended=ended)


def machines(host: str = "h") -> list[Event]:
    """One event of each kind about machines."""
    return [
        HostSample(
            host=host,
            number=1,
            at=0.0,
            cpus=8,
            cpu_percent=50.0,
            memory_used_bytes=10,
            memory_total_bytes=20,
            shm_free_bytes=5,
            disk_free_bytes=6,
            load_1m=1.5,
        ),
        GpuSample(
            uuid="GPU-1",
            number=1,
            at=0.0,
            name="H100",
            host=host,
            utilisation_percent=25.0,
            memory_used_bytes=7,
            memory_total_bytes=8,
            temperature_c=60.0,
            margin_c=20.0,
            ecc_uncorrected=0,
        ),
        GpuAbsence(host="other", number=1, at=0.0, why="none"),
        GpuStanding(uuid="GPU-1", host=host, name="H100", at=0.0, causes=(Cause.HEAT,), holders=("w-1",)),
        ProcessSample(name="broker", pid=1, number=1, at=0.0, cpu_percent=150.0, rss_bytes=1000),
        EngineSample(
            name="inference", number=1, at=0.0, url="http://x", pid=1, in_hand=3, busy=0.5, draining=False
        ),
        EngineDecision(at=0.0, busy=1.5, current=1, target=2, reason="r"),
    ]


def every_kind() -> Iterator[Event]:
    """Yield at least one event for each metric of the catalogue."""
    deviation: dict[str, Any] = {"reward_mean": 0.5, "reward_deviation": 0.1}
    counts: dict[str, Any] = {
        "blocked_s": {"math": 1.0},
        "completions": {"math": 9},
        "completion_tokens": {"math": 90},
    }
    yield pressure([lane(**deviation)], [worker("math-0")], late_members={"math": 1}, **counts)
    yield from machines()
    yield settled()
    yield settled(stepped=False)
    yield step()
    yield StepFigures(run="run", incarnation=0, step=1, at=0.0, figures={"grad_norm": 2.0})
    yield evaluation()
    progress = CurriculumProgress(
        env="math", sampler="s", at=0.0, levels=4, open=1, drawn=9, outcomes=8, flat=2, level=1.5
    )
    yield progress
    yield CurriculumProgress(
        env="code",
        sampler="s",
        at=0.0,
        levels=4,
        open=1,
        drawn=9,
        outcomes=8,
        flat=2,
        success=0.5,
        flat_share=0.25,
    )
    yield finding("collapse")
    yield decision(2)
    yield decision(3)
    yield latency(
        row(Hop.ROLLOUT, [2.0], env="math"),
        row(Hop.QUEUE, [0.5], env="math", tokens=10),
        row(Hop.CALL, [0.05], env="math", engine="inference", status="2xx", tokens=5),
        row(Hop.HTTP, [0.002], route="/v1/x", status="4xx"),
        gpus=("GPU-1",),
        dropped_rows=2,
    )
    yield latency(row(Hop.ROLLOUT, [2.0], env="math"), name="math-0")
