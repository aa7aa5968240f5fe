"""Programs of a user that run inside of Ray actors: an environment that produces, and a trainer."""

import os

import numpy as np

from rolloutmq import Consumer, Group, Producer
from rolloutmq.bus.transport.remote import Remote

OPEN_S = 60.0


def group_of(name: str) -> Group:
    """Return the group of a task: the same task gives the same group, in whichever life of an actor."""
    number = int(name.rpartition("-")[2])
    tokens = np.full((2, 4), number, np.int32)
    return Group.build(name, tokens=tokens, mask=np.ones((2, 4), bool), scores=[0.0, 1.0])


class Environment:
    """Produces a group for each task."""

    def __init__(self, broker: Remote) -> None:
        self._broker = broker

    def produce(self, names: list[str]) -> int:
        """Send the groups, and return the pid of this life once all are acked."""
        with Producer.blocking(self._broker, env="mine", group_size=2, timeout_s=OPEN_S) as producer:
            for name in names:
                producer.send(group_of(name))
        return os.getpid()


class Trainer:
    """Trains a batch for each call."""

    def __init__(self, broker: Remote) -> None:
        self._broker = broker

    def train(self, steps: int) -> list[str]:
        """Train so many batches of two groups, and return the ids of their groups."""
        seen: list[str] = []
        with Consumer.blocking(self._broker, sequences=4, timeout_s=OPEN_S) as consumer:
            for _ in range(steps):
                batch = next(consumer)
                seen += [group.group_id for group in batch.groups]
                batch.ack()
        return seen
