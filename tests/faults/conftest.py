"""Fixtures of the fault tests."""

import pytest
import zmq
from tests.faults.support.processes import IMPATIENCE

from rolloutmq.bus.transport import sockets


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
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process miss a broker soon that is gone."""
    for module, name, value in IMPATIENCE:
        monkeypatch.setattr(module, name, value)
