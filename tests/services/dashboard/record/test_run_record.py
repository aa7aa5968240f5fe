"""What a record shows: series, percentiles, decisions in words, and the last state."""

import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.services.dashboard.record import lines
from tests.services.dashboard.record.lines import T, line

from rolloutmq.schemas.wire.control import Pressure, WorkerState
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.telemetry import EngineDecision, GpuSample, HostSample
from rolloutmq.services.dashboard.record.run_record import RunRecord
from rolloutmq.services.monitor.profile.usage import UsageLine, read_usage


def record(*taken: bytes) -> RunRecord:
    found = RunRecord()
    for each in taken:
        found.take(each)
    return found


def series(found: RunRecord, name: str, key: str = "") -> dict[str, list[Any]]:
    for one in found.series.since(-1):
        if (one["name"], one["key"]) == (name, key):
            columns: dict[str, list[Any]] = one["columns"]
            return columns
    raise AssertionError(f"no series {name} {key}")


def test_the_queue_and_its_workers() -> None:
    crew = (
        lines.worker(0),
        lines.worker(1, state=WorkerState.STARTING),
        lines.worker(2, state=WorkerState.GONE),
    )
    found = record(
        line(
            lines.pressure(1, crew, rollout_pressure=0.5, starved_s=1.0, trainer_waits_s={"no_batch": 1.0}),
            0.0,
        ),
        line(
            lines.pressure(
                2,
                crew,
                rollout_pressure=1.5,
                starved_s=1.5,
                trainer_waits_s={"no_batch": 1.5},
                producer_waits_s={"stale_guard": 2.0},
            ),
            2.0,
        ),
    )
    queue = series(found, "queue")
    assert queue["rollout_pressure"] == [0.5, 1.5]
    assert (queue["ready"], queue["workers"]) == ([1.0, 1.0], [2.0, 2.0])
    assert queue["trainer_wait"] == [None, 0.25]
    assert queue["blocked"] == [None, 0.5]
    assert series(found, "wait", "trainer:no_batch")["share"] == [0.25]
    assert series(found, "wait", "workers:stale_guard")["share"] == [0.5]


def test_a_restarted_broker_waited_no_negative_time() -> None:
    found = record(
        line(lines.pressure(9, starved_s=100.0), 0.0), line(lines.pressure(1, epoch=2, starved_s=0.0), 1.0)
    )
    assert series(found, "queue")["trainer_wait"] == [None, None]


def test_waits_add_up_over_the_lives_of_the_broker() -> None:
    first = lines.pressure(9, starved_s=100.0, trainer_waits_s={"no_batch": 90.0, "unsettled": 1.0})
    second = lines.pressure(1, epoch=2, starved_s=5.0, trainer_waits_s={"no_batch": 5.0})
    found = record(line(lines.pressure(1, starved_s=50.0), 0.0), line(first, 1.0), line(second, 2.0))
    assert found.waited(second) == (105.0, {"no_batch": 95.0, "unsettled": 1.0}, {})
    third = lines.pressure(1, epoch=3, starved_s=1.0, trainer_waits_s={"no_batch": 1.0})
    assert found.waited(third).starved_s == 106.0, "a life that no line has told of yet"
    assert found.waited(second).starved_s == 105.0


def test_the_use_of_time_is_that_of_the_profile() -> None:
    crew = (lines.worker(0), lines.worker(1))
    states = [
        lines.pressure(1, crew, starved_s=2.0, trainers=1),
        lines.pressure(2, crew, starved_s=3.0, trainers=1, settled_busy_s=1.0),
        lines.pressure(3, crew, starved_s=3.5, trainers=1, settled_busy_s=2.0, blocked_s={"sort3": 1.0}),
    ]
    taken = [line(one, 2.0 * number) for number, one in enumerate(states)]
    found = RunRecord({"sort3": 4})
    for one in taken:
        found.take(one)
    use = found.use()
    assert (use.run_starved_s, use.starved, use.blocked) == (3.5, 0.25, 1 / 16)
    read = read_usage((msgspec.json.decode(one, type=UsageLine) for one in taken), {"sort3": 4})
    assert use == read


def test_a_step_counts_once_whoever_reports_it() -> None:
    found = record(
        line(lines.settled(1, 0.25), 0.0),
        line(lines.step(1, 0.25), 0.1),
        line(lines.step(2, 0.75), 0.2),
        line(lines.settled(2, 0.75), 0.3),
        line(lines.settled(2, 0.0, stepped=False), 0.4),
    )
    steps = series(found, "steps")
    assert steps["steps"] == [2.0]
    assert steps["reward"] == [0.5]
    assert steps["step"] == [2.0]
    assert steps["tokens"] == [200.0]
    assert steps["loss"] == [0.25]
    assert series(found, "reward", "sort3")["mean"] == [0.25]


def test_a_loss_that_is_no_number_is_no_value() -> None:
    found = record(line(lines.step(1, 0.5, loss=float("nan")), 0.0))
    assert series(found, "steps")["loss"] == [None]
    assert series(found, "steps")["reward"] == [0.5]
    assert found.damaged == 0


def test_a_resumed_trainer_takes_steps_again() -> None:
    found = record(line(lines.settled(5), 0.0), line(lines.settled(4, incarnation=2), 3.0))
    assert series(found, "steps")["step"] == [5.0, 4.0]


def test_decisions_in_words_and_not_again_and_again() -> None:
    found = record(
        line(lines.decision(2, "want 1.9"), 0.0),
        line(lines.decision(2, "want 2.1"), 1.0),
        line(lines.decision(4, "want 3.8"), 2.0),
        line(lines.decision(4, "hold: no trainer"), 3.0),
        line(EngineDecision(at=0.0, busy=1.5, current=1, target=2, reason="busy"), 4.0),
    )
    assert [(one["env"], one["text"]) for one in found.decisions] == [
        ("sort3", "2 workers: want 1.9"),
        ("sort3", "2 to 4 workers: want 3.8"),
        ("sort3", "4 workers: hold: no trainer"),
        ("inference", "2 inference servers: busy"),
    ]
    assert series(found, "target", "sort3")["target"] == [2.0, 2.0, 4.0, 4.0]


def test_findings_and_cordons_are_told_when_they_begin_and_end() -> None:
    hot = GpuStanding(uuid="GPU-1", host="h", name="H100", at=0.0, causes=(Cause.HEAT,), reason="95 °C")
    cool = GpuStanding(uuid="GPU-1", host="h", name="H100", at=0.0)
    found = record(
        line(lines.finding("collapse"), 0.0),
        line(lines.finding("collapse"), 1.0),
        line(hot, 2.0),
        line(hot, 3.0),
        line(cool, 4.0),
        line(lines.finding("collapse", ended=True), 5.0),
    )
    assert [one["text"] for one in found.decisions] == [
        "finding collapse: collapse was found",
        "GPU GPU-1 cordoned: 95 °C",
        "GPU GPU-1 in use again",
        "finding collapse ended",
    ]
    assert found.training() == []


@pytest.mark.parametrize("seconds", [0.301 * 1.003**step for step in range(8)])
def test_no_point_of_a_hop_exceeds_its_slowest_group(seconds: float) -> None:
    told = lines.latencies(Hop.QUEUE, 0.1, seconds, slowest_s=seconds, slowest_id="g-7")
    found = record(*(line(told, at) for at in (0.0, 10.0)))
    assert max(series(found, "hop", "queue:sort3")["p99_s"]) <= seconds * (1 + 1e-6), "of six digits"


def test_percentiles_of_hops() -> None:
    found = record(
        *(
            line(lines.latencies(Hop.ROLLOUT, *([0.1] * 99), 10.0, tokens=1000), second)
            for second in range(10)
        ),
        line(lines.latencies(Hop.QUEUE, 0.5, slowest_s=0.5, slowest_id="g-7"), 10.0),
    )
    rollout, queue = found.latencies.rows()
    assert (rollout["hop"], rollout["env"], rollout["count"]) == ("rollout", "sort3", 1000)
    assert rollout["p50_s"] == pytest.approx(0.1, rel=0.02)
    assert rollout["p999_s"] == pytest.approx(10.0, rel=0.02)
    assert rollout["recent_count"] == 1000
    assert rollout["per_s"] == pytest.approx(100.0, rel=0.02)
    assert rollout["tokens_per_s"] == pytest.approx(1000.0, rel=0.02)
    assert (queue["slowest_s"], queue["slowest_id"]) == (0.5, "g-7")
    hop = series(found, "hop", "rollout:sort3")
    assert hop["p99_s"][0] == pytest.approx(0.1, rel=0.02) or hop["p99_s"][0] == pytest.approx(10.0, rel=0.02)
    assert sum(hop["count"]) <= 1000


def test_the_curves_of_an_evaluation_are_its_own() -> None:
    train, evaluation = lines.latencies(Hop.QUEUE, 0.1), lines.latencies(Hop.QUEUE, 9.0, split=Split.EVAL)
    found = record(*(line(one, second) for second in (0.0, 10.0) for one in (train, evaluation)))
    assert series(found, "hop", "queue:sort3")["p50_s"] == [pytest.approx(0.1, rel=0.02)]
    assert series(found, "hop", "queue:eval:sort3")["p50_s"] == [pytest.approx(9.0, rel=0.02)]


def test_each_of_many_environments_has_a_curve_of_each_hop_and_calls_take_no_place() -> None:
    hops = [hop for hop in Hop if not hop.has_status]
    found = RunRecord()
    for second in (0.0, 10.0):
        for number in range(64):
            found.take(
                line(lines.latencies(Hop.CALL, 0.1, env="", engine=f"i{number}", status="2xx"), second)
            )
        for hop in hops:
            for number in range(64):
                found.take(line(lines.latencies(hop, 0.1, env=f"e{number}"), second))
    for hop in hops:
        assert series(found, "hop", f"{hop}:e63")["count"] == [2]


def test_the_rollouts_of_a_worker_do_not_count_twice() -> None:
    told = lines.latencies(Hop.ROLLOUT, 0.1, 0.2)
    call = lines.latencies(Hop.CALL, 0.1)
    found = record(
        line(told, 0.0),
        line(msgspec.structs.replace(told, name="sort3-0"), 0.0),
        line(msgspec.structs.replace(call, name="sort3-0"), 0.0),
    )
    assert [(row["hop"], row["count"]) for row in found.latencies.rows()] == [("rollout", 2), ("call", 1)]


def test_recent_percentiles_forget_and_the_whole_does_not() -> None:
    found = record(
        *(line(lines.latencies(Hop.TRAIN, 10.0), second) for second in range(30)),
        *(line(lines.latencies(Hop.TRAIN, 0.1), 200.0 + second) for second in range(30)),
    )
    (row,) = found.latencies.rows()
    assert (row["count"], row["recent_count"]) == (60, 30)
    assert row["recent_p99_s"] == pytest.approx(0.1, rel=0.02)
    assert row["p99_s"] == pytest.approx(10.0, rel=0.02)


def test_the_last_state_of_an_ended_run() -> None:
    found = record(
        line(lines.pressure(1), 0.0, lines.TOPICS["pressure"]),
        line(lines.pressure(2, queued_sequences=7), 1.0, lines.TOPICS["pressure"]),
        line(lines.host(), 1.0, b"telemetry.host.here"),
        line(lines.gpu("GPU-1"), 1.0, b"telemetry.gpu.GPU-1"),
        line(lines.gpu("GPU-2"), 1.0, b"telemetry.gpu.GPU-2"),
    )
    events = [one.event for one in found.state()]
    assert [one.queued_sequences for one in events if isinstance(one, Pressure)] == [7]
    assert [one.uuid for one in events if isinstance(one, GpuSample)] == ["GPU-1", "GPU-2"]
    assert sum(isinstance(one, HostSample) for one in events) == 1
    assert found.state()[0].at == T + 1.0


def test_a_pressure_that_lost_its_workers_is_still_counted() -> None:
    crew = tuple(lines.worker(number, error="x" * 200) for number in range(2000))
    raw = line(lines.pressure(1, crew), 0.0)
    assert b"trimmed" in raw
    found = record(raw)
    assert series(found, "queue")["workers"] == [2000.0]


def test_points_of_the_evaluation() -> None:
    point = EvaluationDone(
        run="run",
        id="e1",
        at=0.0,
        version=PolicyVersion(1, 30),
        oldest=PolicyVersion(1, 30),
        newest=PolicyVersion(1, 30),
        all=EnvironmentScores(tasks=4, mean=0.5, greedy=None, pass_1=0.25),
        environments={},
    )
    found = record(line(point, 1.0))
    assert series(found, "evaluation") == {
        "t": [T + 1.0],
        "step": [30.0],
        "mean": [0.5],
        "greedy": [None],
        "pass_1": [0.25],
        "pass_k": [None],
    }
    assert len(found.training()) == 1


DAMAGE = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'{"t":"x","kind":"pressure"}',
    b'{"t":1e999,"kind":"pressure"}',
    b'{"kind":"pressure"}',
    b'{"t":1,"kind":"pressure","lanes":3}',
    b'{"t":1,"kind":"pressure","rollout_pressure":"\xff"}',
    b'{"t":1,"kind":"latency_sample","rows":[{"hop":"x"}]}',
    b'{"t":1,"kind":"latency_sample","rows":[{"hop":"queue","durations":[5000,[1],0.0]}]}',
    b'{"t":1,"kind":"scale_decision","target":1e400}',
    b"[" * 5000,
    b'{"t":1,"kind":"no_such_kind"}',
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_costs_itself(damage: bytes) -> None:
    good = line(lines.pressure(1), 5.0, b"pressure")
    found = record(damage, good, damage)
    assert found.damaged in {0, 2}
    assert series(found, "queue")["queued_sequences"][-1] == 32.0
    assert any(isinstance(one.event, Pressure) for one in found.state())
    json.dumps(found.series.since(-1))


def test_any_bytes_are_passed_over() -> None:
    chance = random.Random(7)
    whole = [
        line(lines.pressure(1, (lines.worker(0),)), 0.0),
        line(lines.settled(1), 0.0),
        line(lines.latencies(Hop.QUEUE, 0.5), 0.0),
        line(lines.decision(2, "x"), 0.0),
        line(lines.finding("f"), 0.0),
    ]
    found = RunRecord()
    for _ in range(3000):
        changed = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 6)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        found.take(bytes(changed))
    assert found.lines == 3000
    found.state(), found.training(), found.latencies.rows()
    json.dumps(found.series.since(-1))


def test_a_long_run_of_many_environments_is_bounded() -> None:
    found = RunRecord()
    for number in range(12_000):
        t, env = 30.0 * number, f"env{number % 100}"
        found.take(line(lines.settled(number + 1, scores=(lines.scores(env, 0.5),)), t))
        if not number % 10:
            found.take(line(lines.decision(number, f"reason {t}", env), t))
            found.take(line(lines.gpu(f"GPU-{number}"), t, b"telemetry.gpu.GPU-%d" % number))
            found.take(line(lines.finding(f"finding{number}"), t))
    assert len(found.decisions) == 200
    told = found.series.since(-1)
    rows = Counter[str]()
    for one in told:
        rows[one["name"]] += len(one["columns"]["t"])
        assert len(one["columns"]["t"]) <= 1024
    assert all(count <= 8 * 1024 for count in rows.values()), rows
    assert Counter(one["name"] for one in told)["reward"] == 64
    assert len(found.state()) <= 4096
