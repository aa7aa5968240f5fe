"""Figures and courses of one run, from whatever its directory has."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import AckedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.services.monitor.compare.compared_run import ComparedRun, Course, compared, course
from rolloutmq.services.monitor.liveness import Fate, RunLiveness
from rolloutmq.services.monitor.report.latencies import LatencyKey

CONFIG = RunConfig(environment={name: EnvironmentConfig(entry="a:B") for name in ("math", "code")})
ENDED = Fate(RunLiveness.ENDED, reason="the trainer is done")
SUMMARY: dict[str, Any] = {
    "steps": 40,
    "wall_s": 50.0,
    "tokens": 1000,
    "groups_accepted": 100,
    "staleness_max": 3,
    "evaluation": {"first": {"greedy": None, "mean": 0.25}, "last": {"greedy": 0.75, "mean": 0.5}},
}


def lines(path: Path, records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))


def pressure(second: int) -> dict[str, Any]:
    """Return an event of a run whose trainer waits a quarter of the time."""
    return {
        "t": 1000.0 + second,
        "kind": "pressure",
        "epoch": 1,
        "trainers": 1,
        "settled_busy_s": 0.75 * second,
        "starved_s": 0.25 * second,
        "trainer_waits_s": {"no_batch": 0.25 * second},
        "worker_states": {"ready": 1},
        "workers": [{"env": "math", "state": "ready"}],
        "blocked_s": {"math": 0.5 * second},
    }


def latency(*durations: float) -> dict[str, Any]:
    row = LatencyRow(hop=Hop.TRAIN, env="math", durations=HistogramBuilder().add(durations).histogram())
    aside = msgspec.structs.replace(row, split=Split.EVAL)
    sample = LatencySample(name="broker", number=1, at=0.0, since_s=1.0, rows=(row, aside))
    return {"t": 1000.0, "topic": "telemetry.latency.broker", **msgspec.to_builtins(sample)}


def record(layout: RunLayout) -> None:
    """Leave a run of 40 steps a second apart, one group of each environment in each, with a pause of 100 s."""
    write_json(layout.lives, [Life(1000.0, 1020.5), Life(1120.5, 1145.0)])
    batches, acks = [], []
    for step in range(1, 41):
        names = (f"m{step}", f"c{step}")
        at = 1000.0 + step + 100.0 * (step > 20)
        rewards = (step / 40, 0.5)
        batches.append(
            SettledBatch(
                at=at, version=PolicyVersion(0, step), trained=names, staleness=(1, 3), rewards=rewards
            )
        )
        acks += [AckedGroup(at=at, session=1, seq=2 * step, group_id=names[0], env="math")]
        acks += [AckedGroup(at=at, session=1, seq=2 * step + 1, group_id=names[1], env="code")]
    lines(layout.trained, batches)
    lines(layout.acks / "w.jsonl", acks)
    lines(layout.metrics, [*map(pressure, range(1, 41)), latency(1.0, 2.0, 3.0)])


def read(layout: RunLayout, fate: Fate = ENDED, problem: str = "", damaged_lines: int = 0) -> ComparedRun:
    summary = None if problem else SUMMARY
    return compared(layout.root, CONFIG, fate, summary, problem, damaged_lines=damaged_lines)


def test_figures_of_a_run(layout: RunLayout) -> None:
    record(layout)
    found = read(layout)
    assert found.counts["steps"] == 40
    assert found.counts["groups_lost"] is None
    assert found.per_s("groups_accepted") == 2.0
    assert found.per_s("groups_lost") is None
    assert found.evaluation == (0.25, 0.75)
    assert found.rewards["code"] == Course(0.5, 0.5, 0.5)
    assert found.rewards["math"] == pytest.approx((5.5 / 40, 35.5 / 40, 35.5 / 40))
    assert found.starved == pytest.approx(0.25)
    assert found.starved_of_run == pytest.approx(10.0 / 45.0), "of both lives, without the pause between them"
    assert found.blocked == pytest.approx(0.5 / CONFIG.environment["math"].concurrency)
    key = LatencyKey("math", Split.TRAIN, Hop.TRAIN)
    assert [*found.latencies] == [key]
    assert found.latencies[key] == pytest.approx((3, 2.0, 3.0), rel=0.01)
    assert found.notes == ()


def test_courses_of_a_run(layout: RunLayout) -> None:
    record(layout)
    found = read(layout)
    assert [*found.reward.steps] == [*range(1, 41)]
    assert [*found.reward.times] == pytest.approx([*range(1, 41)]), "the pause does not count"
    assert found.reward.values[0] == pytest.approx((1 / 40 + 0.5) / 2)
    assert [*found.staleness.values] == [2.0] * 40
    assert sum(
        rate * (until - since)
        for rate, since, until in zip(
            found.throughput.values, [0.0, *found.throughput.times], found.throughput.times, strict=False
        )
    ) == pytest.approx(80), "the areas are the groups"
    assert all(one <= other for one, other in itertools.pairwise(found.throughput.steps))


def test_a_run_without_a_record_has_no_figures_and_says_so(layout: RunLayout) -> None:
    found = read(layout, Fate(RunLiveness.LIVING), "no summary: torn")
    assert not any(found.counts.values())
    assert (found.rewards, found.starved, found.blocked, found.latencies) == ({}, None, None, {})
    assert found.notes == (
        "goes on: these are its figures so far",
        "no summary: torn",
        "nothing was recorded",
    )


def test_damage_costs_its_own_figures_and_is_counted(layout: RunLayout) -> None:
    record(layout)
    for path in (layout.metrics, layout.trained):
        path.write_bytes(b"\x00{\n" + path.read_bytes())
    (layout.acks / "x.jsonl").write_bytes(b"torn\n{}\n")
    with layout.metrics.open("ab") as metrics:
        metrics.write(b'{"t": 1, "kind":"latency_sample"}\n')
    found = read(layout, damaged_lines=2)
    assert found.starved == pytest.approx(0.25)
    assert set(found.rewards) == {"all"}
    assert sorted(found.notes)[:2] == [
        "1 line of trained.jsonl damaged, left out",
        "2 lines of metrics.jsonl damaged, left out",
    ]
    assert found.notes[0].startswith("rewards of all environments together: ")
    assert "x.jsonl, line 1" in found.notes[0]


@pytest.mark.parametrize("summary", [{"evaluation": 3, "steps": "x"}, {"evaluation": {"first": None}}, {}])
def test_a_summary_of_another_version_costs_its_figures(layout: RunLayout, summary: dict[str, Any]) -> None:
    found = compared(layout.root, CONFIG, ENDED, summary)
    assert found.evaluation == (None, None)
    assert not any(found.counts.values())


def test_the_best_is_a_mean_over_as_many_steps_as_the_last() -> None:
    assert course([1.0]) == Course(1.0, 1.0, 1.0)
    assert course([0.0, 4.0, 0.0, 0.0, 1.0, 3.0, 0.0, 1.0]) == Course(2.0, 0.5, 2.0)
