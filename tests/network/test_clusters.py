"""The quickstart on two hosts, with keys, through cuts and kills: it learns, and the ledger is exact.

Every command is one of docs/clusters.md, and every setting of the quickstart that is not about hosts is its own, but
for the steps: they are as many as in the quickstart's own test, and so is the reward.
"""

from collections.abc import Callable
from typing import Final

import pytest
from tests.network.support.cluster import EnginesApart
from tests.network.support.hosts import Lab
from tests.network.support.site import waits_in_log

pytestmark = pytest.mark.extended

STEPS: Final = 250


def cut(run: EnginesApart) -> None:
    """Reset all connections, again and again."""
    for _ in range(2):
        run.way.cut()
        run.advance()


def half_open(run: EnginesApart) -> None:
    run.way.half_open()


def unplugged(run: EnginesApart) -> None:
    """The cable of the far host is pulled until its commands say what they wait for."""
    run.far.unplug()
    waits_in_log(run.worker, "waiting for the run")
    run.far.plug_in()


def worker_killed(run: EnginesApart) -> None:
    run.kill(run.far, "worker", "sort3-far.0")


def engine_killed(run: EnginesApart) -> None:
    run.kill(run.far, "inference")


def relays_killed(run: EnginesApart) -> None:
    """Both ends of the way of the weights, one after the other."""
    run.kill(run.far, "relay")
    run.advance()
    run.kill(run.head, "relay")


def broker_killed(run: EnginesApart) -> None:
    run.kill(run.head, "broker")


def trainer_killed(run: EnginesApart) -> None:
    run.kill(run.head, "trainer")


FAULTS: Final[tuple[Callable[[EnginesApart], None], ...]] = (
    cut,
    half_open,
    unplugged,
    worker_killed,
    engine_killed,
    relays_killed,
    broker_killed,
    trainer_killed,
)


def test_environment_and_engine_of_another_host(lab: Lab) -> None:
    run = EnginesApart(lab, f"trainer.steps={STEPS}", "trainer.checkpoint_interval=20")
    run.advance()
    assert run.address_of_weights().sealed
    for fault in FAULTS:
        fault(run)
        run.advance()
    summary = run.end()
    assert (summary["steps"], summary["trainer_resumes"]) == (STEPS, 1)
    assert summary["reward_first"] < 0.4
    assert summary["reward_last"] > 0.85
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2
