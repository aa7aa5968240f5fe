"""The core under load is steady: as many groups are trained as arrive."""

import pytest

from benchmarks.broker import environments


@pytest.mark.parametrize("queued", [200, 0])
def test_a_round_trains_as_many_groups_as_arrive(queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "PRODUCERS", 20)
    loaded = environments.LoadedCore(10, queued)
    for _ in range(3):
        loaded.train()
    loaded._core.validate()
    assert loaded._core.held_groups == queued
    assert environments.rate(10, queued, batches=2) > 0
