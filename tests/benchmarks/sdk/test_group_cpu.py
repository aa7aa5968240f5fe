import pytest

from benchmarks.harness.workload import Shape
from benchmarks.sdk import group_cpu

SHAPE = Shape(8, 128)


def test_a_group_costs_cpu_in_the_broker_and_in_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_cpu, "LASTS_S", 0.5)
    monkeypatch.setattr(group_cpu, "WARM_UP_S", 0.3)
    ours, bare = group_cpu.ours_us(SHAPE), group_cpu.proxy_us(SHAPE)
    assert 0 < bare < ours < 1e6
