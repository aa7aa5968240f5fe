"""Groups per second from an environment to a trainer, against Atropos' own API server (0.4.0, archived) in memory.

Their side is `run-api`, started as documented, in its own environment (`make bench-rivals`). The client works like
theirs: `json.dumps` and, from 1 kB on, `gzip` at its default level, one session, POST /scored_data for each group,
eight in flight at once; then GET /batch until all is consumed, which the server compresses, too. The second rival is
the same without compression. Making the data is not timed: theirs are Python lists; ours are the same lists, which
`Group.build` converts to arrays within the time, or arrays. Their trainer makes no arrays of them.

Environment, server and trainer are separate processes. The clock runs from the start of the environment until the
trainer has decoded all groups. A batch of small groups goes through before.

    python -m benchmarks.queues.atropos ROLE WHERE SHAPE GROUPS HOW    one process of a round
"""

import asyncio
import contextlib
import gzip
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

import aiohttp
import uvloop

from benchmarks.harness import stage, workload
from benchmarks.harness.row import Row, compare
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, Producer
from rolloutmq.schemas.files import RunLayout

Coding = Literal["gzip", "identity"]
Source = Literal["lists", "arrays"]

RIVAL: Final = Path(__file__).parents[2] / ".venv-atropos"
SHAPE: Final = Shape(8, 2048)
SMALL: Final = Shape(8, 16)
BATCH_GROUPS: Final = 16
THEIR_GROUPS: Final = 32
OUR_GROUPS: Final[dict[Source, int]] = {"lists": 2048, "arrays": 8192}
"""Sized for rounds of a few seconds."""
DIFFERENT: Final = 8
"""Distinct groups; the lists of one group are two megabytes of objects."""
WORKERS: Final = 8
"""Posts in flight: the default of their environments for one inference server."""
ROUND_S: Final = 300.0
"""Time limit of a round; theirs may be slow on a busy machine."""
COMPRESS_BYTES: Final = 1024
PAUSE_S: Final = 0.02
NO_LABEL: Final = -100


def missing() -> str:
    """Return why the rival cannot be measured; empty if it can."""
    return stage.missing(RIVAL)


def rows() -> Iterator[Row]:
    """From lists and from arrays, against both ways of theirs."""
    goals: dict[Source, float] = {"lists": 150.0, "arrays": 500.0}
    names: dict[Coding, str] = {
        "gzip": "Atropos' server, gzip as its clients send it",
        "identity": "Atropos' server, without compression",
    }
    for coding in get_args(Coding):
        for source in get_args(Source):
            yield compare(
                f"groups/s from an environment's {source} to the trainer, memory",
                str(SHAPE),
                partial(our_rate, source),
                partial(their_rate, coding),
                names[coding],
                goals[source] if coding == "gzip" else None,
            )


def our_rate(source: Source, groups: int | None = None) -> float:
    """Run one round through a broker, and return groups a second."""
    count = groups or OUR_GROUPS[source]
    with (
        tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory,
        stage.broker(RunLayout(Path(directory)), stage.config(durability="memory")),
    ):
        return rate("our", directory, count, source)


def their_rate(coding: Coding, groups: int = THEIR_GROUPS) -> float:
    """Run one round through their server, and return groups a second."""
    with server() as url:
        return rate("their", url, groups, coding)


def rate(side: str, where: str, groups: int, how: str) -> float:
    """Run one round of a client with a server or a broker that runs, and return groups a second."""
    words = (where, SHAPE.word, groups, how)
    with (
        stage.player("queues.atropos", f"{side}-trainer", *words) as trainer,
        stage.player("queues.atropos", f"{side}-environment", *words) as environment,
    ):
        environment.wait_ready(ROUND_S)
        trainer.wait_ready(ROUND_S)
        started = time.perf_counter()
        trainer.begin()
        environment.begin()
        trainer.line(ROUND_S)
        return groups / (time.perf_counter() - started)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run their server on a free port, and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(RIVAL / "bin" / "run-api"), "--host", "127.0.0.1", "--port", str(port)]
    quiet = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with stage.ended(quiet):
        _wait_until_served(port, quiet)
        yield f"http://127.0.0.1:{port}"


def _wait_until_served(port: int, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(PAUSE_S)
    raise stage.StageError(f"Atropos' server ended with {process.returncode}")


def scored_data(lists: dict[str, Any], env_id: int) -> dict[str, Any]:
    """Return a group in the format of their environments: labels for a mask, and every optional key."""
    labels = [
        [token if trained else NO_LABEL for token, trained in zip(*rows, strict=True)]
        for rows in zip(lists["tokens"], lists["mask"], strict=True)
    ]
    absent = ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs")
    return {
        "tokens": lists["tokens"],
        "masks": labels,
        "scores": lists["scores"],
        "inference_logprobs": lists["inference_logprobs"],
        **dict.fromkeys(absent),
        "env_id": env_id,
    }


def encoded(payload: dict[str, Any], coding: Coding) -> tuple[bytes, dict[str, str]]:
    """Return body and headers in the format of their client."""
    headers = {"Content-Type": "application/json"}
    body = json.dumps(payload).encode("utf-8")
    if coding == "gzip" and len(body) >= COMPRESS_BYTES:
        compressed = gzip.compress(body)
        if len(compressed) < len(body):
            return compressed, headers | {"Content-Encoding": "gzip"}
    return body, headers


async def _their_environment(url: str, shape: Shape, groups: int, coding: Coding) -> None:
    async with aiohttp.ClientSession() as session:
        about = {
            "max_token_length": shape.tokens,
            "desired_name": "bench",
            "weight": 1.0,
            "group_size": shape.sequences,
        }
        reply = await until_success(session, f"{url}/register-env", about)
    env_id = reply["env_id"]
    small = scored_data(workload.lists(SMALL, 0), env_id)
    await _post_all(url, [small] * BATCH_GROUPS, coding)
    made = [scored_data(workload.lists(shape, number), env_id) for number in range(DIFFERENT)]
    await asyncio.to_thread(stage.ready)
    await _post_all(url, list(islice(cycle(made), groups)), coding)


async def until_success(session: aiohttp.ClientSession, url: str, about: dict[str, Any]) -> Any:
    """Post repeatedly until there is a trainer, like their environments."""
    while True:
        reply = await replied(session.post(url, json=about))
        if reply["status"] == "success":
            return reply
        await asyncio.sleep(PAUSE_S)


async def _post_all(url: str, payloads: list[dict[str, Any]], coding: Coding) -> None:
    waiting = iter(payloads)

    async def work() -> None:
        for payload in waiting:
            body, headers = encoded(payload, coding)
            async with aiohttp.ClientSession() as session:
                reply = await replied(session.post(f"{url}/scored_data", data=body, headers=headers))
            assert reply["status"] == "received", reply

    async with asyncio.TaskGroup() as tasks:
        for _ in range(WORKERS):
            tasks.create_task(work())


async def _their_trainer(url: str, shape: Shape, groups: int, coding: Coding) -> None:
    about = registration(BATCH_GROUPS * shape.sequences, shape.tokens)
    headers = {"Accept-Encoding": coding}
    async with aiohttp.ClientSession(headers=headers) as session:
        await replied(session.post(f"{url}/register", json=about))
        await _take(url, session, BATCH_GROUPS)
        await asyncio.to_thread(stage.ready)
        await _take(url, session, groups)
        print("done", flush=True)


def registration(batch_size: int, max_token_len: int) -> dict[str, Any]:
    """Return the registration of one of their trainers."""
    return {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": batch_size,
        "max_token_len": max_token_len,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 1,
        "starting_step": 0,
        "num_steps": 1,
    }


async def _take(url: str, session: aiohttp.ClientSession, groups: int) -> None:
    while groups > 0:
        batch = (await replied(session.get(f"{url}/batch")))["batch"]
        if batch is None:
            await asyncio.sleep(PAUSE_S)
        else:
            groups -= len(batch)


async def replied(request: Any) -> Any:
    """Wait for a reply, and return its decoded JSON; raise aiohttp's error if it is one."""
    async with request as response:
        response.raise_for_status()
        return await response.json()


async def _our_environment(directory: str, shape: Shape, groups: int, source: Source) -> None:
    make = workload.lists if source == "lists" else workload.columns
    small, made = make(SMALL, 0), [make(shape, number) for number in range(DIFFERENT)]
    async with Producer.open(
        Path(directory), env=stage.ENV, group_size=shape.sequences, slots=256, drain_s=stage.DEADLINE_S
    ) as producer:
        for number in range(BATCH_GROUPS):
            await producer.send(Group.build(f"warm-up/{number}", **small))
        await asyncio.to_thread(stage.ready)
        for number, columns in enumerate(islice(cycle(made), groups)):
            await producer.send(Group.build(f"bench/{number}", **columns))


async def _our_trainer(directory: str, shape: Shape, groups: int, _source: Source) -> None:
    async with Consumer.open(Path(directory), sequences=BATCH_GROUPS * shape.sequences) as consumer:
        await _pull(consumer, BATCH_GROUPS)
        await asyncio.to_thread(stage.ready)
        await _pull(consumer, groups)
        print("done", flush=True)


async def _pull(consumer: Consumer, groups: int) -> None:
    while groups > 0:
        batch = await anext(consumer)
        groups -= len(batch.groups)
        await batch.ack()


async def _play(role: Awaitable[None]) -> None:
    await role


def main(role: str, where: str, shape: str, groups: str, how: Any) -> None:
    """Run one process of a round."""
    roles: dict[str, Callable[[str, Shape, int, Any], Awaitable[None]]] = {
        "our-environment": _our_environment,
        "our-trainer": _our_trainer,
        "their-environment": _their_environment,
        "their-trainer": _their_trainer,
    }
    uvloop.run(_play(roles[role](where, Shape.parse(shape), int(groups), how)))


if __name__ == "__main__":
    main(*sys.argv[1:])
