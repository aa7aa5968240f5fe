"""Fixtures of the fault tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.faults.support.processes import IMPATIENCE, BrokerProcess
from tests.faults.support.staff import PROGRAM, Staff, Staffed, config

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


@pytest.fixture
def staffed(run_dir: Path) -> Staffed:
    """A broker and an orchestrator over these environments."""

    @contextmanager
    def make(program: Sequence[str] = PROGRAM, **about: Any) -> Iterator[tuple[BrokerProcess, Staff]]:
        settings = config(run_dir.parent, **about)
        with BrokerProcess(run_dir, settings) as broker, Staff(run_dir, program) as staff:
            try:
                yield broker, staff
            except BaseException:
                print(staff.tail())  # noqa: T201 - pytest shows it with the failure
                raise

    return make
