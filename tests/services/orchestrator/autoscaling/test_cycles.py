import pytest

from rolloutmq.services.orchestrator.autoscaling.cycles import FIRST_S, OVERDUE, DemandCycles


class Trainer:
    """A trainer whose demand is seen once a second."""

    def __init__(self) -> None:
        self.cycles = DemandCycles()
        self.now = 1000.0
        self.eaten = 500.0

    def eats(self, rate: float, seconds: int, *, waits: float = 0.0, is_full: bool = False) -> DemandCycles:
        for _ in range(seconds):
            self.now += 1.0
            self.eaten += (1.0 - waits) * rate
            self.cycles = self.cycles.looked(self.now, round(self.eaten), rate, waits, is_full=is_full)
        return self.cycles

    def cycle(self, times: int = 1) -> DemandCycles:
        """Consume 8,000 sequences within 20 s of 200, so many times."""
        for _ in range(times):
            self.eats(400.0, 20)
            self.eats(0.0, 180)
        return self.cycles


@pytest.fixture
def trainer() -> Trainer:
    trainer = Trainer()
    trainer.eats(40.0, 60)
    return trainer


def test_two_whole_cycles_tell_the_mean(trainer: Trainer) -> None:
    assert not trainer.cycle(2).is_known
    assert trainer.eats(400.0, 2).is_known
    assert trainer.cycles.mean == pytest.approx(40.0)
    assert trainer.cycle(5).mean == pytest.approx(40.0)


def test_a_steady_demand_of_hours_ago_does_not_hide_cycles() -> None:
    trainer = Trainer()
    trainer.eats(100.0, 5 * 3600)
    seconds = 0
    while not trainer.cycles.is_known:
        trainer.eats(100.0 if seconds % 200 < 40 else 0.5, 1)
        seconds += 1
    assert seconds <= FIRST_S + 200


def test_what_a_waiting_trainer_would_have_consumed_counts(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.eats(400.0, 20, waits=0.7)
        trainer.eats(0.0, 180)
    assert trainer.cycles.mean == pytest.approx(40.0, rel=0.05)


def test_a_burst_is_expected_to_consume_as_much_as_the_last(trainer: Trainer) -> None:
    trainer.cycle(2)
    assert trainer.eats(400.0, 5).left == pytest.approx(6000, abs=400)
    assert trainer.eats(400.0, 10).left == pytest.approx(2000, abs=400)
    assert trainer.eats(400.0, 30).left == 0, "this one consumes more"
    assert trainer.eats(0.0, 30).left == 0


def test_the_next_burst_comes_one_cycle_after_the_last(trainer: Trainer) -> None:
    assert trainer.cycle(2).rests_s == 0.0, "unknown"
    assert trainer.eats(400.0, 20).rests_s == 0.0, "it is a burst"
    assert trainer.eats(0.0, 60).rests_s == pytest.approx(120.0, abs=2.0)


@pytest.mark.parametrize("rates", [(40.0, 80.0), (80.0, 20.0), (10.0, 60.0), (39.0, 41.0)])
def test_a_change_of_demand_is_no_cycle(rates: tuple[float, float]) -> None:
    trainer = Trainer()
    for rate in rates:
        trainer.eats(rate, 900)
    assert not trainer.cycles.is_known


def test_a_demand_that_varies_less_is_no_cycle(trainer: Trainer) -> None:
    for _ in range(10):
        trainer.eats(60.0, 60)
        trainer.eats(40.0, 60)
    assert not trainer.cycles.is_known


def test_a_burst_that_does_not_come_ends_the_knowledge(trainer: Trainer) -> None:
    trainer.cycle(3)
    assert trainer.eats(0.0, round((OVERDUE - 1.0) * 200.0) - 5).is_known
    assert not trainer.eats(0.0, 10).is_known


def test_a_demand_that_stays_high_ends_it_too(trainer: Trainer) -> None:
    trainer.cycle(3)
    assert not trainer.eats(400.0, 420).is_known


def test_a_full_queue_is_remembered_until_the_next_burst(trainer: Trainer) -> None:
    trainer.cycle(2)
    trainer.eats(400.0, 20)
    assert not trainer.eats(0.0, 10).filled
    assert trainer.eats(0.0, 1, is_full=True).filled
    assert trainer.eats(0.0, 169).filled
    assert not trainer.eats(400.0, 1).filled


def test_a_counter_that_begins_anew_begins_the_cycles_anew(trainer: Trainer) -> None:
    trainer.cycle(3)
    trainer.eaten = 0.0
    assert not trainer.eats(400.0, 20).is_known


def test_an_unknown_demand_changes_nothing(trainer: Trainer) -> None:
    known = trainer.cycle(3)
    after = known.looked(trainer.now + 1.0, round(trainer.eaten), None, 0.0, is_full=False)
    assert (after.bursts, after.is_burst) == (known.bursts, False)
    assert known.rests_s == pytest.approx(1.0, abs=1.1)
    assert after.rests_s == pytest.approx(known.rests_s - 1.0, abs=1.0)
