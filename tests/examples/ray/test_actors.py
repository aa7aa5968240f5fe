"""A user's environments and trainer, each a Ray actor, on one bus. `make test-ray` runs them."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.ray.actors import AsyncEnvironment, Environment, ThreadedEnvironment, Trainer
from tests.examples.ray.conftest import KeyedBroker, add_node

from rolloutmq import Producer, SessionFencedError, UsageError
from rolloutmq.schemas.network.keys import Role
from rolloutmq.testing import assert_nothing_lost, assert_settled, read_ledger

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ray: Any = pytest.importorskip("ray", reason="needs Ray: make .venv-ray/.installed")
pytestmark = [pytest.mark.rival, pytest.mark.usefixtures("cluster")]
LIMIT_S = 300.0
STEPS = 12
"""Of `trainer.steps`; each takes two groups."""
LIVES = {"max_restarts": -1, "max_task_retries": -1}


def names(count: int, first: str = "task") -> list[str]:
    return [f"{first}-{number}" for number in range(count)]


def until(fulfilled: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not fulfilled():
        assert time.monotonic() < end
        time.sleep(0.05)


def lives_in(folder: Path) -> int:
    """Return the number of lives of an actor: each leaves a file called after its pid."""
    return len(list(folder.glob("[0-9]*")))


def live_more(folder: Path, before: int) -> bool:
    return lives_in(folder) > before


def worker(broker: KeyedBroker, name: str = "env") -> Any:
    return broker.way(name, Role.WORKER)


def trainer(broker: KeyedBroker) -> Any:
    return broker.way("trainer", Role.TRAINER)


def assert_each_once(broker: KeyedBroker, every: list[str]) -> None:
    """Assert that exactly these groups were accepted, and that each was trained."""
    assert sorted(read_ledger(broker).states) == sorted(every)
    assert_nothing_lost(broker, every)
    assert_settled(broker, len(every))


def test_actors_of_several_nodes_produce_and_one_trains(broker: KeyedBroker) -> None:
    actors = [
        ray.remote(scheduling_strategy="SPREAD")(Environment).remote(worker(broker, f"env-{number}"))
        for number in range(3)
    ]
    tasks = [names(8, f"task-{number}") for number in range(3)]
    producing = [actor.produce.remote(part) for actor, part in zip(actors, tasks, strict=True)]
    learner = ray.remote(Trainer).remote(trainer(broker))
    assert ray.get(learner.train.remote(), timeout=LIMIT_S) == STEPS
    assert len(set(ray.get(producing, timeout=LIMIT_S))) == 3
    assert_each_once(broker, list(chain.from_iterable(tasks)))


def test_killed_actors_start_again_and_each_group_is_trained_once(
    broker: KeyedBroker, tmp_path: Path
) -> None:
    """The environment begins its tasks again: the broker knows the groups that it accepted before."""
    lives, steps = tmp_path / "lives", tmp_path / "steps"
    lives.mkdir()
    steps.mkdir()
    every = names(2 * STEPS)
    environment = ray.remote(**LIVES)(Environment).remote(worker(broker), "env")
    learner = ray.remote(**LIVES)(Trainer).remote(trainer(broker))
    producing = environment.produce.remote(every, lives, 0.2)
    training = learner.train.remote(steps, 0.2)
    until(lambda: lives_in(steps) and lives_in(lives))
    for actor, seen in ((environment, lives), (learner, steps), (environment, lives)):
        before = lives_in(seen)
        ray.kill(actor, no_restart=False)
        until(partial(live_more, seen, before))
    assert ray.get(training, timeout=LIMIT_S) == STEPS
    ray.get(producing, timeout=LIMIT_S)
    assert (lives_in(lives), lives_in(steps)) == (3, 2)
    assert_each_once(broker, every)


def test_a_removed_node_loses_no_accepted_group(
    cluster: "Cluster", broker: KeyedBroker, tmp_path: Path
) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = add_node(cluster)
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=True)
    every = names(2 * STEPS)
    environment = ray.remote(scheduling_strategy=there, **LIVES)(Environment).remote(worker(broker), "env")
    producing = environment.produce.remote(every, tmp_path, 0.2)
    until(lambda: lives_in(tmp_path))
    cluster.remove_node(node, allow_graceful=False)
    learner = ray.remote(Trainer).remote(trainer(broker))
    assert ray.get(learner.train.remote(), timeout=LIMIT_S) == STEPS
    ray.get(producing, timeout=LIMIT_S)
    assert lives_in(tmp_path) == 2
    assert_each_once(broker, every)


def test_an_async_actor_shares_a_producer(broker: KeyedBroker) -> None:
    every = names(2 * STEPS)
    actor = ray.remote(AsyncEnvironment).remote(worker(broker))
    learner = ray.remote(Trainer).remote(trainer(broker))
    training = learner.train.remote()
    ray.get(actor.open.remote(), timeout=LIMIT_S)
    ray.get([actor.produce.remote(name) for name in every], timeout=LIMIT_S)
    assert ray.get(actor.close.remote(), timeout=LIMIT_S) == len(every)
    assert ray.get(training, timeout=LIMIT_S) == STEPS
    assert_each_once(broker, every)


def test_threads_share_a_producer_and_a_fork_is_refused(broker: KeyedBroker) -> None:
    """And nobody closes the producer: what `flush` has seen acked outlives the actor."""
    actor = ray.remote(max_concurrency=4)(ThreadedEnvironment).remote(worker(broker))
    learner = ray.remote(Trainer).remote(trainer(broker))
    training = learner.train.remote()
    tasks = [names(STEPS // 2, f"thread-{number}") for number in range(4)]
    ray.get([actor.produce.remote(part) for part in tasks], timeout=LIMIT_S)
    assert ray.get(actor.fork.remote(), timeout=LIMIT_S) == 0
    assert ray.get(actor.flush.remote(), timeout=LIMIT_S) == 2 * STEPS
    ray.kill(actor)
    assert ray.get(training, timeout=LIMIT_S) == STEPS
    assert_each_once(broker, list(chain.from_iterable(tasks)))


def test_a_second_actor_of_a_name_fences_the_first(broker: KeyedBroker, tmp_path: Path) -> None:
    way = worker(broker)
    first, second = (ray.remote(Environment).remote(way, "same") for _ in range(2))
    endless = first.produce.remote(names(1000, "first"), tmp_path, 0.2)
    until(lambda: lives_in(tmp_path))
    ray.get(second.produce.remote(names(1, "second")), timeout=LIMIT_S)
    with pytest.raises(SessionFencedError, match="same"):
        ray.get(endless, timeout=LIMIT_S)


def test_an_actor_that_is_terminated_delivers_what_it_sent(broker: KeyedBroker, tmp_path: Path) -> None:
    """Ray ends the processes of a node by SIGTERM."""
    actor = ray.remote(Environment).remote(worker(broker))
    ending = actor.produce.remote(names(1000), tmp_path, 0.2)
    until(lambda: lives_in(tmp_path))
    (life,) = tmp_path.glob("[0-9]*")
    os.kill(int(life.name), signal.SIGTERM)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(ending, timeout=LIMIT_S)
    assert (tmp_path / "closed").exists()
    assert list(read_ledger(broker).states) == names(int(life.read_text()))
    assert_nothing_lost(broker)


def test_what_an_actor_must_not_capture_is_told(broker: KeyedBroker) -> None:
    with Producer.blocking(worker(broker), env="mine", group_size=2) as producer:

        def send() -> None:
            producer.flush()

        with pytest.raises(UsageError, match=r"BlockingProducer: cannot be pickled .* `rolloutmq.remote"):
            ray.remote(send).remote()
        with pytest.raises(UsageError, match="BlockingProducer: cannot be pickled"):
            ray.put(producer)
