import pytest

from rolloutmq.services.orchestrator.simulation.plant import DT_S, Plant, PlantParameters

EXACT = PlantParameters(noise=0.0, start_s=10.0)


def run(plant: Plant, seconds: float) -> None:
    for _ in range(round(seconds / DT_S)):
        plant.advance()


def test_a_queue_integrates_what_is_made_less_what_is_eaten() -> None:
    plant = Plant(EXACT, lambda _: 10.0, seed=0, ready=10, level=200.0)
    run(plant, 60)
    assert plant.made == pytest.approx(1200.0)
    assert plant.level == pytest.approx(200.0 + plant.made - plant.eaten - 64)
    assert plant.eaten % 64 == 0
    assert plant.eaten == pytest.approx(600.0, abs=64.0)
    assert plant.trainer_waited_s == pytest.approx(0.0, abs=DT_S)


def test_a_trainer_that_is_too_fast_waits_for_the_rest_of_its_time() -> None:
    plant = Plant(EXACT, lambda _: 40.0, seed=0, ready=10)
    run(plant, 400)
    assert plant.eaten / (400.0 - plant.trainer_waited_s) == pytest.approx(40.0, rel=0.03)
    assert plant.trainer_waited_s == pytest.approx(200.0, rel=0.05)


def test_workers_wait_above_the_cap_and_nothing_is_lost() -> None:
    plant = Plant(EXACT, lambda _: 0.0, seed=0, ready=10)
    run(plant, 100)
    assert plant.level == EXACT.cap
    assert plant.workers_waited_s == pytest.approx(10 * 50.0, rel=0.02)


def test_workers_take_time_to_start_and_those_that_start_go_first() -> None:
    plant = Plant(EXACT, lambda _: 0.0, seed=3)
    plant.scale(5)
    run(plant, 5)
    assert (plant.crew.ready, plant.crew.starting) == (0, 5)
    plant.scale(3)
    run(plant, 8)
    assert (plant.crew.ready, plant.crew.starting) == (3, 0)
    plant.scale(1)
    assert plant.crew.draining == 2
    run(plant, 60)
    assert (plant.crew.ready, plant.crew.draining, plant.moved) == (1, 0, 9)


def test_what_is_shared_bounds_all_of_them() -> None:
    plant = Plant(PlantParameters(noise=0.0, shared=12.0, cap=10_000), lambda _: 0.0, seed=0, ready=100)
    run(plant, 100)
    assert plant.made == pytest.approx(1200.0)


def test_the_same_seed_gives_the_same() -> None:
    def final(seed: int) -> tuple[float, float]:
        plant = Plant(PlantParameters(failures=0.3), lambda _: 30.0, seed)
        plant.scale(20)
        run(plant, 120)
        return plant.made, plant.level

    assert final(7) == final(7)
    assert final(7) != final(8)
