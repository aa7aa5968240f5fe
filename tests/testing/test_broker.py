"""The broker for tests: a real one, that leaves nothing behind."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, Self

import pytest

from rolloutmq import Consumer, Group, Producer
from rolloutmq.bus.rundir import read_run
from rolloutmq.launch.settings import overridden, prepare_service
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.testing import LocalBroker, read_ledger

PATIENCE_S = 60.0


def group(name: str) -> Group:
    return Group.build(name, tokens=[[1, 2], [1, 3]], mask=[[0, 1], [0, 1]], scores=[0.0, 1.0])


def send(broker: LocalBroker, *names: str) -> None:
    with Producer.blocking(broker.run_dir, env="e", producer="e-0", timeout_s=PATIENCE_S) as producer:
        for name in names:
            producer.send(group(name), timeout_s=PATIENCE_S)


def pulled(broker: LocalBroker, sequences: int) -> list[str]:
    with Consumer.blocking(broker.run_dir, sequences=sequences, timeout_s=PATIENCE_S) as consumer:
        batch = next(iter(consumer))
        batch.ack(timeout_s=PATIENCE_S)
        return [one.group_id for one in batch.groups]


def test_a_trainer_gets_what_a_producer_sends_and_nothing_is_left() -> None:
    with LocalBroker() as broker:
        run_dir = broker.run_dir
        send(broker, "g-1", "g-2")
        assert pulled(broker, 4) == ["g-1", "g-2"]
    assert not run_dir.exists()


async def test_it_is_an_asynchronous_context_manager_too() -> None:
    async with (
        LocalBroker() as broker,
        Producer.open(broker.run_dir, env="e", timeout_s=PATIENCE_S) as producer,
        Consumer.open(broker.run_dir, sequences=2, timeout_s=PATIENCE_S) as consumer,
    ):
        await producer.send(group("g-1"), timeout_s=PATIENCE_S)
        batch = await anext(aiter(consumer))
        await batch.ack(timeout_s=PATIENCE_S)
        assert [one.group_id for one in batch.groups] == ["g-1"]


async def test_a_cancelled_entry_leaves_no_broker() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(LocalBroker):
        def start(self) -> Self:
            begun.set()
            assert go_on.wait(PATIENCE_S)
            return super().start()

    broker = Slow()

    async def entered() -> None:
        async with broker:
            raise AssertionError("entered after a cancellation")

    entering = asyncio.create_task(entered())
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for _ in range(2):  # an impatient caller cancels twice
        entering.cancel()
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not [one for one in threading.enumerate() if one.name == "broker data plane"]
    with pytest.raises(UsageError, match="has gone with it"):
        _ = broker.run_dir
    with broker:
        send(broker, "g-1")


async def test_a_cancelled_exit_waits_for_the_end() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(LocalBroker):
        def stop(self) -> None:
            begun.set()
            assert go_on.wait(PATIENCE_S)
            super().stop()

    broker = Slow()

    async def left() -> None:
        async with broker:
            pass

    leaving = asyncio.create_task(left())
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    leaving.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not [one for one in threading.enumerate() if one.name == "broker data plane"]


def test_a_given_directory_is_kept_with_its_groups(tmp_path: Path) -> None:
    broker = LocalBroker(run_dir=tmp_path / "run")
    with broker:
        send(broker, "g-1")
    with broker:
        assert pulled(broker, 2) == ["g-1"]


def test_clients_survive_a_restart() -> None:
    with LocalBroker() as broker:
        with Producer.blocking(broker.run_dir, env="e", timeout_s=PATIENCE_S) as producer:
            producer.send(group("g-1"), timeout_s=PATIENCE_S)
            broker.restart()
            producer.send(group("g-2"), timeout_s=PATIENCE_S)
        assert pulled(broker, 4) == ["g-1", "g-2"]


def test_settings_and_a_file_configure_it(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[trainer]\nsteps = 1\n[environment.e]\nentry = "e.py:E"\n')
    with LocalBroker("broker.lease_s=7", "broker.durability=memory", config=file) as broker:
        config, _ = read_run(broker.run_dir)
        assert (config.broker.lease_s, config.trainer.steps) == (7, 1)
        assert config.broker.durability is Durability.MEMORY
        send(broker, "g-1")
        with Consumer.blocking(broker.run_dir, sequences=2, timeout_s=PATIENCE_S) as consumer:
            assert [batch.ack(timeout_s=PATIENCE_S) and batch.step for batch in consumer] == [1]


def test_a_configured_directory_keeps_its_configuration(tmp_path: Path) -> None:
    file, run_dir = tmp_path / "config.toml", tmp_path / "run"
    file.write_text(
        '[run]\nseed = 7\n[environment.e]\nentry = "e.py:E"\n[broker]\ndurability = "disk"\nlease_s = 33\n'
    )
    prepare_service(run_dir, file, [])
    before, _ = read_run(run_dir)
    with LocalBroker(run_dir=run_dir):
        assert read_run(run_dir)[0] == before
    with LocalBroker("broker.lease_s=7", run_dir=run_dir):
        after, _ = read_run(run_dir)
    assert after.broker.lease_s == 7
    assert after == overridden(before, ["broker.lease_s=7"])


def test_a_living_broker_keeps_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[environment.e]\nentry = "e.py:E"\n')
    with LocalBroker(run_dir=tmp_path / "run") as broker:
        config = RunLayout(broker.run_dir).config
        before = config.read_bytes()
        for other in (
            LocalBroker(run_dir=broker.run_dir),
            LocalBroker("broker.lease_s=7", run_dir=broker.run_dir),
            LocalBroker(config=file, run_dir=broker.run_dir),
        ):
            with pytest.raises(AddressInUseError, match="this process, a LocalBroker with its `stop"):
                other.start()
            assert config.read_bytes() == before
        send(broker, "g-1")


def test_a_wrong_setting_leaves_nothing_behind() -> None:
    broker = LocalBroker("broker.lease=7")
    with pytest.raises(ConfigError, match="did you mean `lease_s`"):
        broker.start()
    with pytest.raises(UsageError, match="no run directory"):
        _ = broker.run_dir


def test_misuse_is_an_error(tmp_path: Path) -> None:
    broker = LocalBroker(run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="does not run"):
        broker.restart()
    with broker:
        with pytest.raises(UsageError, match="runs already"):
            broker.start()
        with pytest.raises(AddressInUseError):
            LocalBroker(run_dir=tmp_path / "run").start()
    broker.stop()


def test_the_directory_of_a_stopped_broker_has_gone_with_it() -> None:
    broker = LocalBroker()
    with pytest.raises(UsageError, match="no run directory before its start"):
        read_ledger(broker)
    with broker:
        assert read_ledger(broker).settled == 0
    with pytest.raises(UsageError, match=r"has gone with it; .* keep it with LocalBroker\(run_dir=\.\.\.\)"):
        read_ledger(broker)
    with broker:
        assert broker.run_dir.is_dir()


CHILD: Final = """
import os, sys
from rolloutmq.testing import LocalBroker

broker = LocalBroker().start()
if (child := os.fork()) == 0:
    {child}
    sys.exit(0)  # in order, with the ends of all objects
assert os.waitpid(child, 0)[1] == 0
broker.restart()
assert (broker.run_dir / "endpoints.json").exists()
broker.stop()
"""


@pytest.mark.parametrize("child", ["pass", "broker.stop()", "del broker"])
def test_a_forked_child_leaves_the_broker_to_its_parent(child: str) -> None:
    """It removed the address, the run directory and the end of the journal of its parent's broker."""
    told = subprocess.run(
        [sys.executable, "-c", CHILD.format(child=child)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (told.returncode, told.stderr) == (0, "")
