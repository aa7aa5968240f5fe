"""The state of a run at once, from the broker's reply and the end of the files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.control import Pressure, StatusReply, StepDone
from rolloutmq.schemas.wire.envelope import Message, PolicyVersion
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.schemas.wire.telemetry import HostSample
from rolloutmq.services.monitor.live import recent
from rolloutmq.services.monitor.live.recent import fill, recent_groups
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.status import lately

WALL, NOW = 10_000.0, 50.0


def host(cpus: int) -> HostSample:
    return HostSample(
        host="h",
        number=1,
        at=0.0,
        cpus=cpus,
        cpu_percent=1.0,
        memory_used_bytes=1,
        memory_total_bytes=2,
        shm_free_bytes=1,
        disk_free_bytes=1,
        load_1m=0.0,
    )


def line(event: Message, age_s: float) -> bytes:
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return msgspec.json.encode({"t": WALL - age_s, "topic": "x", **fields}) + b"\n"


@pytest.fixture
def reply(make_pressure: Callable[..., Pressure]) -> StatusReply:
    return StatusReply(
        pressure=make_pressure(step=3),
        run="r",
        total_steps=40,
        durability="disk",
        uptime_s=1.0,
        rejected_messages=0,
        rejected_by_reason={},
    )


@pytest.fixture
def evaluation() -> EvaluationDone:
    version = PolicyVersion(0, 3)
    scores = EnvironmentScores(tasks=1, answered=1, greedy=0.5)
    return EvaluationDone(
        run="r", id="p", at=0.0, version=version, oldest=version, newest=version, all=scores, environments={}
    )


def filled(layout: RunLayout, reply: StatusReply) -> RunState:
    board = RunState.of(RunConfig(environment={"sort3": EnvironmentConfig(entry="a:B")}))
    fill(board, layout, reply, NOW, WALL)
    return board


def test_samples_of_the_last_minute_and_all_steps_count(
    layout: RunLayout,
    reply: StatusReply,
    make_step: Callable[..., StepDone],
    make_pressure: Callable[..., Pressure],
) -> None:
    row = LatencyRow(hop=Hop.TRAIN, env="sort3", durations=HistogramBuilder().add(1.0).histogram())
    sample = LatencySample(name="broker", number=1, at=0.0, since_s=1.0, rows=(row,))
    layout.metrics.write_bytes(
        line(make_step(1, 0.25), 500.0)
        + line(host(2), 400.0)
        + b'{"t": 1, "kind": "host_sample"}\n\x00torn\n[]\n'
        + line(make_step(2, 0.75, loss=float("nan")), 300.0)
        + line(sample, 5.0)
        + line(make_pressure(step=99), 1.0)
        + line(host(8), 1.0)[:-9]
    )
    board = filled(layout, reply)
    assert board.rewards() == [0.25, 0.75]
    assert board.host is None
    assert board.pressure is reply.pressure
    assert [one.groups for one in board.latencies.percentiles(NOW).values()] == [1]


def test_the_search_for_steps_ends_with_as_many_as_are_shown(
    layout: RunLayout,
    reply: StatusReply,
    make_step: Callable[..., StepDone],
    evaluation: EvaluationDone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [line(make_step(step, float(step)), 100.0 - step) for step in range(1, 30)]
    layout.metrics.write_bytes(line(evaluation, 200.0) + b"".join(steps) + line(evaluation, 1.0))
    for module, name in ((recent, "END_BYTES"), (lately, "BLOCK_BYTES")):
        monkeypatch.setattr(module, name, 5 * len(steps[-1]))
    rewards = filled(layout, reply).rewards()
    assert 10 <= len(rewards) <= 15
    assert rewards[-1] == 29.0


@pytest.mark.parametrize("searched", [100, 1 << 20])
def test_the_last_step_and_evaluation_are_found_behind_many_samples(
    layout: RunLayout,
    reply: StatusReply,
    make_step: Callable[..., StepDone],
    evaluation: EvaluationDone,
    searched: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = b"".join(line(host(1), 50.0 - at / 10) for at in range(500))
    lasting = [line(make_step(3, 0.25), 400.0), line(evaluation, 300.0), line(make_step(4, 0.75), 200.0)]
    layout.metrics.write_bytes(samples.join([b"", *lasting, b""]))
    for module, name in ((recent, "END_BYTES"), (lately, "BLOCK_BYTES")):
        monkeypatch.setattr(module, name, 4 << 10)
    monkeypatch.setattr(lately, "SEARCHED_BYTES", searched * 1000)
    board = filled(layout, reply)
    if searched > 100:
        assert (board.rewards(), board.evaluation) == ([0.25, 0.75], evaluation)
    else:
        assert (board.rewards(), board.evaluation) == ([0.75], None)


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"x" * 5000, b"\n" + b"x" * 5000 + b"\n", b'"kind":"step_done"' * 900]
)
def test_what_is_no_record_shows_nothing(
    layout: RunLayout, reply: StatusReply, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.metrics.write_bytes(text)
    for module, name in ((recent, "END_BYTES"), (lately, "BLOCK_BYTES")):
        monkeypatch.setattr(module, name, 1000)
    assert filled(layout, reply).rewards() == []


def test_a_run_without_files_has_what_the_broker_says(layout: RunLayout, reply: StatusReply) -> None:
    board = filled(layout, reply)
    assert (board.steps_done, board.reward()) == (3, None)


@pytest.mark.parametrize("log", ["trained", "settled"])
def test_groups_that_ended_last_come_first(layout: RunLayout, log: str) -> None:
    batches = [
        SettledBatch(
            at=float(step), version=PolicyVersion(0, step), trained=(f"t{step}",), filtered=(f"f{step}",)
        )
        for step in (1, 3)
    ]
    path: Path = getattr(layout, log)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in batches) + b"{torn")
    dropped = DroppedGroup(at=2.0, group_id="d", state="expired", reason="too old")
    layout.dropped.write_bytes(msgspec.json.encode(dropped) + b"\n")
    assert [(one.group_id, one.outcome) for one in recent_groups(layout)] == [
        ("t3", "trained"),
        ("f3", "filtered"),
        ("d", "expired (too old)"),
        ("t1", "trained"),
        ("f1", "filtered"),
    ]


def test_a_run_without_groups_lists_none(layout: RunLayout) -> None:
    assert recent_groups(layout) == []


def test_steps_come_from_the_log_of_the_broker_where_nobody_records_events(
    run_dir: Path, reply: StatusReply
) -> None:
    layout = RunLayout(run_dir)
    batches = [
        SettledBatch(
            at=WALL - 2 * (4 - step),
            version=PolicyVersion(0, step),
            trained=("a", "b"),
            staleness=(0, step),
            rewards=(0.5, 0.25 * step),
        )
        for step in (1, 2, 3)
    ]
    unstepped = SettledBatch(at=WALL - 1.0, version=PolicyVersion(0, 3), filtered=("c",), rewards=(0.0,))
    layout.settled.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (*batches, unstepped)))
    board = filled(layout, reply)
    assert board.step is not None
    assert (board.step.step, board.step.staleness_max, board.step.reward) == (3, 3, 0.625)
    assert board.steps_per_s(NOW) == pytest.approx(2 / 6)
