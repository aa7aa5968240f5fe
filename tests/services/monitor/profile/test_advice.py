"""Advice names what limits a run."""

from dataclasses import replace

import pytest

from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.services.monitor.profile.advice import FASTER_DISK, ROOM, SLOTS, TRAINER, advice
from rolloutmq.services.monitor.profile.usage import Usage


def used(
    *,
    starved: float = 0.0,
    blocked: float = 0.0,
    trainer: str = "no_batch",
    workers: str = "stale_guard",
    busy: float | None = None,
    bound: frozenset[str] = frozenset(),
    grown: int = 0,
) -> Usage:
    return Usage(
        has_settled=True,
        trainer_s=100.0,
        trainer_waits_s={trainer: 100 * starved, "other": 0.0},
        slot_s={"sort3": 1000.0},
        blocked_s={"sort3": 1000 * blocked},
        producer_waits_s={workers: blocked, "other": 0.0},
        busy=busy,
        inference_bound=bound,
        made=100,
        grown=grown,
    )


@pytest.mark.parametrize(
    ("usage", "where", "change"),
    [
        (used(starved=0.6), "the trainer waits 60% of its time for a batch (no_batch)", "more workers"),
        (used(starved=0.6, busy=0.95), "(no_batch)", "more inference"),
        (used(starved=0.6, busy=0.3, bound=frozenset({"a"})), "(no_batch)", "more inference"),
        (used(starved=0.6, busy=0.95, blocked=0.5, workers="global_full"), "(no_batch)", "a larger mark"),
        (used(starved=0.6, blocked=0.5), "(no_batch)", "a larger `max_staleness`"),
        (used(starved=0.6, trainer="batch_exceeds_cap"), "(batch_exceeds_cap)", "a larger mark"),
        (used(starved=0.6, trainer="no_exact_fit"), "(no_exact_fit)", "smaller groups"),
        (used(starved=0.6, trainer="too_few_groups"), "(too_few_groups)", "smaller groups"),
        (used(starved=0.6, trainer="journal_slow"), "(journal_slow)", "a faster disk"),
        (
            used(blocked=0.54),
            "rollout slots wait 54% of their time (stale_guard)",
            "a faster trainer, or 54% fewer",
        ),
        (used(blocked=0.54, workers="no_tasks"), "(no_tasks)", "fewer workers, or more tasks"),
        (used(bound=frozenset({"b", "a"}), busy=1.0), "hold back the workers of a, b", "more inference"),
        (used(grown=40), "the queue grows by 40% of the sequences", "a faster trainer, or 40% fewer workers"),
        (used(starved=0.6, grown=40), "(no_batch)", "more workers"),
        (used(starved=0.05, blocked=0.02), "nobody waits for more than 5% of the time", "balanced"),
        (used(starved=0.9, trainer="unsettled"), "nobody waits for more than 0%", "balanced"),
        (
            used(starved=0.3, trainer="evaluation"),
            "waits 30% of its time for the evaluation",
            "`evaluation.tasks`",
        ),
        (used(starved=0.05, trainer="evaluation"), "nobody waits for more than 0%", "balanced"),
        (Usage(is_unrecorded=True), "no event of the broker was recorded", "rolloutmq telemetry -r RUN"),
        (replace(used(starved=0.9), workerless_s=80.0), "(no_batch)", "no worker is ready most of that time"),
        (Usage(), "no trainer has settled a batch", "rolloutmq status"),
    ],
)
def test_the_limit_is_named_with_what_to_change(usage: Usage, where: str, change: str) -> None:
    (one,) = advice(usage)
    assert where in one.where
    assert change in one.change


@pytest.mark.parametrize(
    ("disk", "changes"),
    [
        (0.15, ["a faster trainer, or 80% fewer workers", FASTER_DISK]),
        (0.05, ["a faster trainer, or 80% fewer workers"]),
        (0.6, [FASTER_DISK]),  # a faster trainer would wait as long
    ],
)
def test_a_trainer_that_waits_for_the_disk_may_be_slow_itself(disk: float, changes: list[str]) -> None:
    found = advice(used(starved=disk, trainer="journal_slow", blocked=0.8))
    assert [one.change for one in found] == changes


def test_slots_that_are_not_known_are_not_said_to_wait_for_nothing() -> None:
    (one,) = advice(Usage(trainer_s=100.0, unknown_slots_s=100.0))
    assert "of the rollout slots nothing is known" in one.where
    waits = Usage(trainer_s=100.0, unknown_slots_s=100.0, trainer_waits_s={"no_batch": 60.0})
    (one,) = advice(waits)
    assert one.change == "more workers, unless `rolloutmq status` says that they wait"


def test_reasons_are_those_of_the_wire() -> None:
    assert {*TRAINER, *ROOM, *SLOTS} <= set(Wait)


@pytest.mark.parametrize(
    ("workers", "share", "change"),
    [
        (1, 0.9, "a faster trainer"),
        (2, 0.2, "a faster trainer"),
        (2, 0.31, "a faster trainer, or 31% fewer workers"),
        (40, 0.31, "a faster trainer, or 31% fewer workers"),
        (0, 0.31, "a faster trainer, or 31% fewer workers"),
    ],
)
def test_a_run_without_a_worker_to_spare_is_not_told_to_have_fewer(
    workers: int, share: float, change: str
) -> None:
    for usage in (used(blocked=share), used(grown=round(100 * share))):
        assert [one.change for one in advice(replace(usage, workers=workers))] == [change]
    (tasks,) = advice(replace(used(blocked=share, workers="no_tasks"), workers=workers))
    assert tasks.change == ("more tasks" if workers == 1 else "fewer workers, or more tasks")


@pytest.mark.parametrize(
    ("fewest", "change"),
    [
        (6, "a faster trainer, or 40% fewer workers"),
        (7, "a faster trainer, or 40% fewer workers: lower `min_workers`"),
    ],
)
def test_fewer_workers_than_the_configuration_allows_need_another_configuration(
    fewest: int, change: str
) -> None:
    for usage in (used(blocked=0.4), used(grown=40)):
        assert [one.change for one in advice(replace(usage, workers=10), fewest)] == [change]
