"""The number of workers in runs of processes: a broker, an orchestrator, its workers, engines and a trainer.

The decisions are read from `decisions.jsonl`: no worker that was there for a moment only is missed.
"""

from pathlib import Path
from typing import Any, Final

import pytest
from tests.faults.support.fleet import ENGINES, PacedTrainer, decisions, first_engine, last, moves, peak
from tests.faults.support.processes import wait_until
from tests.faults.support.staff import GROUP, Staff, Staffed

from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.monitor.status.worker_view import supervision_of
from rolloutmq.services.orchestrator.autoscaling.control_law import INFERENCE_BOUND

SLOTS: Final = 2
"""Concurrent rollouts of a worker."""
BATCH: Final = 8 * GROUP
TICK_S: Final = 0.5
"""Longer than the time between two messages of the broker."""


def reason(staff: Staff) -> str:
    """Return the reason for the number of workers, as `status` shows it."""
    known = supervision_of(staff.layout)
    return known.targets[0].reason if known is not None and known.targets else ""


def ready(layout: RunLayout, env: str = "e") -> int:
    """Return the ready workers at the last decision."""
    found = last(layout, env)
    return 0 if found is None else found.sample.crew.ready


def engines(layout: RunLayout) -> int:
    """Return the engines at the last decision."""
    found = last(layout)
    return 0 if found is None else found.sample.engines


def pace(own_s: float) -> float:
    """Return the sequences per second of a worker whose rollouts take so long."""
    return SLOTS * GROUP / own_s


def slow(own_s: float, **about: Any) -> dict[str, Any]:
    """Return an environment with rollouts of this length."""
    start_s = about.pop("start_s", 0.0)
    options = {"own_s": own_s, "start_s": start_s}
    return {"entry": "envs.py:Slow", "options": options, "concurrency": SLOTS, **about}


@pytest.mark.extended
def test_a_full_server_is_found_in_a_fresh_start_and_another_engine_brings_more_workers(
    staffed: Staffed, run_dir: Path
) -> None:
    """The trainer wants three times what the engine can answer; without a bound all 40 workers would start."""
    full, answers_per_s = 5, 12.0  # five workers with two rollouts of 0.75 s and a turn of 0.08 s
    served = slow(0.75, max_workers=40) | {"entry": "envs.py:Served"}
    inference = {"kind": "tiny", "max_engines": 2, "engine_confirm_s": 5.0}
    layout = RunLayout(run_dir)
    about = {"e": served, "inference": inference, "batch": BATCH, "orchestrator": {"tick_s": TICK_S}}
    with (
        first_engine(run_dir, answers_per_s),
        staffed((*ENGINES, str(answers_per_s)), **about) as (_, staff),
        PacedTrainer(run_dir, BATCH, 3 * answers_per_s * GROUP),
    ):
        wait_until(lambda: INFERENCE_BOUND in reason(staff), "the bound in status")
        wait_until(layout.engine("inference-1").exists, "another engine")
        known = staff.supervision().engines
        assert known is not None
        assert known.target == 2
        wait_until(lambda: engines(layout) == 2, "that it counts")
        alone = [one for one in decisions(layout) if one.sample.engines == 1]
        assert peak(alone) <= 2 * full
        assert alone[-1].decision.bound == INFERENCE_BOUND
        assert alone[-1].decision.target <= 1.25 * full + 1
        most = alone[-1].sample.crew.ready
        wait_until(lambda: ready(layout) > most + 1, "more workers")


@pytest.mark.extended
def test_workers_are_kept_over_pauses_shorter_than_a_start(staffed: Staffed, run_dir: Path) -> None:
    """`down_window_s` is far shorter than the pauses of the trainer; the measured start is longer."""
    start_s, pause_s, needed = 5.0, 4.0, 4
    scaling = {"down_window_s": 1.0, "confirm_down_s": 0.5}
    about = {"e": slow(0.5, start_s=start_s, max_workers=12), "batch": BATCH}
    layout, per_s = RunLayout(run_dir), (needed - 0.3) * pace(0.5)
    with (
        staffed(**about, orchestrator={"tick_s": TICK_S, "scaling": scaling}),
        PacedTrainer(run_dir, BATCH, per_s, every=int(4.0 * per_s / BATCH), pause_s=pause_s) as trainer,
    ):
        wait_until(lambda: ready(layout) >= needed, "the workers that are needed")
        before = len(trainer.pauses)
        wait_until(lambda: len(trainer.pauses) >= before + 3, "pauses")
        began, ended = trainer.pauses[before][0], trainer.pauses[-1][1]
        seen = [one for one in decisions(layout) if began <= one.now <= ended]
        assert seen[-1].sample.crew.start_s >= start_s
        assert moves(seen) <= 3
        starved_s = seen[-1].sample.starved_s - seen[0].sample.starved_s
        assert starved_s <= 0.2 * (ended - began)


@pytest.mark.extended
def test_a_budget_keeps_the_weights_of_groups(staffed: Staffed, run_dir: Path) -> None:
    """Weights 3:1 and six processes: a worker of `a` makes half as much again, so four of its workers make three
    quarters. By the weights alone it had five, and 88 %."""
    about = {
        "a": slow(0.5, weight=3.0, max_workers=6),
        "b": slow(0.75, weight=1.0, max_workers=6),
        "orchestrator": {"tick_s": TICK_S, "max_processes": 6},
        "batch": BATCH,
    }
    layout, wanted = RunLayout(run_dir), 2 * (4 * pace(0.5) + 2 * pace(0.75))
    with staffed(**about), PacedTrainer(run_dir, BATCH, wanted) as trainer:
        wait_until(
            lambda: ready(layout, "a") > 1 and ready(layout, "b") > 1, "a division by what is measured"
        )
        wait_until(lambda: ready(layout, "a") + ready(layout, "b") == 6, "six workers")
        groups = trainer.until_more(300)
        assert 0.70 <= groups["a"] / groups.total() <= 0.80
        assert all(
            a.sample.crew.ready + b.sample.crew.ready <= 6
            for a, b in zip(decisions(layout, "a"), decisions(layout, "b"), strict=False)
        )


@pytest.mark.extended
def test_a_large_first_batch_is_not_rushed_at(staffed: Staffed, run_dir: Path) -> None:
    """Sixteen workers would make the first batch within 15 s; how soon the second one is wanted is unknown."""
    batch = int(16 * 15.0 * pace(0.25)) // GROUP * GROUP
    about = {
        "e": slow(0.25, min_workers=2, max_workers=30),
        "batch": batch,
        "broker": {"high_groups": 4 * batch},
    }
    layout = RunLayout(run_dir)
    with (
        staffed(**about, orchestrator={"tick_s": TICK_S}),
        PacedTrainer(run_dir, batch, batch / 60.0) as trainer,
    ):
        wait_until(lambda: trainer.pulled, "the first batch")
        assert 2 < peak(decisions(layout)) <= 8
