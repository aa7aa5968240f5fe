"""A short round of each side: groups arrive."""

import pytest

from benchmarks.network import curve
from benchmarks.network.curve import SMALL


@pytest.mark.parametrize("door", ["keys", "insecure"])
def test_groups_arrive_by_the_listener(door: str) -> None:
    assert curve.rate(SMALL, door, 0.2) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["stream", "batches"])
def test_a_relay_moves_groups(kind: str) -> None:
    assert curve.relay_rate(SMALL, 0.2, kind=kind) > 0  # type: ignore[arg-type]
