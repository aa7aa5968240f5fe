"""The quickstart on two hosts, with keys, through cuts and kills: it learns, and the ledger is exact.

Every command is one of docs/clusters.md, and every setting of the quickstart that is not about hosts is its own, but
for the steps. Where the engines are apart they are as many as in the quickstart's own test, and so is the reward.
"""

from collections.abc import Callable
from typing import Final

import pytest
from tests.network.support.cluster import EnginesApart, TrainerApart
from tests.network.support.hosts import Lab
from tests.network.support.site import waits_in_log

pytestmark = pytest.mark.extended

STEPS: Final = 250
FEW: Final = 60


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


ENGINES_APART: Final[tuple[Callable[[EnginesApart], None], ...]] = (
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
    for fault in ENGINES_APART:
        fault(run)
        run.advance()
    summary = run.end(run.worker)
    assert (summary["steps"], summary["trainer_resumes"]) == (STEPS, 1)
    assert summary["reward_first"] < 0.4
    assert summary["reward_last"] > 0.85
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2
    assert not list(run.layout.logs.glob("sort3-*.log")), "a worker of the head"


def cut_both(run: TrainerApart) -> None:
    for _ in range(2):
        run.way.cut()
        run.back.cut()
        run.advance()


def unplugged_trainer(run: TrainerApart) -> None:
    run.far.unplug()
    waits_in_log(run.trainer, "waiting for the run")
    run.far.plug_in()


def local_worker_killed(run: TrainerApart) -> None:
    run.kill(run.head, "worker")


def far_engine_killed(run: TrainerApart) -> None:
    run.kill(run.far, "inference")


def head_broker_killed(run: TrainerApart) -> None:
    run.kill(run.head, "broker")


def far_trainer_killed(run: TrainerApart) -> None:
    run.kill(run.far, "trainer")


TRAINER_APART: Final[tuple[Callable[[TrainerApart], None], ...]] = (
    cut_both,
    unplugged_trainer,
    local_worker_killed,
    far_engine_killed,
    head_broker_killed,
    far_trainer_killed,
)


def test_trainer_and_engine_of_another_host(lab: Lab) -> None:
    run = TrainerApart(lab, f"trainer.steps={FEW}", "trainer.checkpoint_interval=10")
    run.advance()
    for fault in TRAINER_APART:
        fault(run)
        run.advance()
    summary = run.end(run.trainer)
    assert (summary["steps"], summary["trainer_resumes"]) == (FEW, 1)
    assert summary["reward_last"] > 2 * summary["reward_first"]
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2
