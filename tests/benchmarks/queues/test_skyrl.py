"""Short rounds of both sides, so that a change which breaks one of them shows before somebody measures."""

import pytest

from benchmarks.queues import skyrl

LASTS_S = 0.2


def test_the_consumer_gets_the_groups_of_its_tasks() -> None:
    found = skyrl.figures("consumer", LASTS_S)
    assert found.groups_per_s > 0
    assert found.cpu_ms > 0


@pytest.mark.rival
@pytest.mark.skipif(bool(skyrl.missing()), reason=skyrl.missing())
def test_the_generator_gets_rows_of_its_tasks() -> None:
    found = skyrl.figures("generator", LASTS_S)
    assert found.groups_per_s > 0
    assert found.cpu_ms > 0
