"""Cost of shared weights: the lock of a decoding step, and the latency of a new version.

Lock: time per decoding step to acquire and release the weights, during generation, with caches as cold as in a server;
the rival is the step itself. This is the best case, and the goal applies to it: no writer contends, and both figures
are the tenth percentile, of the lock over that of the step. Waiting for an active writer is excluded; that is the time
of the optimizer's step.

Update: the clock starts with the optimizer's last byte, still inside `writing`, and stops when a client has the first
token of that version. The server is otherwise idle, so the latency is the path of the weights plus one request, which
is the rival.

    python -m benchmarks.training.weights RUN_DIR    the reader of the disk: a token for each input line
"""

import contextlib
import gc
import http.client
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import torch

from benchmarks.harness import scratch, stage
from benchmarks.harness.row import Row, compare, near
from rolloutmq.bus.rundir import load_run, read_json, write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Job
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.tiny.generate import Generator
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.step.optimizer import PolicyOptimizer
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.share import SharedWeights, Writable

GENERATIONS: Final = 2
"""Generations of one figure; each has as many steps as the model has positions."""
ROWS: Final = (1, 32)
"""Sequences of a batch; the fewer, the shorter the step and the higher the share of the lock."""
LOCK_GOAL: Final = 0.01
"""Maximum share of the lock in a step."""
UPDATES: Final = 20
DEADLINE_S: Final = 60.0
LOOK_S: Final = 0.02
PROMPT: Final = (1, 5, 6, 7)


def rows() -> Iterator[Row]:
    """Decoding steps, then updates."""
    torch.set_num_threads(1)
    for count in ROWS:
        yield _lock_row(count)
    yield _update_row("posix_shm, tiny server over HTTP", _tiny)
    yield _update_row("disk, a reader of its own", _disk)
    gc.collect()


class Timed:
    """Weights that record the time of each step, and the part of it for acquiring and releasing them."""

    def __init__(self, share: SharedWeights) -> None:
        self._share = share
        self._began = self._turn = 0.0
        self._steps: list[float] = []
        self._turns: list[float] = []

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Keep the weights, like the generator."""
        return self._share.keeping()

    @contextlib.contextmanager
    def reading(self) -> Iterator[PolicyVersion]:
        """Hold the weights. A step lasts from one pass to the next."""
        began = time.perf_counter()
        if self._began:
            self._steps.append(began - self._began)
        self._began = began
        reading = self._share.reading()
        version = reading.__enter__()
        had = time.perf_counter()
        yield version
        letting = time.perf_counter()
        reading.__exit__(None, None, None)
        self._turns.append(had - began + time.perf_counter() - letting)

    def turn_and_step_ms(self) -> tuple[float, float]:
        """Return both without preemption: the fastest tenth of each.

        This is a best case: it excludes the slowest steps, and waits for a writer, of which there is none here.
        """
        return 1e3 * quantiles(self._turns, n=10)[0], 1e3 * quantiles(self._steps, n=10)[0]


def _lock_row(count: int) -> Row:
    with scratch.directory() as directory:
        policy = build_policy(RunConfig().model, 0)
        share = WeightShare.create_or_adopt(policy, directory / "weights.json")
        try:
            _generate(policy, share, count)
            pair = Pair(partial(_measured, policy, share, count))
            return near(
                "weight lock of a decoding step, ms",
                f"{count} sequences, 86 k parameters",
                partial(pair.take, 0),
                partial(pair.take, 1),
                "the whole step",
                LOCK_GOAL,
            )
        finally:
            share.close(unlink=True)


def _measured(policy: Any, share: SharedWeights, count: int) -> tuple[float, float]:
    timed = Timed(share)
    for _ in range(GENERATIONS):
        _generate(policy, timed, count)
    return timed.turn_and_step_ms()


class Pair:
    """Two figures of one measurement, each returned once before the next measurement."""

    def __init__(self, measure: Callable[[], tuple[float, float]]) -> None:
        self._measure = measure
        self._left: dict[int, float] = {}

    def take(self, which: int) -> float:
        """Return one of the two."""
        if which not in self._left:
            self._left = dict(enumerate(self._measure()))
        return self._left.pop(which)


def _generate(policy: Any, weights: Any, count: int) -> None:
    generator = Generator(policy, weights, [], lambda _ids: "")
    generator.generate(
        [Job([list(PROMPT)], Sampling(n=count, max_tokens=_positions(policy)))], lambda _jobs: None
    )


def _positions(policy: Any) -> int:
    return int(policy.config.max_position_embeddings) - len(PROMPT)


class Updated:
    """A trainer that steps, and a request for one token of its weights."""

    def __init__(self, policy: Any, share: Writable, ask: Callable[[], PolicyVersion]) -> None:
        config = RunConfig()
        self._policy = policy
        self._share = share
        self._ask = ask
        self._optimizer = PolicyOptimizer(policy, config.trainer)
        self._version = PolicyVersion()

    def update_ms(self) -> float:
        """Take a step; return the milliseconds from its end to the first token of its version, median of several."""
        return median(self._once() for _ in range(UPDATES))

    def request_ms(self) -> float:
        """Return the milliseconds of a request without updates, median of several."""
        return median(self._asked(time.perf_counter()) for _ in range(UPDATES))

    def _once(self) -> float:
        tokens = torch.tensor([PROMPT])
        self._policy(input_ids=tokens, labels=tokens).loss.backward()
        self._version = PolicyVersion(0, self._version.step + 1)
        ended = [0.0]
        self._optimizer.step(1e-3, self._writing(ended))
        return self._asked(ended[0])

    @contextlib.contextmanager
    def _writing(self, ended: list[float]) -> Iterator[None]:
        with self._share.writing(self._version):
            yield
            ended[0] = time.perf_counter()

    def _asked(self, since: float) -> float:
        while self._ask() != self._version:
            pass
        return 1e3 * (time.perf_counter() - since)


def _update_row(payload: str, made: Callable[[ExitStack, RunLayout], Updated]) -> Row:
    with scratch.directory() as directory, ExitStack() as stack:
        layout = RunLayout(directory)
        write_json(layout.config, RunConfig())
        updated = made(stack, layout)
        updated.update_ms()
        return compare(
            "from the optimizer's last byte to the first token of the version, ms",
            payload,
            updated.update_ms,
            updated.request_ms,
            "the same request, no update",
        )


def _tiny(stack: ExitStack, layout: RunLayout) -> Updated:
    config = RunConfig()
    policy = build_policy(config.model, 0)
    write_identity(policy, config.model, layout.model)
    share = WeightShare.create_or_adopt(policy, layout.weights, tokenizer=directory_fingerprint(layout.model))
    stack.callback(partial(share.close, unlink=True))
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "inference", "--run-dir", str(layout.root)]
    log = stack.enter_context((layout.root / "inference.out").open("wb"))
    process = stack.enter_context(stage.ended(subprocess.Popen(command, stdout=log, stderr=log)))
    return Updated(policy, share, partial(_http_version, _connected(stack, layout, process)))


def _connected(
    stack: ExitStack, layout: RunLayout, process: "subprocess.Popen[Any]"
) -> http.client.HTTPConnection:
    deadline = time.monotonic() + DEADLINE_S
    while (address := read_json(layout.inference, InferenceAddress)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise stage.StageError("the inference server did not come up")
        time.sleep(LOOK_S)
    return stack.enter_context(contextlib.closing(http.client.HTTPConnection(urlsplit(address.url).netloc)))


def _http_version(connection: http.client.HTTPConnection) -> PolicyVersion:
    body = msgspec.json.encode({"prompt": [list(PROMPT)], "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = msgspec.json.decode(connection.getresponse().read())
    version = answer["choices"][0]["weight_versions"][-1]["version"]
    return PolicyVersion(version["incarnation"], version["step"])


def _disk(stack: ExitStack, layout: RunLayout) -> Updated:
    policy = build_policy(RunConfig().model, 0)
    share = DiskShare.create(policy, layout.weights)
    stack.callback(partial(share.close, unlink=True))
    command = [sys.executable, "-m", "benchmarks.training.weights", str(layout.root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.enter_context(stage.ended(process))
    return Updated(policy, share, partial(_piped_version, process))


def _piped_version(process: "subprocess.Popen[str]") -> PolicyVersion:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("token\n")
    process.stdin.flush()
    return msgspec.json.decode(process.stdout.readline(), type=PolicyVersion)


def main(run_dir: str) -> None:
    """Run the reader of the disk: generate a token for each line, and print its version."""
    torch.set_num_threads(1)
    config, layout = load_run(Path(run_dir))
    policy = build_policy(config.model, 1)
    share = DiskShare.attach(policy, layout.weights)
    generator = Generator(policy, share, [], lambda _ids: "")
    for _ in sys.stdin:
        job = Job([list(PROMPT)], Sampling(n=1, max_tokens=1))
        generator.generate([job], lambda _jobs: None)
        print(msgspec.json.encode(job.results[0].spans[-1].version).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
