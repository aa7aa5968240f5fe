"""The quickstart on two hosts, with keys, through cuts and kills: it learns, and the ledger is exact.

Every command is one of docs/clusters.md, and every setting of the quickstart that is not about hosts is its own, but
for the steps. Where the engines are apart they are as many as in the quickstart's own test, and so is the reward.
"""

import re
from collections.abc import Callable
from typing import Final

import msgspec
import pytest
from tests.network.support.cluster import RUN_S, EngineBeside, EnginesApart, TrainerApart
from tests.network.support.hosts import Lab
from tests.network.support.site import RUN, waits_in_log

from benchmarks.end_to_end.scenario import steps_logged
from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.schemas.files import SettledBatch

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
    summary = run.end()
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
    summary = run.end()
    assert (summary["steps"], summary["trainer_resumes"]) == (FEW, 1)
    assert summary["reward_last"] > 2 * summary["reward_first"]
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2


def test_a_fresh_run_of_the_same_name_has_nothing_of_the_one_before(lab: Lab) -> None:
    """Engine and relay of the far host stay, and begin anew; groups of their old weights were trained as fresh ones."""
    run = EnginesApart(lab, "trainer.steps=100000")
    run.advance(40)
    old = run_id_of(run.layout)
    run.far.unplug()  # else all of it would end with the run
    run.up.end()
    run.begin()
    run.far.plug_in()
    assert run_id_of(run.layout) not in {"", old}
    run.up.expect(lambda: steps_logged(run.trained) >= 3, "steps of the fresh run", RUN_S)
    for program in (run.relay, run.engine):
        assert "the run is gone, a fresh one of its name is there" in program.text()
    (engine,) = (one for one in engines_of(run.layout) if one.name == "inference.far")
    assert engine.run_id == run_id_of(run.layout)
    batches = [
        msgspec.json.decode(line, type=SettledBatch) for line in run.layout.settled.read_bytes().splitlines()
    ]
    assert batches[0].version.step <= 1
    for group in (one for batch in batches[:3] for one in batch.trained[:2]):
        told = run.head.call("rolloutmq", "explain", group, "--run-dir", RUN)
        assert re.search(r"policy\D+0\.[0-3]\b", told), told
    for program in (run.worker, run.engine, run.relay, run.up):
        program.end()


def test_workers_pass_over_an_engine_whose_relay_is_stuck(lab: Lab) -> None:
    run = EngineBeside(lab, "trainer.steps=100000")
    run.up.expect(run.engine_works, "requests at the engine of the far host", RUN_S)
    with run.stuck_relay():
        # The relay is named until it is forgotten, after half a minute.
        named = re.compile(
            r"engine inference\.far has version [\d.]+, \d+ steps? behind, for \d+ s: (relay\.|its relay)"
        )
        run.up.expect(lambda: named.search(run.why()), "the stuck engine in the line why", RUN_S)
        run.up.expect(lambda: not run.engine_works(), "the last request at the stuck engine", RUN_S)
        run.advance()
        assert not run.engine_works()
    run.up.expect(lambda: "inference.far" not in run.why(), "fresh weights of the engine", RUN_S)
    run.up.expect(run.engine_works, "requests at the engine again", RUN_S)
    run.advance()
    run.up.end()
    for program in run.joined:
        assert program.wait() == 0, program.text()
        assert "the run has ended" in program.text()


def test_an_engine_out_of_reach_is_named_and_costs_the_others_nothing(lab: Lab) -> None:
    """Each rollout first lost seconds at it, and `status` listed it as good, newest and idle."""
    run = EngineBeside(lab, "trainer.steps=100000", advertise="10.77.9.9")
    named = re.compile(
        r"engine_away, engine inference\.far is unreachable from \d workers?: worker sort3-\d+: "
    )
    run.up.expect(lambda: named.search(run.why()), "the engine in the line why", RUN_S)
    run.advance()
    status = run.head.call("rolloutmq", "status", RUN)
    assert re.search(r"engine +inference\.far: .*10\.77\.9\.9.*, unreachable from \d workers?: ", status), (
        status
    )
    wrong = run.joined.pop()
    assert wrong.end() == 0, wrong.text()
    run.join_engine("engine-again")
    run.up.expect(run.engine_works, "requests at the engine", RUN_S)
    run.up.expect(lambda: "inference.far" not in run.why(), "the end of the finding", RUN_S)
    run.advance()
    run.up.end()
    for program in run.joined:
        assert program.wait() == 0, program.text()
