"""A trainer and environments of your own, each a Ray actor. Killed ones start again, and no group is trained twice.

    rolloutmq keys init keys
    rolloutmq keys new keys environments --role worker --out worker.key
    rolloutmq keys new keys learner --role trainer --out trainer.key
    rolloutmq broker --run-dir runs/ray --set broker.listen=tcp://0.0.0.0:7760 --set broker.keys=keys \
        --set trainer.batch_sequences=16 --set trainer.steps=20

    ray start --head
    python examples/clients/ray_actors.py tcp://BROKER:7760

Each node has both key files under the same path, with mode 0600.
"""

import sys
import time

import numpy as np
import ray

import rolloutmq

ENVIRONMENTS = 4
GROUP_SIZE = 4
BATCH = 16
STEPS = 20
RESTART = {"max_restarts": -1, "max_task_retries": -1}
"""Ray starts a killed actor again, and repeats the call that it was in."""


def rollout(task: int) -> rolloutmq.Group:
    """Return the group of a task: rows of digits, scored by their sum. The same task gives the same group."""
    rng = np.random.default_rng(task)
    rows = rng.integers(0, 10, (GROUP_SIZE, 3))
    time.sleep(0.05)  # your model
    return rolloutmq.Group.build(
        f"task-{task}", tokens=rows, mask=np.ones_like(rows, bool), scores=rows.sum(1) / 27
    )


@ray.remote(num_cpus=0.5, **RESTART)
class Environment:
    """Plays tasks. A new life begins at the first one: the broker knows those that it has accepted."""

    def __init__(self, broker: rolloutmq.Remote) -> None:
        self.broker = broker

    def play(self, tasks: list[int]) -> int:
        """Return the number of accepted groups: closing the producer waits for the acks."""
        with rolloutmq.Producer.blocking(self.broker, env="digits", group_size=GROUP_SIZE) as producer:
            for task in tasks:
                producer.send(rollout(task))
        return len(tasks)


@ray.remote(num_cpus=0.5, **RESTART)
class Trainer:
    """Trains until `trainer.steps`. A new life continues after the last settled step."""

    def __init__(self, broker: rolloutmq.Remote) -> None:
        self.broker = broker

    def train(self) -> int:
        """Return the number of the last step."""
        with rolloutmq.Consumer.blocking(self.broker, sequences=BATCH) as consumer:
            for batch in consumer:
                loss = 1.0 - float(np.mean([group.scores.mean() for group in batch.groups]))  # your step
                consumer.log(batch.step, loss=loss)
                batch.ack()
            return consumer.version.step


def main(address: str) -> None:
    """Place the actors, and wait until all groups are trained."""
    ray.init(address="auto")
    trainer = Trainer.remote(rolloutmq.remote(address, key="trainer.key"))
    worker = rolloutmq.remote(address, key="worker.key")
    environments = [Environment.remote(worker) for _ in range(ENVIRONMENTS)]
    tasks = range(STEPS * BATCH // GROUP_SIZE)
    playing = [
        actor.play.remote(list(tasks[number::ENVIRONMENTS])) for number, actor in enumerate(environments)
    ]
    print(f"trained {ray.get(trainer.train.remote())} steps of {sum(ray.get(playing))} groups")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
