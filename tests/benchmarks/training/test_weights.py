import contextlib
from collections.abc import Iterator

from benchmarks.training import weights
from rolloutmq.schemas.wire.envelope import PolicyVersion


class Counted:
    """Weights that count how often they are held."""

    def __init__(self) -> None:
        self.held = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[PolicyVersion]:
        self.held += 1
        yield PolicyVersion()


def test_a_turn_is_part_of_its_step() -> None:
    counted = Counted()
    timed = weights.Timed(counted)  # type: ignore[arg-type]
    for _ in range(10):
        with timed.reading():
            pass
    assert counted.held == 10
    turn, step = timed.turn_and_step_ms()
    assert 0 < turn < step


def test_both_figures_are_of_one_measurement() -> None:
    numbers = iter(range(10))
    pair = weights.Pair(lambda: (float(next(numbers)), float(next(numbers))))
    assert [pair.take(1), pair.take(0)] == [1.0, 0.0]
    assert [pair.take(0), pair.take(1)] == [2.0, 3.0]
