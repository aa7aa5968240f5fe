"""Weights between hosts: seconds for a GB from the end of a step until the receivers show the version, on loopback.

The rival is a plain TCP copy of the same bytes, from the shared memory of one process to that of others. Ours includes
the wait for the version, the digests, and the copy into the weights of the receiver. A clear transfer is that of an
address on loopback; a sealed one is that of an address within reach of other hosts, here over loopback too.

    python -m benchmarks.training.stream PORT NBYTES    a receiver of the rival: a copy for each connection
"""

import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.harness import scratch, stage
from benchmarks.harness.row import Row, near
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import SegmentGoneError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.stream.segment import WeightSegment

LAYERS: Final = 64
WIDTH: Final = 1024
GOAL: Final = 1.3
ROUNDS: Final = 15
ROUNDS_OF_MANY: Final = 3
DEADLINE_S: Final = 120.0
LOOK_S: Final = 0.0005
BLOCK: Final = 1 << 20


def rows() -> Iterator[Row]:
    """One receiver, eight engines of one host, and eight hosts."""
    torch.set_num_threads(1)
    for relays, maps, sealed, payload in (
        (1, 1, False, "1 receiver"),
        (1, 1, True, "1 receiver, sealed"),
        (1, 8, False, "8 engines of one host, one relay"),
        (8, 8, False, "8 relays"),
    ):
        with scratch.directory() as directory, ExitStack() as stack:
            streamed = Streamed(directory, stack, relays, sealed=sealed)
            plain = stack.enter_context(Plain(streamed.nbytes, maps))
            yield near(
                "weights to other hosts, s for a GB",
                f"{payload}, {streamed.nbytes / 1e6:.0f} MB, all changed",
                streamed.seconds_for_a_gb,
                plain.seconds_for_a_gb,
                f"plain TCP copy to {maps}",
                GOAL,
                rounds=ROUNDS if relays == 1 else ROUNDS_OF_MANY,
            )
        gc.collect()
        segment_file.sweep(kind="stage")


class Streamed:
    """A trainer's weights, a relay that sends them, and relays that receive them, each in its own process."""

    def __init__(self, root: Path, stack: ExitStack, relays: int, *, sealed: bool = False) -> None:
        own = _run(root / "trainer")
        self._model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self._share = WeightShare.create_or_adopt(self._model, own.weights)
        stack.callback(self._end)
        self.nbytes = self._share.manifest().end
        self._step = 0
        listen = "tcp://0.0.0.0:0" if sealed else "tcp://127.0.0.1:0"
        stack.enter_context(stage.ended(_relay(own, "--listen", listen)))
        hosts = [_run(root / f"host{number}") for number in range(relays)]
        for host in hosts:
            stack.enter_context(stage.ended(_relay(host, "--source", str(own.root))))
        self._received = [_received(host) for host in hosts]
        for one in self._received:
            stack.callback(one.close, remove=True)
        self.seconds_for_a_gb()

    def _end(self) -> None:
        self._share.close(unlink=True)
        del self._model

    def seconds_for_a_gb(self) -> float:
        """Take a step that changes every weight; return the seconds until all receivers show it, for each GB."""
        self._step += 1
        version = PolicyVersion(0, self._step)
        with self._share.writing(version), torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(1e-3)
        began = time.perf_counter()
        while any(one.lock.version != version for one in self._received):
            if time.perf_counter() > began + DEADLINE_S:
                raise stage.StageError("a version did not arrive")
            time.sleep(LOOK_S)
        return (time.perf_counter() - began) / (self.nbytes / 1e9)


def _run(root: Path) -> RunLayout:
    root.mkdir(mode=0o700)
    layout = RunLayout(root)
    write_json(layout.config, RunConfig())
    return layout


def _relay(layout: RunLayout, *more: str) -> "subprocess.Popen[Any]":
    command = [
        sys.executable,
        "-m",
        "rolloutmq.launch.service_process",
        "relay",
        "--run-dir",
        str(layout.root),
    ]
    with (layout.root / "relay.out").open("wb") as log:
        return subprocess.Popen([*command, *more], stdout=log, stderr=log)


def _received(host: RunLayout) -> WeightSegment:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return WeightSegment.read(host.weights)
        except SegmentGoneError:
            if time.monotonic() > deadline:
                raise stage.StageError("no weights arrived at a relay") from None
            time.sleep(LOOK_S)


def _shared(nbytes: int) -> memoryview:
    """Return shared memory without a name, all of it allocated, as the weights have it."""
    fd = os.memfd_create("rolloutmq-bench")
    os.posix_fallocate(fd, 0, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    return memoryview(memory)


class Plain:
    """A plain TCP copy of as many bytes to so many processes."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        self._nbytes = nbytes
        self._data = _shared(nbytes)
        self._receivers = receivers
        self._stack = ExitStack()

    def __enter__(self) -> "Plain":
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        command = [sys.executable, "-m", "benchmarks.training.stream"]
        for _ in range(self._receivers):
            process = subprocess.Popen([*command, str(listener.getsockname()[1]), str(self._nbytes)])
            self._stack.enter_context(stage.ended(process))
        self._sockets = [self._stack.enter_context(listener.accept()[0]) for _ in range(self._receivers)]
        self.seconds_for_a_gb()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def seconds_for_a_gb(self) -> float:
        """Return the seconds until all have the bytes, for each GB."""
        began = time.perf_counter()
        threads = [threading.Thread(target=partial(self._send, sock)) for sock in self._sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - began) / (self._nbytes / 1e9)

    def _send(self, sock: socket.socket) -> None:
        for start in range(0, self._nbytes, BLOCK):
            sock.sendall(self._data[start : start + BLOCK])
        sock.recv(1)


def main(port: str, nbytes: str) -> None:
    """Receive copies until the connection ends; answer each with a byte."""
    data = _shared(int(nbytes))
    with socket.create_connection(("127.0.0.1", int(port))) as sock:
        while True:
            for start in range(0, len(data), BLOCK):
                if not sock.recv_into(data[start : start + BLOCK], 0, socket.MSG_WAITALL):
                    return
            sock.sendall(b"x")


if __name__ == "__main__":
    main(*sys.argv[1:])
