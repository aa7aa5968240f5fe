"""A trainer's weights with a sender, a receiver in another run directory, and a wire between them that can fail."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.keys import ticket
from rolloutmq.schemas.files import RunLayout, StreamAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.stream.channel import Channel
from rolloutmq.trainer.weights.stream.receiver import Receiver
from rolloutmq.trainer.weights.stream.relay import serving

V = PolicyVersion
WIDTH = 512
"""A layer has one chunk of weights, and a part of one of biases."""


def model(layers: int = 10) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


@torch.no_grad()
def fill(target: nn.Module, value: float) -> None:
    for number, parameter in enumerate(target.parameters()):
        parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * value + number)


class Trainer:
    """The owner of the weights of a run directory."""

    def __init__(self, root: Path, layers: int = 10) -> None:
        self.layout = RunLayout(root)
        self.model = model(layers)
        fill(self.model, 0)
        self.share = WeightShare.create_or_adopt(self.model, self.layout.weights, version=V(0, 0))

    def step(self, number: int, change: Callable[[], None] | None = None) -> None:
        with self.share.writing(V(0, number)), torch.no_grad():
            if change is None:
                fill(self.model, number)
            else:
                change()

    def close(self) -> None:
        """Remove the weights, and let go of their memory."""
        self.share.close(unlink=True)
        del self.model, self.share

    @contextmanager
    def served(self, listen: str = "tcp://127.0.0.1:0") -> Iterator[StreamAddress]:
        sender, snapshots = serving(self.layout, listen, insecure=False)
        try:
            address = read_json(self.layout.stream, StreamAddress)
            assert address is not None
            yield address
        finally:
            sender.close()
            snapshots.close()


def dial(address: StreamAddress, port: int = 0) -> Channel:
    shown = ticket.issue(address.secret, "test")
    return Channel.dial(address.host, port or address.port, shown, sealed=address.sealed)


class Engine:
    """A model of an engine, on the weights of a run directory."""

    def __init__(self, layout: RunLayout, layers: int = 10) -> None:
        with torch.device("meta"):
            self.model = model(layers)
        self.share = WeightShare.attach(self.model, layout.weights)

    def version_whole(self) -> PolicyVersion:
        """Return the version, after a check that all its values are of it."""
        with self.share.reading() as version:
            wanted = model(len(self.model))
            fill(wanted, version.step)
            for mine, other in zip(self.model.parameters(), wanted.parameters(), strict=True):
                assert torch.equal(mine, other)
        return version


class Wire:
    """A proxy between a receiver and a sender that counts what comes from the sender, and may cut or change it."""

    def __init__(self, port: int) -> None:
        self.passed = 0
        self.cut_after: int | None = None
        self.change_at: int | None = None
        self.held = threading.Event()
        self.held.set()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="wire")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                self._start(self._pump, near, far, False)
                self._start(self._pump, far, near, True)

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if counted:
                    self.held.wait()
                    if self.cut_after is not None and self.passed + len(data) > self.cut_after:
                        break
                    at = self.change_at
                    if at is not None and self.passed <= at < self.passed + len(data):
                        data[at - self.passed] ^= 1
                    self.passed += len(data)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.held.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


@contextmanager
def wire(port: int) -> Iterator[Wire]:
    made = Wire(port)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def received(layout: RunLayout) -> Iterator[Receiver]:
    made = Receiver(layout)
    try:
        yield made
    finally:
        made.close(remove=True)
