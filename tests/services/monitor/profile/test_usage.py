"""Use of time, summed over the events of a run."""

import pytest

from rolloutmq.services.monitor.profile.usage import LaneLine, UsageLine, WorkerLine, read_usage

READY, GONE = WorkerLine("sort3", "ready"), WorkerLine("sort3", "gone")


def pressure(t: float, *workers: WorkerLine, epoch: int = 1, trainers: int = 1, **sums: object) -> UsageLine:
    """Return the event of a broker that has settled a batch, unless `settled_busy_s` says 0."""
    sums = {"settled_busy_s": t} | sums
    return UsageLine(t=t, kind="pressure", epoch=epoch, trainers=trainers, workers=workers, **sums)  # type: ignore[arg-type]


def test_time_is_summed_from_one_event_to_the_next() -> None:
    lines = [
        pressure(10.0, READY, trainers=0),
        pressure(12.0, READY, READY),
        pressure(13.0, READY, GONE, starved_s=0.5, trainer_waits_s={"no_batch": 0.5}),
        pressure(14.0, blocked_s={"sort3": 6.0}, starved_s=0.5, producer_waits_s={"no_credit": 3.0}),
    ]
    found = read_usage(lines, {"sort3": 4})
    assert (found.start_s, found.trainer_s) == (0.0, 2.0)
    assert found.slot_s == {"sort3": 4 * (2 + 1)}
    assert (found.starved, found.blocked) == (0.25, 0.5)
    assert found.producer_waits_s == {"no_credit": 3.0}
    assert read_usage(lines, {}).slot_s == {"sort3": 3.0}


def test_the_time_to_the_first_settled_batch_is_told_apart() -> None:
    lines = [
        pressure(10.0, READY, settled_busy_s=0.0),
        pressure(15.0, READY, settled_busy_s=0.0, starved_s=5.0, trainer_waits_s={"no_batch": 5.0}),
        pressure(16.0, READY, starved_s=5.5, trainer_waits_s={"no_batch": 5.5}, blocked_s={"sort3": 4.0}),
        pressure(20.0, READY, starved_s=6.5, trainer_waits_s={"no_batch": 6.5}, blocked_s={"sort3": 5.0}),
    ]
    found = read_usage(lines, {})
    assert (found.start_s, found.trainer_s, found.starved_s) == (6.0, 4.0, 1.0)
    assert (found.trainer_waits_s, found.blocked_s) == ({"no_batch": 1.0}, {"sort3": 1.0})


def test_each_life_of_the_broker_has_its_own_sums() -> None:
    lines = [
        pressure(10.0, epoch=1, starved_s=1.0, trainer_waits_s={"no_batch": 1.0}),
        pressure(11.0, epoch=1, starved_s=2.0, trainer_waits_s={"no_batch": 2.0}),
        pressure(500.0, epoch=2, starved_s=0.5, trainer_waits_s={"min_share": 0.5}),
        pressure(504.0, epoch=2, starved_s=1.0, trainer_waits_s={"min_share": 1.0}),
        pressure(520.0, epoch=2, starved_s=1.0, trainer_waits_s={"min_share": 1.0}),
    ]
    found = read_usage(lines, {})
    assert found.trainer_s == 5.0  # nothing was recorded for the last 16 seconds, nor between the two
    assert found.starved_s == 1.5
    assert found.trainer_waits_s == {"no_batch": 1.0, "min_share": 0.5}


def test_servers_count_while_there_is_a_trainer_and_decisions_once_a_demand_is_known() -> None:
    def engine(busy: float) -> UsageLine:
        return UsageLine(t=1.0, kind="engine_sample", name="e", busy=busy)

    def decision(env: str, bound: str, want: float | None = 2.0) -> UsageLine:
        return UsageLine(t=1.0, kind="scale_decision", env=env, bound=bound, want=want)

    found = read_usage(
        [
            engine(0.0),
            pressure(10.0),
            *(engine(busy) for busy in (0.5, 1.0)),
            *(decision("a", bound) for bound in ("inference_bound", "inference_bound", "")),
            *(
                decision("b", bound, want)
                for bound, want in (("inference_bound", None), ("max_workers", 3.0))
            ),
        ],
        {},
    )
    assert found.busy == 0.75
    assert found.inference_bound == {"a"}


def test_what_rollouts_make_is_compared_with_the_growth_of_the_queue() -> None:
    def lanes(accepted: int, queued: int) -> tuple[LaneLine, ...]:
        return LaneLine(0, accepted, queued), LaneLine(1, 10 * accepted, 10 * queued)

    found = read_usage([pressure(1.0, lanes=lanes(100, 10)), pressure(2.0, lanes=lanes(200, 50))], {})
    assert (found.made, found.grown, found.queued) == (100, 40, 0.4)


def test_nothing_recorded_is_no_use() -> None:
    found = read_usage([], {})
    assert (found.starved, found.blocked, found.busy) == (0.0, 0.0, None)
    assert read_usage([pressure(1.0)], {}).trainer_s == 0.0


def test_a_gap_in_the_record_takes_the_waits_of_its_time_with_it() -> None:
    lines = [
        pressure(
            t,
            READY,
            starved_s=0.1 * t,
            trainer_waits_s={"no_batch": 0.1 * t},
            blocked_s={"sort3": 0.2 * t},
            producer_waits_s={"lane_full": 0.2 * t},
        )
        for t in (1.0, 6.0, 11.0, 1011.0, 1016.0, 1021.0)
    ]
    found = read_usage(lines, {})
    assert (found.trainer_s, found.slot_s) == (20.0, {"sort3": 20.0})
    assert [found.starved, found.blocked] == pytest.approx([0.1, 0.2])
    assert found.producer_waits_s == {"lane_full": pytest.approx(4.0)}


def test_slots_that_wait_for_an_absent_trainer_do_not_count() -> None:
    lines = [pressure(1.0 + t, READY) for t in range(10)]
    lines += [
        pressure(10.0 + t, READY, trainers=0, blocked_s={"sort3": t}, producer_waits_s={"global_full": t})
        for t in range(1, 90)
    ]
    found = read_usage(lines, {})
    assert (found.trainer_s, found.slot_s) == (10.0, {"sort3": 10.0})
    assert (found.blocked_s, found.producer_waits_s) == ({"sort3": 1.0}, {"global_full": 1.0})


def test_workers_left_out_of_the_record_count_by_their_state() -> None:
    def trimmed(t: float) -> UsageLine:
        return pressure(
            t, trimmed=("workers",), worker_states={"ready": 300, "silent": 5}, blocked_s={"a": 540.0 * t}
        )

    lines = [trimmed(1.0), trimmed(2.0)]
    found = read_usage(lines, {"a": 2})
    assert (found.slot_s, found.blocked, found.knows_slots) == ({"a": 600.0}, 0.9, True)
    assert read_usage(lines, {}).slot_s == {"a": 300.0}  # the configuration cannot be read
    several = read_usage(lines, {"a": 2, "b": 1})
    assert (several.slot_s, several.blocked_s, several.unknown_slots_s) == ({}, {}, 1.0)
    assert not several.knows_slots


def test_the_most_workers_that_were_ready_at_once_are_told() -> None:
    two = (WorkerLine("a", "ready"), WorkerLine("b", "ready"), WorkerLine("b", "starting"))
    lines = [pressure(0.0, settled_busy_s=1.0), pressure(1.0, *two), pressure(2.0, two[0]), pressure(3.0)]
    assert read_usage(lines, {}).workers == 2
    trimmed = [pressure(float(t), trimmed=("workers",), worker_states={"ready": 300}) for t in range(3)]
    assert read_usage([lines[0], *trimmed], {"a": 1, "b": 1}).workers == 300


def test_a_life_that_settled_nothing_is_told_so() -> None:
    looked_at = [pressure(1000.0 + t, trainers=0, epoch=2, settled_busy_s=0.0) for t in range(50)]
    assert not read_usage(looked_at, {}).has_settled
    found = read_usage([pressure(1.0), pressure(2.0), *looked_at], {})
    assert (found.has_settled, found.start_s, found.trainer_s) == (True, 0.0, 1.0)
    begun = [pressure(1000.0 + t, epoch=2, settled_busy_s=0.0) for t in range(50)]
    assert read_usage([pressure(1.0), *begun], {}).start_s == 49.0


def test_time_in_which_no_worker_is_ready_is_told() -> None:
    lines = [
        pressure(1.0, worker_states={"ready": 1}),
        pressure(2.0, worker_states={"fatal": 1}),
        pressure(5.0, worker_states={}),
        pressure(9.0),
    ]
    found = read_usage(lines, {})
    assert (found.is_unrecorded, found.workerless_s) == (False, 3.0)
    assert read_usage([], {}).is_unrecorded


def test_a_wait_for_the_disk_is_part_of_the_whole_run_as_of_the_rest() -> None:
    waits = [
        {"journal_slow": 2.0},
        {"journal_slow": 5.0, "unsettled": 1.0},
        {"journal_slow": 6.0, "unsettled": 9.0},
    ]
    lines = [
        pressure(10.0 + n, trainers=2, starved_s=1.0, trainer_waits_s=one) for n, one in enumerate(waits)
    ]
    found = read_usage(lines, {})
    assert found.run_starved_s == 1.0 + (2.0 + 3.0 + 1.0) / 2  # two ranks; those at work lack no batch
    assert found.starved_s == (3.0 + 1.0) / 2
