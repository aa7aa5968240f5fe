"""Groups a second from two producers to one consumer: through the broker, and through `zmq.proxy` without any logic.

The rival moves the same bytes in the same frame layout (an envelope and one body), over ipc too, with libzmq's own
marks; it keeps, checks and answers nothing. Producers, broker or proxy, and consumer are processes of their own. The
clock runs in the consumer, from its first group to its last. Durability: memory.

    python -m benchmarks.throughput ROLE DIRECTORY GROUPS NBYTES    one process of a round
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import zmq

from benchmarks.row import Row, compare
from rolloutmq import Consumer, Group, Producer
from rolloutmq.bus.codec import encode_group
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.envelope import GROUP_LIMIT_BYTES
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.broker.server import running_broker

PRODUCERS: Final = 2
SEQUENCES: Final = 8
BATCH_GROUPS: Final = 64
ENVELOPE_BYTES: Final = 200
DEADLINE_S: Final = 120.0


def rows() -> Iterator[Row]:
    """The two sizes of the design: what a short task makes, and eight long sequences."""
    for nbytes, groups, goal in ((5_300, 12_800, None), (134_000, 6_400, 0.7)):
        yield compare(
            "groups/s end to end, memory",
            f"groups of {nbytes / 1000:.0f} kB",
            lambda nbytes=nbytes, groups=groups: _round("broker", groups, nbytes),
            lambda nbytes=nbytes, groups=groups: _round("proxy", groups, nbytes),
            "zmq.proxy",
            goal,
        )


def _round(through: str, groups: int, nbytes: int) -> float:
    """Run one round in processes of its own and return groups a second."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        roles = [through, *[f"{through}-producer-{number}" for number in range(PRODUCERS)]]
        arguments = [directory, str(groups), str(nbytes)]
        others = [_child(role, *arguments, output=subprocess.DEVNULL) for role in roles]
        consumer = _child(f"{through}-consumer", *arguments, output=subprocess.PIPE)
        try:
            output, _ = consumer.communicate(timeout=DEADLINE_S)
        finally:
            for child in (consumer, *others):
                child.kill()
                child.wait()
    return float(output)


def _child(role: str, *arguments: str, output: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "benchmarks.throughput", role, *arguments], stdout=output)


def _group(name: str, nbytes: int) -> Group:
    """A group with tokens, mask and log-probabilities of about `nbytes` in all."""
    tokens = nbytes // (SEQUENCES * 9)
    return Group.build(
        name,
        tokens=np.ones((SEQUENCES, tokens), np.int32),
        mask=np.ones((SEQUENCES, tokens), bool),
        scores=np.zeros(SEQUENCES),
        inference_logprobs=np.zeros((SEQUENCES, tokens), np.float32),
    )


def _broker(directory: Path, _groups: int, _nbytes: int) -> None:
    # The queue is the thing measured: nothing is held back, and nothing dropped, because of its age.
    ageless = {"entry": "bench.py:Bench", "pacing": False, "stale": "pass"}
    config = RunConfig.model_validate({"broker": {"durability": "memory"}, "environment": {"bench": ageless}})
    with running_broker(config, RunLayout(directory)) as broker:
        broker.join(DEADLINE_S)


def _broker_producer(number: int) -> "Callable[[Path, int, int], None]":
    def produce(directory: Path, groups: int, nbytes: int) -> None:
        name = f"bench-{number}"
        with Producer.blocking(
            directory, env="bench", producer=name, group_size=SEQUENCES, slots=256
        ) as producer:
            for count in range(groups // PRODUCERS):
                producer.send(_group(f"{name}/{count}", nbytes))

    return produce


def _broker_consumer(directory: Path, groups: int, _nbytes: int) -> None:
    with Consumer.blocking(directory, sequences=BATCH_GROUPS * SEQUENCES) as consumer:
        taken, started = 0, 0.0
        for batch in consumer:
            started = started or time.perf_counter()
            taken += len(batch.groups)
            batch.ack()
            if taken >= groups:
                break
    _tell(taken - BATCH_GROUPS, started)


def _proxy(directory: Path, _groups: int, _nbytes: int) -> None:
    with zmq.Context() as context:
        inward, outward = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        inward.bind(f"ipc://{directory}/in")
        outward.bind(f"ipc://{directory}/out")
        zmq.proxy(inward, outward)


def _proxy_producer(_number: int) -> "Callable[[Path, int, int], None]":
    def produce(directory: Path, groups: int, nbytes: int) -> None:
        body = bytes(encode_group(_group("g", nbytes), GROUP_LIMIT_BYTES).frames[0])
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.connect(f"ipc://{directory}/in")
            for _ in range(groups // PRODUCERS):
                push.send_multipart([bytes(ENVELOPE_BYTES), body], copy=False)
            time.sleep(DEADLINE_S)  # until the round is over and this process is ended

    return produce


def _proxy_consumer(directory: Path, groups: int, _nbytes: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.connect(f"ipc://{directory}/out")
        for _ in range(BATCH_GROUPS):
            pull.recv_multipart(copy=False)
        started = time.perf_counter()
        for _ in range(groups - BATCH_GROUPS):
            pull.recv_multipart(copy=False)
        _tell(groups - BATCH_GROUPS, started)


def _tell(groups: int, started: float) -> None:
    print(groups / (time.perf_counter() - started))


def main(role: str, directory: str, groups: str, nbytes: str) -> None:
    """Be one process of a round."""
    roles: dict[str, Callable[[Path, int, int], None]] = {
        "broker": _broker,
        "broker-consumer": _broker_consumer,
        "proxy": _proxy,
        "proxy-consumer": _proxy_consumer,
    }
    for number in range(PRODUCERS):
        roles[f"broker-producer-{number}"] = _broker_producer(number)
        roles[f"proxy-producer-{number}"] = _proxy_producer(number)
    roles[role](Path(directory), int(groups), int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
