"""Trajectories per second over HTTP, from an environment's posts to a trainer's batches: our gateway and Atropos'
server.

Both receive the same requests with the same bytes: the posts of Atropos' clients are encoded beforehand, once, and the
trainer reads each batch to its end and decodes it after the clock has stopped. So the servers are measured, not the
client's JSON; only the last rows include it, with the client of `benchmarks.queues.atropos`. Sixteen posts are in
flight at once. Both servers hold their data in memory, unless a row of ours says otherwise, and are started as
documented.

Meanwhile `GET /status-env` is sent like their environments do: with a body, over its own connection, and again a tenth
of a second after the reply. An environment with late replies asks less often, so a late reply counts once, not for each
tenth of a second it took: that favours the slower side.

Environment, trainer, the polling environments, and the server are separate processes.

    python -m benchmarks.queues.gateway ROLE URL SHAPE GROUPS CODING    one process of a round
"""

import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import numpy as np
import uvloop

from benchmarks.harness import scratch, stage, workload
from benchmarks.harness.row import Row, compare, near
from benchmarks.harness.workload import Shape
from benchmarks.queues import atropos
from benchmarks.queues.atropos import Coding
from rolloutmq.schemas.wire.replies import Durability

Side = Literal["our", "their"]

SHAPES: Final = (Shape(8, 512), Shape(8, 2048), Shape(16, 8192))
ASKED: Final = Shape(8, 2048)
"""Load while environments poll their status."""
BATCH_SEQUENCES: Final = 64
DIFFERENT: Final = 4
"""Distinct groups; compressing one of the largest takes seconds."""
POSTS: Final = 16
"""Posts in flight."""
ROUND_TOKENS: Final[dict[tuple[Side, Coding], int]] = {
    ("their", "gzip"): 1 << 19,
    ("their", "identity"): 1 << 20,
    ("our", "gzip"): 1 << 22,
    ("our", "identity"): 1 << 23,
}
"""Sized for rounds of a few seconds at every shape."""
ASKING: Final = 8
ASK_EACH_S: Final = 0.1
RATE_GOAL: Final = 5.0
STATUS_GOAL: Final = 1 / 20
EMPTY_BYTES: Final = 200
"""Lower bound of a batch with any group."""
RIVAL: Final[dict[Coding, str]] = {
    "gzip": "Atropos' server, gzip",
    "identity": "Atropos' server, without compression",
}
GATEWAY_FILE: Final = "gateway.json"
START_S: Final = 30.0
STOP_S: Final = 20.0


def rows() -> Iterator[Row]:
    """Every shape both ways, one of them also on disk, without a counterpart of theirs; the status; the client."""
    for shape in SHAPES:
        for coding in RIVAL:
            yield compare(
                f"trajectories/s over HTTP, {coding}, memory",
                str(shape),
                partial(rate, "our", shape, coding),
                partial(rate, "their", shape, coding),
                RIVAL[coding],
                RATE_GOAL,
            )
    for coding in RIVAL:
        yield compare(
            f"trajectories/s over HTTP, {coding}, disk",
            str(ASKED),
            partial(rate, "our", ASKED, coding, durability=Durability.DISK),
            partial(rate, "their", ASKED, coding),
            RIVAL[coding],
        )
    for coding in RIVAL:
        yield near(
            f"p99 of a status under that load, ms, {coding}, memory",
            str(ASKED),
            partial(status_ms, "our", coding),
            partial(status_ms, "their", coding),
            RIVAL[coding],
            STATUS_GOAL,
        )
    yield compare(
        "trajectories/s over HTTP from the client that encodes, gzip, memory",
        str(atropos.SHAPE),
        partial(client_rate, "our"),
        partial(client_rate, "their"),
        RIVAL["gzip"],
    )
    yield compare(
        "trajectories/s over HTTP from that client to a trainer of the SDK, gzip, memory",
        str(atropos.SHAPE),
        partial(step_rate, "our"),
        partial(step_rate, "their"),
        RIVAL["gzip"],
    )


def groups_of(side: Side, shape: Shape, coding: Coding) -> int:
    """Return the groups of a round: whole batches, and more than one."""
    batch = BATCH_SEQUENCES * shape.tokens
    return max(2, ROUND_TOKENS[side, coding] // batch) * BATCH_SEQUENCES // shape.sequences


def rate(
    side: Side,
    shape: Shape,
    coding: Coding,
    groups: int | None = None,
    durability: Durability = Durability.MEMORY,
) -> float:
    """Run one round, and return trajectories a second."""
    count = groups or groups_of(side, shape, coding)
    with server(side, durability) as url, _load(url, shape, count, coding) as load:
        return count * shape.sequences / load()


def status_ms(side: Side, coding: Coding, shape: Shape = ASKED, groups: int | None = None) -> float:
    """Run one round with polling environments, and return the 99th percentile of their replies."""
    count = groups or groups_of(side, shape, coding)
    with (
        server(side) as url,
        _load(url, shape, count, coding) as load,
        stage.player("queues.gateway", "asking", url, shape.word, count, coding) as asking,
    ):
        asking.wait_ready()
        asking.begin()
        load()
        asking.begin("enough")
        return asking.figure()


def client_rate(side: Side, groups: int = atropos.THEIR_GROUPS) -> float:
    """Run one round of the client that encodes as Atropos' does, and return trajectories a second."""
    with server(side) as url:
        return atropos.rate("their", url, groups, "gzip") * atropos.SHAPE.sequences


def step_rate(side: Side, groups: int = atropos.THEIR_GROUPS) -> float:
    """Run one round of the same client with a trainer that pulls from the bus, and return trajectories a second."""
    if side == "their":
        return client_rate(side, groups)
    shape = atropos.SHAPE
    with (
        _ours() as (url, directory),
        stage.player("queues.atropos", "our-trainer", directory, shape.word, groups, "gzip") as trainer,
        stage.player("queues.atropos", "their-environment", url, shape.word, groups, "gzip") as environment,
    ):
        environment.wait_ready(atropos.ROUND_S)
        trainer.wait_ready(atropos.ROUND_S)
        started = time.perf_counter()
        trainer.begin()
        environment.begin()
        trainer.line(atropos.ROUND_S)
        return groups * shape.sequences / (time.perf_counter() - started)


@contextlib.contextmanager
def server(side: Side, durability: Durability = Durability.MEMORY) -> Iterator[str]:
    """Run ours or theirs, in memory by default, on a free port, and yield its address."""
    if side == "their":
        with atropos.server() as url:
            yield url
        return
    with _ours(durability) as (url, _):
        yield url


@contextlib.contextmanager
def _ours(durability: Durability = Durability.MEMORY) -> Iterator[tuple[str, str]]:
    """Run a gateway, and yield its address and its run directory."""
    with scratch.directory() as directory:
        about = ["--port", "0", "--run-dir", str(directory), "--set", f"broker.durability={durability}"]
        command = [sys.executable, "-m", "rolloutmq.launch.cli", "gateway", *about]
        with (
            (directory / "bench.out").open("ab") as log,
            stage.ended(subprocess.Popen(command, stdout=log, stderr=log)) as process,
        ):
            yield _address(directory / GATEWAY_FILE, process), str(directory)
            process.terminate()
            process.wait(STOP_S)


def _address(file: Path, process: "subprocess.Popen[bytes]") -> str:
    """Block until the gateway listens; StageError if it does not."""
    deadline = time.monotonic() + START_S
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise stage.StageError(f"the gateway does not listen: {(file.parent / 'bench.out').read_text()}")
        time.sleep(stage.LOOK_S)
    return str(json.loads(file.read_text())["url"])


@contextlib.contextmanager
def _load(url: str, shape: Shape, groups: int, coding: Coding) -> Iterator[Callable[[], float]]:
    """Prepare an environment and a trainer; yield the function that runs them and returns the seconds."""
    words = (url, shape.word, groups, coding)
    with (
        stage.player("queues.gateway", "trainer", *words) as trainer,
        stage.player("queues.gateway", "environment", *words) as environment,
    ):

        def play() -> float:
            started = time.perf_counter()
            trainer.begin()
            environment.begin()
            trainer.line(atropos.ROUND_S)
            spent = time.perf_counter() - started
            trainer.line(atropos.ROUND_S)
            return spent

        environment.wait_ready(atropos.ROUND_S)
        trainer.wait_ready(atropos.ROUND_S)
        yield play


async def _environment(url: str, shape: Shape, groups: int, coding: Coding) -> None:
    env_id = await _registered(url, shape)
    small = Shape(shape.sequences, atropos.SMALL.tokens)
    await _post_all(url, [_body(small, 0, env_id, coding)] * (BATCH_SEQUENCES // shape.sequences))
    made = [_body(shape, number, env_id, coding) for number in range(DIFFERENT)]
    await asyncio.to_thread(stage.ready)
    await _post_all(url, list(islice(cycle(made), groups)))


def _body(shape: Shape, number: int, env_id: int, coding: Coding) -> tuple[bytes, dict[str, str]]:
    return atropos.encoded(atropos.scored_data(workload.lists(shape, number), env_id), coding)


async def _registered(url: str, shape: Shape) -> int:
    about = {
        "max_token_length": shape.tokens,
        "desired_name": "bench",
        "weight": 1.0,
        "group_size": shape.sequences,
    }
    async with aiohttp.ClientSession() as session:
        reply = await atropos.until_success(session, f"{url}/register-env", about)
    return int(reply["env_id"])


async def _post_all(url: str, bodies: list[tuple[bytes, dict[str, str]]]) -> None:
    waiting = iter(bodies)

    async def work(session: aiohttp.ClientSession) -> None:
        for body, headers in waiting:
            request = session.post(f"{url}/scored_data", data=body, headers=headers)
            reply = await atropos.replied(request)
            assert reply == {"status": "received"}, reply

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for _ in range(POSTS):
            tasks.create_task(work(session))


async def _trainer(url: str, shape: Shape, groups: int, coding: Coding) -> None:
    headers = {"Accept-Encoding": coding}
    async with aiohttp.ClientSession(headers=headers, auto_decompress=False) as session:
        about = atropos.registration(BATCH_SEQUENCES, shape.tokens)
        await atropos.replied(session.post(f"{url}/register", json=about))
        await _last_batch(session, url, 1)
        await asyncio.to_thread(stage.ready)
        last = await _last_batch(session, url, groups * shape.sequences // BATCH_SEQUENCES)
        print("done", flush=True)
    check(gzip.decompress(last) if coding == "gzip" else last, shape)
    print("whole", flush=True)


async def _last_batch(session: aiohttp.ClientSession, url: str, batches: int) -> bytes:
    """Read this many batches, and return the body of the last one."""
    while True:
        async with session.get(f"{url}/batch") as response:
            response.raise_for_status()
            body = await response.read()
        if len(body) < EMPTY_BYTES:
            assert json.loads(body)["batch"] is None, body
            await asyncio.sleep(atropos.PAUSE_S)
        elif (batches := batches - 1) == 0:
            return body


def check(body: bytes, shape: Shape) -> None:
    """Check a batch against the posts: number of sequences, and tokens and log-probabilities of each."""
    batch = json.loads(body)["batch"]
    posted = [workload.columns(shape, number) for number in range(DIFFERENT)]
    for group in batch:
        tokens, logprobs = np.array(group["tokens"]), np.array(group["inference_logprobs"], np.float32)
        assert any(
            np.array_equal(tokens, one["tokens"]) and np.array_equal(logprobs, one["inference_logprobs"])
            for one in posted
        ), "a batch has a group that nobody posted"
    sequences = sum(len(group["tokens"]) for group in batch)
    assert sequences == BATCH_SEQUENCES, f"a batch of {sequences} sequences"


async def _asking(url: str, shape: Shape, _groups: int, _coding: Coding) -> None:
    """Poll the status of several environments until told to stop, and print the 99th percentile in milliseconds."""
    env_ids = [await _registered(url, shape) for _ in range(ASKING)]
    await asyncio.to_thread(stage.ready)
    enough = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    took: list[float] = []

    async def ask(env_id: int) -> None:
        while not enough.done():
            started = time.perf_counter()
            async with aiohttp.ClientSession() as session:
                await atropos.replied(session.get(f"{url}/status-env", json={"env_id": env_id}))
            took.append((time.perf_counter() - started) * 1e3)
            await asyncio.sleep(ASK_EACH_S)

    async with asyncio.TaskGroup() as tasks:
        for env_id in env_ids:
            tasks.create_task(ask(env_id))
    await enough
    print(float(np.percentile(took, 99)), flush=True)


async def _play(role: Awaitable[None]) -> None:
    await role


def main(role: str, url: str, shape: str, groups: str, coding: Any) -> None:
    """Run one process of a round."""
    roles = {"environment": _environment, "trainer": _trainer, "asking": _asking}
    uvloop.run(_play(roles[role](url, Shape.parse(shape), int(groups), coding)))


if __name__ == "__main__":
    main(*sys.argv[1:])
