"""The cost of latencies is that of every group in every hop, and the lanes run with them on and off."""

import random
from collections.abc import Sequence

import pytest

from benchmarks.broker import environments
from benchmarks.harness.workload import Shape
from benchmarks.sdk import lockstep, profiler
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.group_hops import GroupHops


def rounds(cost: float, noise: float, spread: float = 0.0) -> list[profiler.Blocks]:
    """Rounds of lanes whose brokers differ by `spread` and whose blocks differ by `noise`."""
    rng = random.Random(1)
    found = []
    for _ in range(profiler.ROUNDS):
        levels = [100.0 * rng.gauss(1.0, spread) * by for by in (cost, 1.0, 1.0)]
        found.append([tuple(level * rng.gauss(1.0, noise) for level in levels) for _ in range(24)])
    return found


def test_every_group_of_a_round_counts_in_every_hop() -> None:
    assert profiler.hops_us(groups=512, block=64) > 0


def test_a_group_that_a_hop_leaves_out_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GroupHops.committed
    monkeypatch.setattr(
        GroupHops, "committed", lambda self, share, s: whole(self, BatchShare(share.groups[::2]), s)
    )
    with pytest.raises(AssertionError):
        profiler.hops_us(groups=512, block=64)


@pytest.mark.parametrize(("cost", "met"), [(1.0, True), (1.005, True), (1.02, False)])
def test_a_planted_cost_is_told_from_the_noise_of_a_shared_machine(cost: float, met: bool) -> None:
    played = rounds(cost, noise=0.04, spread=0.01)
    row = profiler.on_against_off(played)
    assert row.met is met
    assert row.spread is not None
    assert abs(row.ratio - cost) < 2 * row.spread < 0.02
    assert profiler.off_against_off(played).met is True


def test_brokers_that_differ_too_much_tell_nothing() -> None:
    assert profiler.off_against_off(rounds(1.0, noise=0.06, spread=0.05)).met is False


def test_one_lane_measures_latencies_and_two_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def blocks(configs: Sequence[RunConfig], _shape: Shape, count: int, _seed: int) -> profiler.Blocks:
        seen.extend(config.telemetry.latencies for config in configs)
        return [(1.0, 1.0, 1.0)] * count

    monkeypatch.setattr(lockstep, "blocks", blocks)
    assert len(profiler.round_of_blocks(7)) == 7
    assert seen == [True, False, False]


def test_the_core_runs_without_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "PRODUCERS", 20)
    monkeypatch.setattr(environments, "QUEUED", 200)
    assert profiler.core_us(batches=2) > 0
