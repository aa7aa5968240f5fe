"""The trainer against a real broker, over real sockets, as a process that is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.trainer.support.toy import run_config, some_group

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import BrokerUnavailableError, ClosedError
from rolloutmq.schemas.files import AckedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.services.broker.server import running_broker
from rolloutmq.trainer import checkpoint
from rolloutmq.trainer.broker_client import connect
from rolloutmq.trainer.process import StoppedError, stop_on_signals

LIMIT_S = 120.0


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def config_of(steps: int, **trainer: int) -> RunConfig:
    base = run_config(**{"steps": steps, "batch_sequences": 16, "checkpoint_interval": 5, **trainer})
    environment = EnvironmentConfig(entry="a:B", group_size=4, max_staleness=4)
    return base.model_copy(update={"environment": {"toy": environment}})


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def producing(layout: RunLayout, limit: int = 1 << 30) -> Iterator[None]:
    """Feed the broker from a thread, as fast as it gives permits, with groups of the step that it names."""
    options: dict[str, Any] = {"env": "toy", "producer": "toy-0", "run": "run", "group_size": 4, "slots": 8}
    with Producer.blocking(layout.root, ack_log=layout.ack_log("toy-0"), drain_s=1.0, **options) as producer:

        def feed() -> None:
            with suppress(ClosedError):
                for number in range(limit):
                    group = some_group(
                        f"g{number}", [0.0, 1.0, 0.5, 0.25], version=PolicyVersion(0, producer.step)
                    )
                    producer.send(group)

        thread = threading.Thread(target=feed, name="feed")
        thread.start()
        try:
            yield
        finally:
            producer.close()
            thread.join()


@contextmanager
def start(layout: RunLayout) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a trainer within the block."""
    argv = [sys.executable, "-m", "rolloutmq.launch.cli", "trainer", "--run-dir", str(layout.root)]
    with (layout.root / "trainer.log").open("ab") as log:
        process = subprocess.Popen(argv, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ids(layout: RunLayout) -> list[str]:
    """Groups trained according to the journal, without the void lines."""
    kept: list[SettledBatch] = []
    for text in layout.trained.read_bytes().splitlines():
        line = msgspec.json.decode(text, type=SettledBatch)
        kept = [old for old in kept if not line.resumed or old.version.step <= line.version.step]
        kept.append(line)
    return [group for line in kept for group in line.trained]


def acked(layout: RunLayout) -> set[str]:
    lines = layout.ack_log("toy-0").read_bytes().splitlines()
    return {msgspec.json.decode(line, type=AckedGroup).group_id for line in lines}


@pytest.mark.extended
def test_a_killed_trainer_comes_back_and_finishes(layout: RunLayout) -> None:
    config = config_of(steps=40)
    layout.config.write_text(config.model_dump_json())
    steps: list[StepDone] = []
    with running_broker(config, layout), producing(layout):
        with start(layout) as first:
            wait_until(lambda: checkpoint.latest(layout.checkpoints) is not None)
            first.kill()
            assert first.wait() == -signal.SIGKILL
        before = ids(layout)

        address = resolve_blocking(layout.root).events
        with BlockingSubscriber(address, [topics.STEP]) as events, start(layout) as second:
            while (event := events.poll(LIMIT_S)) is not None:
                steps.append(msgspec.msgpack.decode(event[1], type=StepDone))
                if steps[-1].step == config.trainer.steps:
                    break
            assert second.wait(LIMIT_S) == 0

    found = checkpoint.latest(layout.checkpoints)
    assert found is not None
    assert found.state.version == PolicyVersion(1, 40)
    assert {(step.incarnation, step.groups) for step in steps} == {(1, 4)}
    trained = ids(layout)
    assert len(trained) == len(set(trained)) == 4 * 40
    assert set(before) <= set(trained)  # what was taken back was trained again
    assert set(trained) <= acked(layout)
    assert not layout.weights.exists()


@pytest.mark.extended
def test_the_trainer_pulls_by_tokens_where_the_configuration_says_so(layout: RunLayout) -> None:
    """Groups have 16 to 32 tokens: three to six of them fill a step, and no step has more than the budget."""
    config = config_of(steps=4, batch_tokens=100, batch_sequences=0)
    layout.config.write_text(config.model_dump_json())
    with running_broker(config, layout), producing(layout), start(layout) as trainer:
        assert trainer.wait(LIMIT_S) == 0
    text = layout.trained.read_bytes().splitlines()
    batches = [msgspec.json.decode(line, type=SettledBatch) for line in text]
    assert [batch.version.step for batch in batches] == [1, 2, 3, 4]
    acked_lines = layout.ack_log("toy-0").read_bytes().splitlines()
    tokens = {
        line.group_id: line.tokens for line in (msgspec.json.decode(t, type=AckedGroup) for t in acked_lines)
    }
    for batch in batches:
        assert len(batch.trained) >= 3
        assert sum(tokens[group] for group in batch.trained) <= 100


@pytest.mark.parametrize("there", [False, True])
def test_a_signal_ends_the_wait_for_a_broker_and_for_a_batch(layout: RunLayout, there: bool) -> None:
    info = RunInfo(run="run", batch_sequences=16)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    with running_broker(config_of(steps=1), layout) if there else nullcontext(), stop_on_signals() as stop:
        timer.start()
        with (
            suppress(StoppedError),
            stop.interrupting(),
            connect(layout.root, info, PolicyVersion(), TrainerConfig(batch_sequences=16)) as link,
        ):
            assert there
            assert link.pull(1, PolicyVersion()) is None
            raise AssertionError
        assert stop.asked
        timer.join()


def test_a_commit_that_nobody_hears_is_given_up(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutmq.trainer.broker_client.LAST_WORD_S", 0.2)
    info = RunInfo(run="run", batch_sequences=16)
    with (
        running_broker(config_of(steps=1), layout) as broker,
        connect(
            layout.root, info, PolicyVersion(), TrainerConfig(batch_sequences=16, pull_wait_s=0.1)
        ) as uplink,
    ):
        uplink.commit(PolicyVersion())
        assert uplink.pull(1, PolicyVersion()) is None
        broker.stop()
        assert broker.join(LIMIT_S)
        with pytest.raises(BrokerUnavailableError):
            uplink.commit(PolicyVersion())


def test_the_event_of_the_first_step_is_heard(layout: RunLayout) -> None:
    info = RunInfo(run="run", batch_sequences=16)
    done = StepDone(
        run="run",
        incarnation=0,
        step=1,
        at=1.0,
        reward=0.5,
        loss=0.25,
        tokens=8,
        groups=4,
        filtered=0,
        staleness_max=0,
        staleness_mean=0.0,
        pull_s=0.5,
        step_s=0.5,
    )
    with (
        running_broker(config_of(steps=1), layout),
        BlockingSubscriber(resolve_blocking(layout.root, LIMIT_S).events, [topics.STEP]) as listener,
        connect(
            layout.root, info, PolicyVersion(), TrainerConfig(batch_sequences=16, pull_wait_s=0.1)
        ) as client,
    ):
        for _ in range(5):  # some time of a trainer, without a batch so far
            assert client.pull(1, PolicyVersion()) is None
        client.publish(topics.STEP, done)
        heard = listener.poll(LIMIT_S)
        assert heard is not None
        assert codec.decode_event(heard[1]) == done
