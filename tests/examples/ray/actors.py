"""Programs of a user that run inside of Ray actors: environments that produce, and trainers."""

import os
import time
from pathlib import Path

import numpy as np

from rolloutmq import BlockingProducer, Consumer, ForkedError, Group, Producer
from rolloutmq.bus.transport.remote import Remote

OPEN_S = 120.0


def group_of(name: str) -> Group:
    """Return the group of a task: the same task gives the same group, in whichever life of an actor."""
    number = int(name.rpartition("-")[2])
    tokens = np.full((2, 4), number, np.int32)
    return Group.build(name, tokens=tokens, mask=np.ones((2, 4), bool), scores=[0.0, 1.0])


class Environment:
    """Produces a group for each task."""

    def __init__(self, broker: Remote, name: str = "") -> None:
        self._broker, self._name = broker, name

    def produce(self, names: list[str], marks: Path | None = None, pause_s: float = 0.0) -> int:
        """Send the groups, and return the pid of this life once all are acked.

        `marks` gets a file for each life, with the number of its sent groups, and `closed` once the producer is.
        """
        sent = 0
        try:
            with Producer.blocking(
                self._broker, env="mine", producer=self._name, group_size=2, timeout_s=OPEN_S
            ) as producer:
                for name in names:
                    producer.send(group_of(name))
                    sent += 1
                    if marks is not None and sent == 1:
                        (marks / str(os.getpid())).touch()
                    time.sleep(pause_s)
        finally:
            if marks is not None:
                (marks / str(os.getpid())).write_text(str(sent))
                (marks / "closed").touch()
        return os.getpid()


class Trainer:
    """Trains until the last step of the run, in as many lives as it takes."""

    def __init__(self, broker: Remote) -> None:
        self._broker = broker

    def train(self, marks: Path | None = None, pause_s: float = 0.0) -> int:
        """Train, and return the step that was reached; `marks` gets a file for each life."""
        with Consumer.blocking(self._broker, sequences=4, timeout_s=OPEN_S) as consumer:
            for batch in consumer:
                if marks is not None:
                    (marks / str(os.getpid())).touch()
                time.sleep(pause_s)
                batch.ack()
            return consumer.version.step


class AsyncEnvironment:
    """An async actor: its calls run in the event loop of Ray, and share a producer."""

    def __init__(self, broker: Remote) -> None:
        self._opening = Producer.open(broker, env="mine", group_size=2, timeout_s=OPEN_S)

    async def open(self) -> None:
        """Open the producer in the loop in which the other calls run."""
        self._producer = await self._opening.__aenter__()

    async def produce(self, name: str) -> None:
        """Send a group, and return once it is acked."""
        await (await self._producer.send_acked(group_of(name)))

    async def close(self) -> int:
        """Close the producer, and return the number of its acked groups."""
        await self._opening.__aexit__(None, None, None)
        return self._producer.accepted


class ThreadedEnvironment:
    """An actor with `max_concurrency`: the threads of its calls share a blocking producer that nobody closes."""

    def __init__(self, broker: Remote) -> None:
        self._producer: BlockingProducer = Producer.blocking(
            broker, env="mine", group_size=2, timeout_s=OPEN_S
        ).__enter__()

    def produce(self, names: list[str]) -> None:
        """Send groups."""
        for name in names:
            self._producer.send(group_of(name))

    def flush(self) -> int:
        """Wait for the acks, and return their number."""
        assert self._producer.flush(OPEN_S)
        return self._producer.accepted

    def fork(self) -> int:
        """Use the producer in a forked child; return 0 if that was refused."""
        child = os.fork()
        if not child:
            try:
                self._producer.send(group_of("forked-0"))
            except ForkedError:
                os._exit(0)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def pid(self) -> int:
        """Return the process id of the actor."""
        return os.getpid()
