"""A run is recorded by a real broker, with what goes wrong in one, and replayed by real processes."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.faults.support.processes import (
    LIMIT_S,
    SEQUENCES,
    BrokerProcess,
    config,
    content,
    feed,
    wait_until,
)
from tests.services.broker.journal.other_versions import as_version, listing
from tests.trainer.support.toy import run_config, some_group

from rolloutmq.bus.consumer.client import BlockingConsumer, Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.launch.commands.records.replay import replay
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import (
    ConfigError,
    DamagedJournalError,
    EndOfReplayError,
    MissingError,
    RefusedError,
    RolloutMQError,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.services.broker.journal.format.records import Record, scan
from rolloutmq.services.broker.journal.stored_group import BodyMemory
from rolloutmq.services.broker.replay.recording import Recording

RANKS = 2
STEP = 4 * SEQUENCES
"""Sequences of one step."""
Part = list[tuple[str, int]]
"""Groups of one rank, by id and content, and the number of groups in the moments of the batch."""


@contextmanager
def ranks(run_dir: Path, resume: PolicyVersion | None = None) -> Iterator[list[BlockingConsumer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Consumer.blocking(
                    run_dir, sequences=STEP, consumer=f"r{rank}", rank=rank, world_size=RANKS, resume=resume
                )
            )
            for rank in range(RANKS)
        ]


def take(
    trainer: list[BlockingConsumer], step: int, *, settle: bool = True, signal: bool = True
) -> list[Part]:
    """Pull one step on all ranks, and settle it."""
    before = PolicyVersion(0, step - 1)
    batches = [consumer.pull(step, before) for consumer in trainer]
    if settle:
        for consumer, batch in zip(trainer, batches, strict=True):
            names = [group.group_id for group in batch.groups]
            after = PolicyVersion(0, step) if signal else before
            consumer.settle(
                batch, version=after, trained=names if signal else (), filtered=() if signal else names
            )
    return [
        [*((group.group_id, content(group)) for group in batch.groups), ("", batch.moments["e"].groups)]
        for batch in batches
    ]


def record(run_dir: Path) -> list[list[Part]]:
    """Train eight steps, with a batch without signal, a lost lease, killed brokers, and a trainer that goes back."""
    settings = config(replay=True, segment_bytes=1 << 20, history_bytes=1)
    with BrokerProcess(run_dir, settings) as broker:
        feed(run_dir, (f"g{i}" for i in range(24)))
        with ranks(run_dir) as trainer:
            trained = [take(trainer, 1), take(trainer, 2, signal=False), take(trainer, 2), take(trainer, 3)]
            trainer[0].commit(PolicyVersion(0, 2))
            take(trainer, 4, settle=False)
        broker.kill_and_start()
        feed(run_dir, (f"g{i}" for i in range(24, 40)), producer="later")
        with ranks(run_dir, resume=PolicyVersion(0, 2)) as trainer:
            assert take(trainer, 3) == trained[-1]
            trained += [take(trainer, step) for step in range(4, 7)]
        broker.kill_and_start()
        with ranks(run_dir) as trainer:
            trained += [take(trainer, step) for step in (7, 8)]
            trainer[0].commit(PolicyVersion(0, 8))
        assert broker.end() == 0
    return trained


@contextmanager
def replaying(recorded: Path, run_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [
        sys.executable,
        "-m",
        "rolloutmq.launch.cli",
        "replay",
        str(recorded),
        "--run-dir",
        str(run_dir),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def files(root: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Part]]]:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    run_dir.mkdir(mode=0o700)
    return run_dir, record(run_dir)


def ready(process: "subprocess.Popen[str]", run_dir: Path) -> None:
    def bound() -> bool:
        assert process.poll() is None, process.stdout and process.stdout.read()
        return read_endpoints(run_dir) is not None

    wait_until(bound, "the replay")


def test_a_replay_is_bit_for_bit_what_was_trained_as_often_as_one_likes(
    recorded: tuple[Path, list[list[Part]]], tmp_path: Path
) -> None:
    original, trained = recorded
    before = files(original)
    for number in range(2):
        again = []
        run_dir = tmp_path / f"replay{number}"
        with replaying(original, run_dir) as process:
            ready(process, run_dir)
            with ranks(run_dir) as trainer:
                again = [take(trainer, step) for step in range(1, len(trained) + 1)]
                for consumer in trainer:
                    with pytest.raises(EndOfReplayError):
                        consumer.pull(len(trained) + 1, consumer.version)
            assert process.wait(LIMIT_S) == 0
        assert again == trained
    assert files(original) == before


def test_a_loop_over_a_replay_ends_and_its_size_is_that_of_the_record(
    recorded: tuple[Path, list[list[Part]]], tmp_path: Path
) -> None:
    """One rank instead of two, a budget of tokens instead of sequences, and a lease that is lost on the way."""
    original, trained = recorded
    run_dir = tmp_path / "replay"
    with replaying(original, run_dir) as process:
        ready(process, run_dir)
        producer = Producer.blocking(run_dir, env="e", producer="p", group_size=SEQUENCES)
        with pytest.raises(RefusedError, match="takes nothing new"), producer:
            pass
        stranger = Consumer.blocking(run_dir, tokens=1, group="stranger")
        with pytest.raises(RefusedError, match="it has trainer"), stranger:
            pass
        with Consumer.blocking(run_dir, tokens=100) as consumer:
            consumer.pull(1, PolicyVersion())
        with Consumer.blocking(run_dir, tokens=100) as consumer:
            seen = []
            for batch in consumer:
                seen.append(sorted((group.group_id, content(group)) for group in batch.groups))
                batch.ack()
        assert process.wait(LIMIT_S) == 0
    assert seen == [sorted(one for part in parts for one in part if one[0]) for parts in trained]


def test_a_run_that_kept_not_every_group_is_refused_with_the_name_of_what_is_missing(
    run_dir: Path, tmp_path: Path
) -> None:
    with BrokerProcess(run_dir, config(segment_bytes=1 << 16)) as broker:
        feed(run_dir, (f"g{i}" for i in range(8)))
        with Consumer.blocking(run_dir, sequences=STEP) as consumer:
            consumer.pull(1, PolicyVersion()).ack()
            consumer.commit(PolicyVersion(0, 1))
        segments = RunLayout(run_dir).journal
        wait_until(lambda: len(list(segments.glob("groups-*.rmq"))) < 8, "segments to go")
        broker.end()
    with replaying(run_dir, tmp_path / "replay") as process:
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
    assert "of step 1" in out
    assert "--replay` keeps every group" in out


@pytest.mark.parametrize(
    ("pattern", "error", "said"),
    [("groups-*", MissingError, "of step"), ("events-*", DamagedJournalError, "events-00000001.rmq")],
)
def test_a_damaged_record_is_refused_before_anything_is_served(
    recorded: tuple[Path, list[list[Part]]],
    tmp_path: Path,
    pattern: str,
    error: type[RolloutMQError],
    said: str,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded[0], copy, ignore=shutil.ignore_patterns("*.sock"))
    victim = min(RunLayout(copy).journal.glob(pattern))
    data = bytearray(victim.read_bytes())
    records = [found for found in scan(bytes(data), sealed=False) if isinstance(found, Record)]
    damaged = data.rindex(b"\xa7RMQ") - 64
    if pattern == "groups-*":
        damaged = records[0].offset + records[0].span - 64  # in the body of the first group
    data[damaged] ^= 1
    victim.write_bytes(data)
    with pytest.raises(error, match=said):
        Recording(copy, BodyMemory(1 << 20))


def test_what_was_never_recorded_is_said(run_dir: Path) -> None:
    with pytest.raises(MissingError, match="record a run with"):
        Recording(run_dir, BodyMemory(1 << 20))


@pytest.mark.extended
def test_the_shipped_trainer_ends_in_order_with_a_replay_that_is_shorter_than_its_steps(
    run_dir: Path, tmp_path: Path
) -> None:
    toy = run_config(steps=50, batch_sequences=16)
    environment = {"e": EnvironmentConfig(entry="a:B", group_size=4, pacing=False)}
    settings = toy.model_copy(update={"broker": BrokerConfig(replay=True), "environment": environment})
    with BrokerProcess(run_dir, settings) as broker:
        with (
            Producer.blocking(run_dir, env="e", producer="p", run="run", group_size=4, slots=8) as producer,
            Consumer.blocking(run_dir, sequences=16, info=RunInfo(run="run")) as consumer,
        ):
            for number in range(8):
                producer.send(some_group(f"g{number}", [0.0, 1.0, 0.5, 0.25]))
            for step in (1, 2):
                consumer.pull(step, PolicyVersion(0, step - 1)).ack()
        assert broker.end() == 0
    again = tmp_path / "replay"
    with replaying(run_dir, again) as process:
        ready(process, again)
        command = [sys.executable, "-m", "rolloutmq.launch.cli", "trainer", "--run-dir", str(again)]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
        assert ended.returncode == 0, ended.stderr
        assert [line for line in ended.stderr.splitlines() if "replay ended step=2 of=50" in line]
        assert process.wait(LIMIT_S) == 0


def test_the_recorded_directory_cannot_be_that_of_the_replay(run_dir: Path) -> None:
    run_dir.mkdir(exist_ok=True)
    write_json(RunLayout(run_dir).config, config())
    with pytest.raises(ConfigError, match="is the recorded run"):
        replay(run_dir, run_dir)


@pytest.mark.parametrize("kept", ["*", "facts-*"])
def test_a_record_of_another_version_is_refused_and_only_read(
    recorded: tuple[Path, list[list[Part]]], tmp_path: Path, kept: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded[0], copy, ignore=shutil.ignore_patterns("*.sock"))
    for path in list(RunLayout(copy).journal.glob("*-*.rmq")):
        if not as_version(path, 2).match(kept):
            path.unlink()
    before = listing(copy)
    with replaying(copy, tmp_path / "replay") as process:
        out, _ = process.communicate()
    assert process.returncode == PERMANENT_FAILURE
    assert "got version 2, this one reads" in out.splitlines()[-1]
    assert "Traceback" not in out
    assert listing(copy) == before
