"""Ack latency of a quiet environment while another one floods the broker, against the same alone; p99 in ms.

The quiet environment sends a small group, waits for its ack, and pauses, repeatedly. The flood consists of producers
that send large groups as fast as their credit allows, and a trainer that consumes all of them, so that credit never
runs out for long. Each figure has its own broker; the clock covers `send` and `flush`.

These figures include the machine's scheduler: on few cores, whoever wakes waits for the flood's processes. So a control
measures the machine alone. Two processes exchange messages of the same size over a bare socket, at the same pace,
beside the same flood. For durability `disk`, the one that answers first writes the message to a file and syncs it. The
delay inside the broker is the ack beside the flood against that control beside the flood.

    python -m benchmarks.broker.fairness ROLE DIRECTORY ...    one process of a round
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import uvloop
import zmq

from benchmarks.harness import scratch, stage, workload
from benchmarks.harness.row import Row, near
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Producer
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout

QUIET: Final = "quiet"
SMALL: Final = Shape.of_bytes(5_300)
LARGE: Final = Shape.of_bytes(134_000)
FLOODS: Final = 2
"""Producers of the flood."""
SENDS: Final = 400
"""Acks of one round; the first ones are not counted."""
WARM_UP: Final = 100
PAUSE_S: Final = 0.005
BATCH_SEQUENCES: Final = 512
GOAL: Final = 2.0
CONTROLS: Final = {"disk": "ping-disk", "memory": "ping"}
"""Role of the control at each durability."""


def rows() -> Iterator[Row]:
    """At `disk`, where an ack waits for a sync, and at `memory`, where it waits only for its turn."""
    beside = f"beside {FLOODS} producers that push {LARGE}"
    for durability in ("disk", "memory"):
        yield near(
            f"ack of a quiet environment, p99 ms, {durability}",
            f"{FLOODS} producers of another one push {LARGE}",
            partial(ack_p99_ms, durability, FLOODS),
            partial(ack_p99_ms, durability, 0),
            "nobody else sends",
            GOAL,
        )
    for durability, control in CONTROLS.items():
        yield near(
            f"ack of a quiet environment, p99 ms, {durability}",
            beside,
            partial(ack_p99_ms, durability, FLOODS),
            partial(ack_p99_ms, durability, FLOODS, role=control),
            "a bare socket beside them" + (", synced to disk" if durability == "disk" else ""),
            GOAL,
        )
    yield near(
        "round trip of a bare socket, p99 ms",
        f"{beside}, memory",
        partial(ack_p99_ms, "memory", FLOODS, role="ping"),
        partial(ack_p99_ms, "memory", 0, role="ping"),
        "nobody else sends",
        None,
    )


def ack_p99_ms(durability: str, floods: int, sends: int = SENDS, role: str = "quiet") -> float:
    """Measure the acks of a quiet environment, or a bare `ping`, beside this many flooding producers."""
    with (
        scratch.directory() as directory,
        stage.broker(RunLayout(directory), _config(durability)),
        stage.player("broker.fairness", "consumer", directory) as consumer,
        stage.players("broker.fairness", [("flood", directory, number) for number in range(floods)]) as flood,
        stage.player("broker.fairness", role, directory, sends) as quiet,
    ):
        for one in (consumer, *flood, quiet):
            one.wait_ready()
        for one in (consumer, *flood, quiet):
            one.begin()
        return quiet.figure()


def _config(durability: str) -> RunConfig:
    about = stage.config(durability=durability, exact_wait_s=0.0)
    flood = about.environment[stage.ENV]
    return about.model_copy(update={"environment": {stage.ENV: flood, QUIET: flood}})


async def _quiet(directory: Path, sends: str) -> None:
    groups = workload.fresh(workload.pool(SMALL), QUIET)
    took = []
    async with Producer.open(directory, env=QUIET, group_size=SMALL.sequences, drain_s=0.0) as producer:
        stage.ready()
        for _ in range(int(sends) + WARM_UP):
            group = next(groups)
            started = time.perf_counter()
            await producer.send(group)
            await producer.flush()
            took.append((time.perf_counter() - started) * 1e3)
            await asyncio.sleep(PAUSE_S)
    counted = sorted(took[WARM_UP:])
    print(counted[len(counted) * 99 // 100], flush=True)


async def _ping(directory: Path, sends: str, echo_role: str = "echo") -> None:
    address, took = f"ipc://{directory}/bare", []
    body = bytes(SMALL.nbytes)
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(address)
        command = [sys.executable, "-m", "benchmarks.broker.fairness", echo_role, str(directory)]
        echo = subprocess.Popen(command)  # noqa: ASYNC220 - there is nothing else in this process
        with stage.ended(echo):
            socket.send(body)
            socket.recv()
            stage.ready()
            for _ in range(int(sends) + WARM_UP):
                started = time.perf_counter()
                socket.send(body)
                socket.recv()
                took.append((time.perf_counter() - started) * 1e3)
                time.sleep(PAUSE_S)  # noqa: ASYNC251 - there is nothing else in this process
    counted = sorted(took[WARM_UP:])
    print(counted[len(counted) * 99 // 100], flush=True)


async def _echo(directory: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(f"ipc://{directory}/bare")
        while True:
            socket.send(socket.recv())


async def _echo_disk(directory: Path) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.REP) as socket,
        (directory / "bare.log").open("wb", 0) as log,
    ):
        socket.bind(f"ipc://{directory}/bare")
        while True:
            message = socket.recv()
            log.write(message)
            os.fdatasync(log.fileno())
            socket.send(message)


async def _flood(directory: Path, number: str) -> None:
    groups = workload.fresh(workload.pool(LARGE), f"flood-{number}")
    async with Producer.open(
        directory, env=stage.ENV, group_size=LARGE.sequences, slots=256, drain_s=0.0
    ) as producer:
        stage.ready()
        for group in groups:
            await producer.send(group)


async def _consumer(directory: Path) -> None:
    async with Consumer.open(directory, sequences=BATCH_SEQUENCES) as consumer:
        stage.ready()
        async for batch in consumer:
            await batch.ack()


def main(role: str, *words: str) -> None:
    """Be one process of a round."""
    roles: dict[str, Callable[..., Awaitable[None]]] = {
        "quiet": _quiet,
        "flood": _flood,
        "consumer": _consumer,
        "ping": _ping,
        "ping-disk": partial(_ping, echo_role="echo-disk"),
        "echo": _echo,
        "echo-disk": _echo_disk,
    }
    directory, *rest = words

    async def play() -> None:
        await roles[role](Path(directory), *rest)

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(play())


if __name__ == "__main__":
    main(*sys.argv[1:])
