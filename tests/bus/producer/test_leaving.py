"""A producer that leaves with unacked groups says so, however its block ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rolloutmq.bus.producer import connection
from rolloutmq.bus.producer.client import BlockingProducer, Producer
from rolloutmq.bus.transport import discovery
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import UnackedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.services.broker.server import running_broker

if TYPE_CHECKING:
    from tests.bus.transport.fake_broker import FakeBroker

MakeGroup = Callable[..., Group]
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is gone is missed soon."""
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connection, "REPEAT_S", 0.1)
    monkeypatch.setattr(discovery, "PROBE_S", 0.3)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.3)


def config() -> RunConfig:
    return RunConfig(environment={"e": EnvironmentConfig(entry="a:B", group_size=2, pacing=False)})


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Path]:
    with running_broker(config(), RunLayout(run_dir)):
        yield run_dir


async def test_a_block_that_ends_while_the_broker_is_away_raises_with_the_ids(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.lose = set(range(1, 1000))
    opened = Producer.open(fake.layout.root, env="e", producer="p", drain_s=0.5)
    async with fake.running():
        p = await opened.__aenter__()
        await p.send(group("g-0"))
    for index in range(1, 50):
        await p.send(group(f"g-{index}"))
    async with asyncio.timeout(LIMIT_S):
        while "endpoints.json" not in p._connection.problem:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    with pytest.raises(UnackedError) as lost:
        await opened.__aexit__(None, None, None)
    assert lost.value.group_ids == tuple(f"g-{index}" for index in range(50))
    text = str(lost.value)
    assert text.startswith("producer p: 50 groups are not acked and may be lost (after drain_s of 0.5 s, ")
    assert str(fake.layout.endpoints) in text, "where it looked for the broker"
    assert "g-0, g-1, " in text
    assert "g-9 and 40 more" in text
    assert "g-10" not in text
    assert "save_to" in text


def cut_off(producer: BlockingProducer) -> None:
    """Let no further group leave."""
    connection = producer._object._connection
    connection.send = lambda: None  # type: ignore[method-assign]
    connection._work.set = lambda: None  # type: ignore[method-assign]


def test_a_blocking_block_raises_too(broker: Path, group: MakeGroup) -> None:
    with pytest.raises(UnackedError, match="producer p: 3 groups are not acked"):  # noqa: PT012, SIM117 - leaving raises
        with Producer.blocking(broker, env="e", producer="p", group_size=2, drain_s=0.1) as p:
            p.send(group("first"))
            assert p.flush(LIMIT_S)
            cut_off(p)
            for index in range(3):
                p.send(group(f"g-{index}"))


async def test_the_error_of_the_block_stays_and_gets_a_note(
    fake: "FakeBroker", group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lose = {1}
    with pytest.raises(KeyError, match="mine") as raised:  # noqa: PT012 - leaving keeps it
        async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p", drain_s=0.0) as p:
            await p.send(group("g-0"))
            raise KeyError("mine")
    assert "UnackedError: producer p: 1 groups are not acked" in "".join(raised.value.__notes__)
    assert "closing failed, too error=producer p: 1 groups" in caplog.text


def test_the_error_of_a_blocking_block_stays_and_gets_a_note(broker: Path, group: MakeGroup) -> None:
    with pytest.raises(KeyError, match="mine") as raised:  # noqa: PT012, SIM117 - leaving keeps it
        with Producer.blocking(broker, env="e", producer="p", group_size=2, drain_s=0.0) as p:
            cut_off(p)
            p.send(group("g-0"))
            raise KeyError("mine")
    assert "UnackedError" in "".join(raised.value.__notes__)


def test_an_interrupt_while_a_block_is_leaving_tells_the_unacked_groups(
    broker: Path, group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:  # noqa: PT012, SIM117 - leaving is interrupted
        with Producer.blocking(broker, env="e", producer="p", group_size=2, drain_s=LIMIT_S) as p:
            p.send(group("first"))
            assert p.flush(LIMIT_S)
            cut_off(p)
            p.send(group("g-0"))
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
    timer.join()
    assert "UnackedError: producer p: 1 groups are not acked" in "".join(raised.value.__notes__)
    assert "g-0" in caplog.text


async def test_a_cancelled_block_is_cancelled_and_tells(
    fake: "FakeBroker", group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lose, fake.syncs = {1}, False

    async def block() -> None:
        async with Producer.open(fake.layout.root, env="e", producer="p", drain_s=0.0) as p:
            await p.send(group("g-0"))
            await asyncio.Event().wait()

    async with fake.running():
        task = asyncio.create_task(block())
        await fake.until(lambda: 1 in fake.arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "1 groups are not acked" in caplog.text


async def test_what_is_saved_raises_nothing_and_tells_where(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lose, path = {1}, tmp_path / "p.spool"
    async with (
        fake.running(),
        Producer.open(fake.layout.root, env="e", producer="p", drain_s=0.0, save_to=path) as p,
    ):
        await p.send(group("g-0"))
    assert f"unacked groups saved producer=p groups=1 file={path}" in caplog.text
    assert path.exists()


def test_a_producer_that_is_never_closed_is_told_at_exit(broker: Path) -> None:
    code = """
        import sys
        from rolloutmq import Group, Producer
        producer = Producer.blocking(sys.argv[1], env="e", group_size=2).__enter__()
        rows = [[1, 2], [3]]
        producer.send(Group.build("acked", tokens=rows, mask=rows, scores=[0.0, 1.0]))
        assert producer.flush(60)
        if sys.argv[2] == "unacked":
            producer._object._connection.send = lambda: None
            producer._object._connection._work.set = lambda: None
            producer.send(Group.build("g", tokens=rows, mask=rows, scores=[0.0, 1.0]))
        """
    found = {
        case: subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(broker), case],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        ).stderr
        for case in ("unacked", "acked")
    }
    assert "producer never closed, unacked groups may be lost producer=e-" in found["unacked"]
    assert "unacked=1; open it in a `with` block" in found["unacked"]
    assert found["acked"] == ""
