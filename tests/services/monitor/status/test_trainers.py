"""A run tells that its trainer is away, silent, or not alone."""

from collections.abc import Callable
from typing import Any

from rolloutmq.schemas.wire.control import LaneStatus, LedgerCounts, Pressure, TrainerStatus
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.live import view
from rolloutmq.services.monitor.live.progress import describe
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.status import waits
from rolloutmq.services.monitor.status.trainers import NO_TROUBLE, trouble

MakePressure = Callable[..., Pressure]
MakeLane = Callable[..., LaneStatus]
QUEUED = LedgerCounts(accepted=24, queued=24)


def trainer(name: str = "trainer-0", **fields: Any) -> TrainerStatus:
    usual: dict[str, Any] = {"group": "trainer", "step": 9, "silent_s": 0.5, "connected": True}
    return TrainerStatus(consumer=name, **(usual | fields))


def gone(**fields: Any) -> TrainerStatus:
    return trainer(connected=False, silent_s=28.0, **fields)


def test_a_trainer_that_is_away_is_told_with_its_end(
    make_pressure: MakePressure, make_lane: MakeLane
) -> None:
    """Only `workers wait: stale_guard` was told."""
    for leaders, why in (
        ((), "none has come yet"),
        ((gone(),), "trainer-0 fell silent after step 9"),
        ((gone(step=0),), "trainer-0 fell silent before its first step"),
        ((gone(has_left=True),), "trainer-0 left after step 9"),
    ):
        seen = make_pressure(
            lanes=(make_lane(wait="stale_guard"),), ledger=QUEUED, leaders=leaders, untrained_s=28.0
        )
        told = trouble(seen, 400, is_own=True)
        assert told.short == "no trainer is connected"
        assert told.text == (
            f"no trainer has been connected for 0:28: {why}; start yours on this run directory"
        )
        assert waits.explain(seen, trainers=told).startswith(f"{told.text}; workers wait: stale_guard")


def test_no_trainer_is_missed_before_it_can_be_there_or_after_the_last_step(
    make_pressure: MakePressure, make_lane: MakeLane
) -> None:
    away: dict[str, Any] = {"lanes": (make_lane(),), "ledger": QUEUED, "untrained_s": 28.0}
    assert trouble(make_pressure(**away)) == NO_TROUBLE, "the launcher starts it"
    assert trouble(make_pressure(**away | {"untrained_s": 31.0})).text.endswith("none has come yet")
    assert trouble(make_pressure(**away, trainers=1), is_own=True) == NO_TROUBLE, "its first rank is to come"
    assert trouble(make_pressure(**away | {"untrained_s": 4.0}), is_own=True) == NO_TROUBLE
    assert trouble(make_pressure(**away, step=40), 40, is_own=True) == NO_TROUBLE
    assert trouble(make_pressure(**away | {"ledger": LedgerCounts(leased=4)}), is_own=True) == NO_TROUBLE
    only_evaluates = away | {"lanes": (make_lane(split=Split.EVAL),)}
    assert trouble(make_pressure(**only_evaluates), is_own=True) == NO_TROUBLE


def test_a_silent_trainer_is_told_before_it_counts_as_gone(make_pressure: MakePressure) -> None:
    assert trouble(make_pressure(trainers=1, leaders=(trainer(silent_s=2.0),))) == NO_TROUBLE
    told = trouble(make_pressure(trainers=1, leaders=(trainer(silent_s=7.0),)))
    assert told.text == (
        "consumer trainer-0 has been silent for 0:07 after step 9; its process is stopped, or it hangs"
    )


def test_several_trainers_are_told_with_their_steps(make_pressure: MakePressure) -> None:
    told = trouble(make_pressure(trainers=2, leaders=(trainer("t1"), trainer("t2", step=8))))
    assert told.short == "2 trainers"
    assert "each with steps of its own: t1 at step 9, t2 at step 8; end all but one" in told.text


def test_the_live_views_show_it(make_pressure: MakePressure) -> None:
    board = RunState("r", 400, 0.5, 2.0, {"e": 4})
    board.feed(make_pressure(trainers=1, leaders=(trainer(silent_s=7.0),)), 1.0)
    assert "  the trainer is silent" in describe(board, 1.0)
    lines = [line.plain for line in view.wait_lines(board, make_pressure(), 1.0)]
    assert lines[0].startswith(" trainer consumer trainer-0 has been silent for 0:07 after step 9")
