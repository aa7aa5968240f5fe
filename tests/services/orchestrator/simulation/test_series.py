import pytest

from rolloutmq.services.orchestrator.simulation.series import constant, lines, square, steps


def test_values_over_time() -> None:
    held = steps((5.0, 1.0), (10.0, 2.0))
    assert [held.at(at) for at in (-1.0, 0.0, 5.0, 9.9, 10.0, 99.0)] == [1, 1, 1, 1, 2, 2]
    joined = lines((10.0, 1.0), (20.0, 3.0), (20.5, 0.0))
    assert [joined.at(at) for at in (0.0, 10.0, 15.0, 20.0, 20.25, 30.0)] == [1.0, 1.0, 2.0, 3.0, 1.5, 0.0]
    assert [square(10.0, 1.0, 2.0, 30.0).at(at) for at in (5.0, 15.0, 25.0)] == [1.0, 2.0, 1.0]
    assert constant(4.0).at(1e9) == 4.0


@pytest.mark.parametrize("at", [-1.0, 0.0, 3.0, 5.0])
def test_a_line_of_one_point_is_constant(at: float) -> None:
    assert lines((3.0, 7.0)).at(at) == 7.0
