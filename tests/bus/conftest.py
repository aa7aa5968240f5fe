"""Fixtures of the bus tests: a scripted broker, and groups."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq
from tests.bus.transport.fake_broker import FakeBroker

from rolloutmq.bus.transport import sockets
from rolloutmq.schemas.group import Group


@pytest.fixture
def fake(run_dir: Path) -> FakeBroker:
    """A scripted broker that does not run yet; producers are called `p`."""
    return FakeBroker(run_dir)


@pytest.fixture(scope="session", autouse=True)
def collector() -> None:
    """Start the thread of the socket library that frees large frames once, before leaks are looked for."""
    context = sockets.make_context()
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://collector")
        other.connect("inproc://collector")
        one.send(bytes(1 << 17), copy=False)
        other.recv()
    context.term()


@pytest.fixture
def group() -> Callable[..., Group]:
    """A maker of small groups: `group("g-1")`, or larger by `length`."""

    def make(name: str, n: int = 2, length: int = 4) -> Group:
        return Group.build(
            name,
            tokens=np.arange(n * length, dtype=np.int32).reshape(n, length),
            mask=np.ones((n, length), bool),
            scores=[0.5] * n,
        )

    return make
