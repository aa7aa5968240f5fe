"""Counts by split add up to the ledger, and every view has the same ones."""

import json
from collections.abc import Callable

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import LaneStatus, LedgerCounts, Pressure, StatusReply
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.live.snapshot import snapshot
from rolloutmq.services.monitor.live.view import ledger_lines, queue_line
from rolloutmq.services.monitor.status import counts
from rolloutmq.services.monitor.status.counts import SplitCounts
from rolloutmq.services.monitor.status.status import status_json, status_text

LEDGER = LedgerCounts(
    accepted=100, queued=20, leased=10, trained=30, committed=25, filtered=5, expired=4, dead=3, discarded=3
)


def lanes(make_lane: Callable[..., LaneStatus]) -> tuple[LaneStatus, ...]:
    train = make_lane("math", accepted_groups=60, queued_groups=12, queued_sequences=96, leased_groups=8)
    aside = make_lane(
        "math",
        split=Split.EVAL,
        accepted_groups=40,
        queued_groups=8,
        queued_sequences=64,
        leased_groups=2,
        trained_groups=29,
    )
    return train, aside


def test_the_splits_add_up_to_the_ledger(
    make_pressure: Callable[..., Pressure], make_lane: Callable[..., LaneStatus]
) -> None:
    pressure = make_pressure(ledger=LEDGER, lanes=lanes(make_lane), queued_sequences=96)
    both = counts.counted(pressure)
    assert both.eval == SplitCounts(40, 8, 2, 29, 1, 64)
    assert both.train == SplitCounts(60, 12, 8, 26, 14, 96)
    for one in both:
        assert one.accepted == one.queued + one.leased + one.trained + one.untrained


def test_status_and_top_have_the_same_counts(
    make_pressure: Callable[..., Pressure], make_lane: Callable[..., LaneStatus]
) -> None:
    pressure = make_pressure(ledger=LEDGER, lanes=lanes(make_lane), queued_sequences=96)
    reply = StatusReply(
        pressure=pressure,
        run="r",
        total_steps=0,
        durability="disk",
        uptime_s=1.0,
        rejected_messages=0,
        rejected_by_reason={},
    )
    board = RunState.of(RunConfig(environment={"math": EnvironmentConfig(entry="a:B")}))
    board.feed(pressure, 1.0)
    text = status_text(reply)
    for line in ("train: accepted 60 = queued 12 + leased 8", "eval: accepted 40 = queued 8 + leased 2"):
        assert line in text
        assert any(line in row.plain for row in ledger_lines(pressure))
    assert "96 sequences in 12 groups and 8 of evaluation" in text
    assert "12 groups and 8 of evaluation" in queue_line(board, pressure).plain
    assert snapshot(board, 1.0, 1.0)["counts"] == status_json(reply)["counts"]
    json.dumps(snapshot(board, 1.0, 1.0))


def test_without_evaluation_the_ledger_has_every_state(make_pressure: Callable[..., Pressure]) -> None:
    (line,) = counts.lines(make_pressure(ledger=LEDGER))
    assert line.endswith("+ filtered 5 + expired 4 + dead 3 + discarded 3")
    assert counts.queued(make_pressure(ledger=LEDGER)) == "20 groups"
