"""Lower bound of a broker between processes: PUSH -> `zmq.proxy` -> PULL over ipc, without any logic.

It moves the wire bytes of our groups, made beforehand; it stores, checks and acks nothing, and the consumer does not
decode.

It runs in its best mode. Tried were high-water marks of 10, 100 and 1,000 messages, envelope and body in two frames or
one, and `copy` on either side, in all combinations, at 134 kB and at 1.18 MB. The fastest at both sizes was one frame,
a sender without copies, and a mark of 100; a receiver with copies is faster at 134 kB, one without at 1.18 MB. Marks of
1,000 let queues grow to gigabytes of fresh memory, and were the slowest; two frames cost a tenth and more at 134 kB.

    python -m benchmarks.broker.proxy modes                         try every mode at both sizes, the fastest first
    python -m benchmarks.broker.proxy ROLE DIRECTORY SHAPE MODE     one process of a round
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Final

import zmq

from benchmarks.harness import stage, workload
from benchmarks.harness.workload import Shape

PRODUCERS: Final = 2
ENVELOPE: Final = bytes(200)
WARM_UP_PART: Final = 1 / 3
"""Warm-up, relative to the counted time."""
LASTS_S: Final = 3.0
LOOK_EACH: Final = 16
COPIED_BYTES: Final = 500_000
TRIED: Final = (Shape.of_bytes(134_000), Shape(16, 8192))
TRIED_ROUNDS: Final = 3


@dataclass(frozen=True)
class Mode:
    """Socket options of the proxy.

    Attributes:
        copy_out, copy_in: The sender's and the receiver's `copy`.
        frames: 2 for envelope and body apart, 1 for both in one.
        mark: High-water mark of every socket, in messages.
    """

    copy_out: bool
    copy_in: bool
    frames: int
    mark: int

    @property
    def word(self) -> str:
        """The mode as one word, for a command line; `parse` reads it."""
        return f"{self.copy_out:d}-{self.copy_in:d}-{self.frames}-{self.mark}"

    @classmethod
    def parse(cls, word: str) -> "Mode":
        copy_out, copy_in, frames, mark = map(int, word.split("-"))
        return cls(bool(copy_out), bool(copy_in), frames, mark)


def fastest(shape: Shape) -> Mode:
    """Return the fastest mode at a size; see above."""
    return Mode(copy_out=False, copy_in=shape.nbytes < COPIED_BYTES, frames=1, mark=100)


def rate(shape: Shape, mode: Mode | None = None, lasts_s: float = LASTS_S) -> float:
    """Run one round, by default in the fastest mode, and return groups a second."""
    mode = mode or fastest(shape)
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        words = (directory, shape.word, mode.word)
        roles = ("proxy", *(f"producer-{number}" for number in range(PRODUCERS)))
        with (
            stage.player("broker.proxy", "consumer", *words, lasts_s) as consumer,
            stage.players("broker.proxy", [(role, *words) for role in roles]) as others,
        ):
            for other in others:
                other.wait_ready()
            consumer.wait_ready()
            for one in (consumer, *others):
                one.begin()
            return float(consumer.line())


def modes() -> Iterator[Mode]:
    """Every combination that is tried."""
    for copy_out, copy_in, frames, mark in product((True, False), (True, False), (1, 2), (10, 100, 1000)):
        yield Mode(copy_out, copy_in, frames, mark)


def fastest_modes(shape: Shape, rounds: int = TRIED_ROUNDS, lasts_s: float = 1.0) -> list[tuple[float, Mode]]:
    """Try every mode in turns, and return the median rates, the fastest first."""
    tried = list(modes())
    rates = [[rate(shape, mode, lasts_s) for mode in tried] for _ in range(rounds)]
    medians = [median(values) for values in zip(*rates, strict=True)]
    return sorted(zip(medians, tried, strict=True), key=lambda each: each[0], reverse=True)


@contextlib.contextmanager
def _socket(kind: int, mode: Mode) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.set_hwm(mode.mark)
        yield socket


def _proxy(directory: Path, _shape: Shape, mode: Mode) -> None:
    with _socket(zmq.PULL, mode) as inward, inward.context.socket(zmq.PUSH) as outward:
        outward.linger = 0
        outward.set_hwm(mode.mark)
        inward.bind(f"ipc://{directory}/in")
        outward.bind(f"ipc://{directory}/out")
        stage.ready()
        zmq.proxy(inward, outward)


def _producer(number: int, directory: Path, shape: Shape, mode: Mode) -> None:
    bodies = workload.bodies(shape, number)
    messages = [[ENVELOPE, body] if mode.frames > 1 else [ENVELOPE + body] for body in bodies]
    with _socket(zmq.PUSH, mode) as push:
        stage.ready()
        push.connect(f"ipc://{directory}/in")
        for message in cycle(messages):
            push.send_multipart(message, copy=mode.copy_out)


def _consumer(directory: Path, mode: Mode, lasts_s: float) -> None:
    with _socket(zmq.PULL, mode) as pull:
        stage.ready()
        pull.connect(f"ipc://{directory}/out")
        pull.recv_multipart(0, mode.copy_in)
        _pulled(pull, mode, lasts_s * WARM_UP_PART)
        print(_pulled(pull, mode, lasts_s), flush=True)


def _pulled(pull: "zmq.Socket[bytes]", mode: Mode, lasts_s: float) -> float:
    """Pull for this long, and return messages per second."""
    count, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < lasts_s:
        for _ in range(LOOK_EACH):
            pull.recv_multipart(0, mode.copy_in)
        count += LOOK_EACH
    return count / spent


def main(role: str, *words: str) -> None:
    """Run one process of a round, or try every mode."""
    if role == "modes":
        for shape in TRIED:
            for groups_s, mode in fastest_modes(shape):
                print(f"{shape}: {groups_s:8,.0f} groups/s {mode}", flush=True)
        return
    directory, shape, mode = Path(words[0]), Shape.parse(words[1]), Mode.parse(words[2])
    if role == "consumer":
        _consumer(directory, mode, float(words[3]))
    elif role == "proxy":
        _proxy(directory, shape, mode)
    else:
        _producer(int(role.removeprefix("producer-")), directory, shape, mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
