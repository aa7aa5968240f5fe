"""The plant: workers, queues and the trainer, in exact numbers where nothing is random."""

import math
import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from rolloutmq.services.orchestrator.simulation.plant import DT_S, Lane, Plant
from rolloutmq.services.orchestrator.simulation.series import constant, steps
from rolloutmq.services.orchestrator.simulation.site import EnvironmentSite, ServerSite, Site, TrainerSite


def worker(**changed: Any) -> EnvironmentSite:
    """Return an environment of ten ready workers that make one sequence per second each, exactly."""
    exact: dict[str, Any] = {"per_worker": constant(1.0), "start_s": 10.0, "noise": 0.0, "ready": 10}
    return EnvironmentSite(**(exact | changed))


def plant_of(
    *environments: EnvironmentSite,
    demand: float = 0.0,
    servers: Mapping[str, ServerSite] | None = None,
    seed: int = 0,
    **trainer: Any,
) -> tuple[Plant, list[Lane]]:
    site = Site(
        TrainerSite(constant(demand), **trainer),
        {f"env{place}": one for place, one in enumerate(environments)},
        servers or {},
    )
    plant = Plant(site, seed)
    return plant, list(plant.lanes.values())


def run(plant: Plant, seconds: float) -> None:
    for _ in range(round(seconds / DT_S)):
        plant.advance()


def test_a_queue_integrates_what_is_made_less_what_is_eaten() -> None:
    plant, (lane,) = plant_of(worker(), demand=10.0, queued=200.0)
    run(plant, 60)
    assert lane.made == pytest.approx(600.0)
    assert lane.level == pytest.approx(200.0 + lane.made - lane.eaten - lane.held)
    assert (lane.held, lane.eaten % 64) == (64.0, 0.0)
    assert lane.eaten == pytest.approx(600.0, abs=64.0)
    assert plant.trainer_waited_s == pytest.approx(0.0, abs=DT_S)


def test_turns_complete_within_a_rollout() -> None:
    """Ten workers with twenty sequences each, of ten turns in 20 s."""
    one = worker(per_worker=constant(1.0), rollout_s=20.0, turns=10, group_sequences=5)
    plant, (lane,) = plant_of(one, queue=10000)
    run(plant, 1)
    assert (lane.completions, lane.made) == (0.0, 0.0)
    run(plant, 9)
    assert lane.made == 0.0
    assert lane.completions == pytest.approx(200 * 4.5, rel=0.1)
    run(plant, 290)
    assert lane.made == pytest.approx(10 * 300.0 - 200, rel=0.05)
    assert lane.completions == pytest.approx(10 * 10 * 300.0, rel=0.05)


def test_workers_that_are_sent_away_finish_their_rollouts_and_the_others_begin_no_more_for_it() -> None:
    one = worker(ready=20, rollout_s=50.0, turns=10, group_sequences=5)
    plant, (lane,) = plant_of(one, queue=10000)
    run(plant, 100)
    before = lane.made
    lane.crew.scale(10, plant.now)
    run(plant, 100)
    assert lane.made - before == pytest.approx(20 * 50.0 + 10 * 50.0, rel=0.15)
    before = lane.made
    run(plant, 200)
    assert lane.made - before == pytest.approx(10 * 200.0, rel=0.1)


def test_a_full_server_slows_turns_at_once() -> None:
    one = worker(rollout_s=200.0, turns=20, server="engine")
    plant, (lane,) = plant_of(one, servers={"engine": ServerSite(constant(5.0))}, queue=10000)
    run(plant, 100)
    before = lane.completions
    run(plant, 50)
    assert lane.completions - before == pytest.approx(20 * 5.0 * 50, rel=0.1)


def test_a_trainer_that_is_too_fast_waits_for_the_rest_of_its_time() -> None:
    plant, (lane,) = plant_of(worker(), demand=40.0)
    run(plant, 400)
    assert lane.eaten / (400.0 - plant.trainer_waited_s) == pytest.approx(40.0, rel=0.03)
    assert plant.trainer_waited_s == pytest.approx(300.0, rel=0.03)
    assert plant.settled_busy_s == pytest.approx(lane.eaten / 40.0, abs=2 * DT_S), "waits are taken out"


def test_a_trainer_takes_several_batches_in_one_step() -> None:
    plant, (lane,) = plant_of(worker(ready=0), demand=640.0, queued=1000.0, batch=10)
    run(plant, 1)
    assert lane.eaten == pytest.approx(640.0, abs=10.0), "64 batches in a second, at 4 steps"
    assert plant.trainer_waited_s == 0.0


def test_batches_change_over_time() -> None:
    part = steps((0.0, 0.25), (40.0, 1.0))
    plant, (lane,) = plant_of(worker(ready=0), demand=8.0, queued=900.0, batch=64, batch_part=part)
    run(plant, 39)
    assert (lane.held, lane.eaten % 16, plant.site.trainer.batch_at(39.0)) == (16.0, 0.0, 16)
    assert lane.eaten == pytest.approx(39 * 8.0, abs=16.0)
    run(plant, 9)
    assert lane.held == 64.0
    assert plant.trainer_waited_s == 0.0


def test_a_trainer_in_a_pause_neither_takes_nor_waits() -> None:
    plant, (lane,) = plant_of(worker(ready=0), queued=100.0)
    run(plant, 60)
    assert (lane.level, lane.held, plant.trainer_waited_s) == (100.0, 0.0, 0.0)


def test_a_trainer_that_leaves_gives_its_batch_back() -> None:
    plant, (lane,) = plant_of(worker(ready=0), demand=1.0, queued=100.0, away=((10.0, 20.0),))
    run(plant, 9.75)
    assert (lane.level, lane.held, plant.has_trainer) == (36.0, 64.0, True)
    run(plant, 0.25)
    assert (lane.level, lane.held, lane.eaten, plant.has_trainer) == (100.0, 0.0, 0.0, False)
    run(plant, 10)
    assert (lane.level, lane.held, plant.has_trainer) == (36.0, 64.0, True)
    assert plant.trainer_waited_s == 0.0


def test_workers_wait_above_the_room_and_nothing_is_lost() -> None:
    plant, (lane,) = plant_of(worker(), queue=500)
    run(plant, 100)
    assert (lane.level, lane.made) == (500.0, 500.0)
    assert lane.waited_s == pytest.approx(10 * 50.0)


def test_rollouts_under_way_take_room_and_arrive_later() -> None:
    plant, (lane,) = plant_of(worker(rollout_s=30.0), queue=200)
    run(plant, 29.75)
    assert lane.made == 0.0
    assert lane.waited_s == pytest.approx(10 * 9.75)
    run(plant, 30)
    assert lane.made == pytest.approx(200.0)


def test_workers_take_time_to_start_and_those_that_start_go_first() -> None:
    plant, (lane,) = plant_of(worker(ready=0), seed=3)
    crew = lane.crew
    crew.scale(5, plant.now)
    run(plant, 5)
    assert (crew.counts.ready, crew.counts.starting, crew.counts.current) == (0, 5, 5)
    crew.scale(3, plant.now)
    run(plant, 8)
    assert (crew.counts.ready, crew.counts.starting) == (3, 0)
    crew.scale(1, plant.now)
    assert (crew.counts.draining, crew.holding, crew.alive) == (2, 3, 1)
    run(plant, 60)
    assert (crew.counts.ready, crew.counts.draining, crew.moved) == (1, 0, 9)


def test_the_start_time_is_measured_from_the_last_starts_and_those_under_way() -> None:
    site = worker(ready=0, start_s=50.0, start_part=steps((0.0, 0.2), (100.0, 1.0)))
    plant, (lane,) = plant_of(site)
    lane.crew.scale(20, plant.now)
    assert lane.crew.counts.start_s == 0.0, "nobody was ready yet"
    run(plant, 100)
    early_s = lane.crew.counts.start_s
    assert early_s == pytest.approx(10.0, abs=2.0)
    lane.crew.scale(40, plant.now)
    run(plant, 9)
    assert lane.crew.counts.start_s in (early_s, 9.0)
    run(plant, 26)
    assert lane.crew.counts.start_s == 35.0, "all of them take longer"
    run(plant, 60)
    assert lane.crew.counts.start_s == pytest.approx(50.0, abs=10.0), "the last nine"
    full, (ready,) = plant_of(worker(ready=20))
    run(full, 1)
    assert 8.0 < ready.crew.counts.start_s < 12.0, "those ready at the start were started before"


def test_failing_starts_are_repeated() -> None:
    plant, (lane,) = plant_of(worker(ready=0, failing_starts=0.5))
    lane.crew.scale(100, plant.now)
    run(plant, 12.5)
    assert lane.crew.ready == pytest.approx(50, abs=20)
    run(plant, 200)
    assert (lane.crew.ready, lane.crew.moved) == (100, 100)


def test_crashed_workers_start_again_and_are_no_moves() -> None:
    plant, (lane,) = plant_of(worker(ready=100, life_s=11.0))
    ready = []
    for _ in range(600):
        run(plant, 1)
        ready.append(lane.crew.ready)
        assert lane.crew.alive == 100
    assert sum(ready[100:]) / 500 == pytest.approx(50.0, rel=0.1), (
        "a life of 11 s, then 1 s and a start of 10 s"
    )
    assert lane.crew.counts.restarting == lane.crew.counts.starting > 0
    assert (lane.crew.moved, lane.crew.holding) == (0, lane.crew.ready)


def test_crashes_lose_the_rollouts_under_way() -> None:
    plant, (lane,) = plant_of(worker(rollout_s=60.0, lost=((30.0, 5),)))
    run(plant, 89)
    assert lane.made == pytest.approx(0.5 * 290.0, abs=5.0), "half of those that began before"
    run(plant, 30)
    assert lane.made == pytest.approx(150.0 + 145.0, abs=5.0)


def test_lost_workers_keep_their_place_for_a_while() -> None:
    plant, (lane,) = plant_of(worker(lost=((30.0, 4),)))
    run(plant, 30)
    assert (lane.crew.counts.ready, lane.crew.counts.failed, lane.crew.current) == (6, 4, 10)
    run(plant, 10)
    assert (lane.crew.counts.current, lane.crew.moved) == (6, 0)


def test_an_outage_makes_nothing() -> None:
    plant, (lane,) = plant_of(worker(outages=((10.0, 40.0),)), queue=10_000)
    run(plant, 100)
    assert lane.made == pytest.approx(700.0, abs=10 * DT_S)


def test_a_shared_server_bounds_all_of_its_workers_and_no_others() -> None:
    servers = {"engine": ServerSite(steps((0.0, 12.0), (50.0, 30.0)))}
    shared = worker(ready=60, server="engine")
    plant, (first, second, alone) = plant_of(
        shared, worker(ready=30, server="engine"), worker(), servers=servers, queue=100_000
    )
    run(plant, 50)
    assert first.made + second.made == pytest.approx(12.0 * 49.75 + 30.0 * DT_S)
    assert first.made == pytest.approx(2.0 * second.made)
    assert alone.made == pytest.approx(500.0)
    assert first.waited_s == 0.0, "they wait for the server, not for room"
    run(plant, 50)
    assert first.made + second.made == pytest.approx(12.0 * 49.75 + 30.0 * 50.25)


def test_rollouts_take_longer_on_a_full_server_and_their_measured_time_follows() -> None:
    servers = {"engine": ServerSite(steps((0.0, 12.0), (500.0, 240.0)))}
    shared = worker(ready=60, rollout_s=10.0, server="engine")
    plant, (lane,) = plant_of(shared, servers=servers, queue=1_000_000)
    assert lane.rollout_s == 10.0
    run(plant, 400)
    assert lane.rollout_s == pytest.approx(60 * 10.0 / 12.0, rel=0.02), "600 at once, 12 a second"
    made = lane.made
    run(plant, 99)
    assert lane.made - made == pytest.approx(12.0 * 99.0, rel=0.02)
    assert plant.servers["engine"].busy == pytest.approx(1.0, abs=0.01)
    lane.crew.scale(10, plant.now)
    run(plant, 11)
    assert lane.crew.counts.draining == 50, "rollouts under way end before their worker"
    run(plant, 90)
    assert lane.rollout_s == pytest.approx(10.0, rel=0.02)
    assert lane.made > made


def test_an_outage_holds_the_rollouts_under_way() -> None:
    plant, (lane,) = plant_of(worker(rollout_s=30.0, outages=((20.0, 80.0),)), queue=1000)
    run(plant, 89)
    assert lane.made == 0.0
    run(plant, 20)
    assert lane.made == pytest.approx(10 * 19.5, abs=5.0)
    assert 30.0 < lane.rollout_s <= 90.0


def test_the_rollout_time_is_unknown_before_the_first_group() -> None:
    plant, (lane,) = plant_of(worker(ready=0, rollout_s=30.0))
    lane.crew.scale(4, plant.now)
    run(plant, 30)
    assert lane.rollout_s == 0.0
    run(plant, 30)
    assert lane.rollout_s == pytest.approx(30.0)


def test_engines_take_time_to_start_and_share_the_load() -> None:
    servers = {"engine": ServerSite(constant(12.0), max_engines=3, start_s=20.0)}
    plant, (lane,) = plant_of(worker(ready=30, server="engine"), servers=servers, queue=100_000)
    server = plant.servers["engine"]
    run(plant, 10)
    assert server.counts.ready == 1
    assert server.busy == pytest.approx(1.0, abs=0.01)
    server.scale(3, plant.now)
    run(plant, 19.75)
    assert (server.counts.ready, server.counts.starting) == (1, 2)
    server.scale(1, plant.now)
    assert server.counts.current == 3, "none goes while another starts"
    before = lane.made
    run(plant, 10)
    assert lane.made - before == pytest.approx(300.0)
    assert server.counts.ready == 3
    assert server.busy == pytest.approx(2.5, abs=0.01)
    server.scale(2, plant.now)
    assert server.counts.ready == 2


def test_an_engine_is_idle_while_its_workers_wait_for_room() -> None:
    servers = {"engine": ServerSite(constant(12.0))}
    plant, _ = plant_of(worker(ready=30, server="engine"), servers=servers, queue=64)
    run(plant, 60)
    assert plant.servers["engine"].busy == pytest.approx(0.0, abs=0.01)


def test_batches_are_shared_by_weight_and_what_one_lacks_the_other_gives() -> None:
    plant, (heavy, light) = plant_of(
        worker(weight=3.0, ready=60), worker(ready=60, outages=((100.0, 200.0),)), demand=40.0, queue=400
    )
    assert (heavy.room, light.room) == (300.0, 100.0)
    run(plant, 100)
    assert heavy.eaten == pytest.approx(3.0 * light.eaten)
    before, waited_s = light.eaten, plant.trainer_waited_s
    run(plant, 100)
    assert light.eaten - before <= 100.0 + 16.0, "what was queued, and in training"
    assert plant.trainer_waited_s == waited_s
    behind, heavy_before = light.eaten, heavy.eaten
    run(plant, 100)
    made_up = light.eaten - behind - (heavy.eaten - heavy_before) / 3.0
    assert 0.0 < made_up <= 4.0 / 3.0 * 2.0 * 16.0 + 32.0, "two shares of a batch are made up for"


def test_the_same_seed_gives_the_same() -> None:
    def final(seed: int) -> tuple[float, float]:
        site = worker(noise=0.3, failing_starts=0.3, life_s=100.0)
        plant, (lane,) = plant_of(site, demand=30.0, seed=seed)
        lane.crew.scale(20, 0.0)
        run(plant, 120)
        return lane.made, lane.level

    assert final(7) == final(7)
    assert final(7) != final(8)


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_noise_does_not_change_the_mean(noise: float) -> None:
    plant, (lane,) = plant_of(worker(noise=noise), queue=1_000_000)
    run(plant, 1000)
    assert lane.made == pytest.approx(10_000.0, abs=4.0 * noise * math.sqrt(10_000.0))


@pytest.mark.parametrize(("noise", "ready"), [(3.0, 10), (0.5, 2)])
def test_noise_has_the_deviation_that_is_given(noise: float, ready: int) -> None:
    plant, (lane,) = plant_of(worker(noise=noise, ready=ready), queue=1_000_000)
    made = [0.0]
    for _ in range(4000):
        run(plant, 1)
        made.append(lane.made)
    seconds = [after - before for before, after in pairwise(made)]
    assert statistics.stdev(seconds) == pytest.approx(noise * math.sqrt(ready), rel=0.15)


@pytest.mark.parametrize("rate", [1.0, 300.0])
def test_groups_are_whole_and_come_at_random_times(rate: float) -> None:
    site = worker(per_worker=constant(rate), group_sequences=8)
    plant, (lane,) = plant_of(site, queue=10_000_000)
    made = [0.0]
    for _ in range(2000):
        run(plant, 1)
        made.append(lane.made)
    groups = [(after - before) / 8.0 for before, after in pairwise(made)]
    assert all(number == round(number) for number in groups)
    assert statistics.mean(groups) == pytest.approx(10 * rate / 8.0, rel=0.1)
    assert statistics.variance(groups) == pytest.approx(10 * rate / 8.0, rel=0.2), "as of a Poisson process"


@pytest.mark.parametrize("rollout_s", [0.0, 10.0])
@pytest.mark.parametrize("ready", [20, 80])
def test_a_full_server_makes_whole_groups_up_to_its_capacity(ready: int, rollout_s: float) -> None:
    """Twice and eight times the workers that fill it make as much."""
    servers = {"engine": ServerSite(constant(10.0))}
    shared = worker(ready=ready, rollout_s=rollout_s, group_sequences=16, server="engine")
    plant, (lane,) = plant_of(shared, servers=servers, queue=10_000_000)
    run(plant, 200)
    made = [lane.made]
    for _ in range(4000):
        run(plant, 1)
        made.append(lane.made)
    groups = [(after - before) / 16.0 for before, after in pairwise(made)]
    assert all(number == pytest.approx(round(number)) for number in groups)
    assert (made[-1] - made[0]) / 4000 == pytest.approx(10.0, rel=0.06)
    assert statistics.variance(groups) == pytest.approx(10.0 / 16.0, rel=0.2)


def test_workers_without_room_wait_also_while_no_group_is_due() -> None:
    plant, (lane,) = plant_of(worker(ready=1, group_sequences=8), queue=64)
    run(plant, 1000)
    waited_s = lane.waited_s
    assert lane.level == 64.0
    run(plant, 100)
    assert lane.waited_s - waited_s == pytest.approx(100.0)


@pytest.mark.parametrize("turns", [1, 10])
def test_a_worker_tells_of_all_groups_that_it_rolls_out_at_once(turns: int) -> None:
    """Two sequences per second for 90 s are 180 at once, in groups of twelve."""
    one = worker(per_worker=constant(2.0), rollout_s=90.0, turns=turns, group_sequences=12)
    assert one.slots == 15
    assert worker().slots == 1


@pytest.mark.parametrize("turns", [1, 3])
def test_crashes_lose_no_more_than_their_own_rollouts(turns: int) -> None:
    """Half of a life is shorter than a thousand seconds of them: what is left is counted anew, not lost."""
    one = worker(ready=40, life_s=20.0, start_s=2.0, rollout_s=6.0, turns=turns, group_sequences=2)
    plant, (lane,) = plant_of(one, queue=10**6)
    run(plant, 60)
    made, quiet_s = lane.made, 0
    for _ in range(1000):
        run(plant, 1)
        quiet_s, made = (quiet_s + 1 if lane.made == made else 0), lane.made
        assert quiet_s < 3
