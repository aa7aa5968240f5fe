"""The cost of latencies is that of every group in every hop, and the rounds run with them on and off."""

import pytest

from benchmarks.broker import environments, throughput
from benchmarks.sdk import profiler
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.services.broker.state.group_hops import GroupHops


def test_every_group_of_a_round_counts_in_every_hop() -> None:
    assert profiler.hops_us(groups=512, block=64) > 0


def test_a_group_that_a_hop_leaves_out_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GroupHops.committed
    monkeypatch.setattr(GroupHops, "committed", lambda self, groups, s: whole(self, groups[::2], s))
    with pytest.raises(AssertionError):
        profiler.hops_us(groups=512, block=64)


def test_the_rival_of_the_throughput_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def through(_directory: object, about: RunConfig, _shape: object) -> float:
        seen.append(about.telemetry.latencies)
        return 1.0

    monkeypatch.setattr(throughput, "through", through)
    profiler.rate(latencies=True)
    profiler.rate(latencies=False)
    assert seen == [True, False]


def test_the_core_runs_without_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "PRODUCERS", 20)
    monkeypatch.setattr(environments, "QUEUED", 200)
    assert profiler.core_us(batches=2) > 0
