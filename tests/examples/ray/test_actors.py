"""A user's environments and trainer, each a Ray actor, on one bus. `make test-ray` runs them."""

import pytest
from tests.examples.ray.actors import Environment, Trainer
from tests.examples.ray.conftest import KeyedBroker

from rolloutmq.schemas.network.keys import Role
from rolloutmq.testing import assert_nothing_lost, assert_settled

pytestmark = pytest.mark.rival
LIMIT_S = 300.0


@pytest.mark.usefixtures("cluster")
def test_actors_of_several_nodes_produce_and_one_trains(broker: KeyedBroker) -> None:
    import ray

    spread = ray.remote(scheduling_strategy="SPREAD")
    ways = [broker.way(f"env-{number}", Role.WORKER) for number in range(3)]
    environments = [spread(Environment).remote(way) for way in ways]
    trainer = ray.remote(Trainer).remote(broker.way("trainer", Role.TRAINER))
    tasks = [[f"task-{actor}-{number}" for number in range(8)] for actor in range(3)]
    producing = [actor.produce.remote(names) for actor, names in zip(environments, tasks, strict=True)]
    seen = ray.get(trainer.train.remote(12), timeout=LIMIT_S)
    assert len(set(ray.get(producing, timeout=LIMIT_S))) == 3
    every = [name for names in tasks for name in names]
    assert sorted(seen) == sorted(every)
    assert_nothing_lost(broker, every)
    assert_settled(broker, 24)
