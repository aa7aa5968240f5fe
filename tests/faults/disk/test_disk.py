"""Disks that are full, fail, or forget: no group is acked in vain, and no wrong group is delivered.

The mutations are those of whole run directories: a broker starts with a journal damaged while it was dead.
"""

import asyncio
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from tests.faults.support.processes import (
    LIMIT_S,
    SEQUENCES,
    BrokerProcess,
    Trainer,
    acked,
    config,
    feed,
    is_whole,
    lasting_disk,
    limit_files,
    made,
    may_mount,
    small_disk,
    status,
    wait_until,
)

from rolloutmq.bus.consumer.batch import decode_groups
from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.commands.records.ledger import check
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import StatusReply
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, ConsumerRegistered, Settled, Wait
from rolloutmq.schemas.wire.requests import Pull, RegisterConsumer, Settle
from rolloutmq.services.broker.journal.format.events_codec import decode_events, decode_meta
from rolloutmq.services.broker.journal.format.records import HEADER_BYTES, Record, scan
from rolloutmq.services.broker.server import running_broker

pytestmark = pytest.mark.usefixtures("impatient")

BATCH: Final = 4
"""Groups of a batch."""
JOURNAL_FAILED: Final = 3
"""Exit code of a broker whose disk failed."""
SEGMENT_BYTES: Final = 1 << 20
NBYTES: Final = 40_000
MANY: Final = 400
"""Groups that are more than a producer may begin before it hears of the first."""


def names(count: int, first: int = 0) -> list[str]:
    return [f"g-{number}" for number in range(first, first + count)]


async def send(producer: Producer, ids: list[str]) -> None:
    for group_id in ids:
        await producer.send(made(group_id, NBYTES))


async def pull_all(consumer: Consumer, count: int) -> list[str]:
    """Train until that many groups were trained, committing each step; every one of them is whole."""
    ids: list[str] = []
    while len(ids) < count:
        batch = await consumer.pull(consumer.version.step + 1, consumer.version)
        assert all(is_whole(group, NBYTES) for group in batch.groups)
        ids += [group.group_id for group in batch.groups]
        await batch.ack()
        await consumer.commit(consumer.version)
    return ids


async def until_status(run_dir: Path, met: Callable[[StatusReply], bool], what: str) -> StatusReply:
    """Ask for the status until it is as it should be, and return it."""

    def asked() -> StatusReply | None:
        found = status(run_dir)
        return found if met(found) else None

    found = await asyncio.to_thread(wait_until, asked, what)
    assert found is not None
    return found


def says_full(found: StatusReply) -> bool:
    return found.journal.health == "full" and found.pressure.lanes[0].wait == Wait.JOURNAL_SLOW


Disk = tuple[BrokerProcess, Callable[[], None]]
"""A broker, and a function that makes room on its full disk."""


@contextmanager
def tmpfs(run_dir: Path) -> Iterator[Disk]:
    """A file system of 32 MiB, most of which something else takes: the rest is too little for `MANY` groups."""
    if not may_mount():
        pytest.skip("this user may not mount a file system of its own")
    settings = config(durability="disk", segment_bytes=SEGMENT_BYTES)
    with (
        small_disk(run_dir, 32) as wrap,
        BrokerProcess(run_dir, settings, wrap=wrap) as broker,
    ):
        beyond = Path(f"/proc/{broker.child.pid}/root") / RunLayout(run_dir).journal.relative_to("/")
        ballast = beyond / "ballast"
        ballast.write_bytes(bytes(24 << 20))
        yield broker, ballast.unlink


@contextmanager
def file_limit(run_dir: Path) -> Iterator[Disk]:
    """A disk on which no file may be begun any more."""
    with BrokerProcess(run_dir, config(durability="disk", segment_bytes=SEGMENT_BYTES)) as broker:
        limit_files(broker.child.pid, SEGMENT_BYTES // 2)
        yield broker, lambda: limit_files(broker.child.pid, -1)


@pytest.mark.parametrize("disk", [tmpfs, pytest.param(file_limit, marks=pytest.mark.extended)])
async def test_a_full_disk_holds_everyone_back_and_loses_nothing(
    run_dir: Path, tmp_path: Path, disk: Callable[[Path], AbstractContextManager[Disk]]
) -> None:
    ids, log = names(MANY), tmp_path / "acks.jsonl"
    with ExitStack() as stack:
        _, make_room = await asyncio.to_thread(stack.enter_context, disk(run_dir))
        async with Producer.open(
            run_dir, env="e", producer="p", group_size=SEQUENCES, ack_log=log
        ) as producer:
            sending = asyncio.create_task(send(producer, ids))
            await until_status(run_dir, says_full, "a full disk")
            assert not await producer.flush(0.5)
            assert producer.wait is Wait.JOURNAL_SLOW
            while_full = len(acked(log))
            assert while_full < len(ids)
            make_room()
            await sending
            assert await producer.flush(LIMIT_S)
            await until_status(run_dir, lambda found: found.journal.health == "ok", "a disk that does well")
        assert {line.group_id for line in acked(log)} == set(ids)
        async with Consumer.open(run_dir, sequences=BATCH * SEQUENCES) as consumer:
            assert await pull_all(consumer, len(ids)) == ids


async def test_what_a_full_disk_could_not_take_was_never_acked(run_dir: Path, tmp_path: Path) -> None:
    ids, log = names(MANY), tmp_path / "acks.jsonl"
    with ExitStack() as stack:
        broker, _ = await asyncio.to_thread(stack.enter_context, file_limit(run_dir))
        async with Producer.open(
            run_dir, env="e", producer="p", group_size=SEQUENCES, ack_log=log
        ) as producer:
            sending = asyncio.create_task(send(producer, ids))
            await until_status(run_dir, says_full, "a full disk")
            broker.kill()
            before = [line.group_id for line in acked(log)]
            assert len(before) < len(ids)
            await asyncio.to_thread(broker.start)
            await sending
            assert await producer.flush(LIMIT_S)
        async with Consumer.open(run_dir, sequences=BATCH * SEQUENCES) as consumer:
            got = await pull_all(consumer, len(ids))
    assert sorted(got) == sorted(ids)
    assert got[: len(before)] == before


async def test_training_makes_room_on_a_disk_that_the_run_itself_filled(run_dir: Path) -> None:
    if not may_mount():
        pytest.skip("this user may not mount a file system of its own")
    ids, settings = names(4 * MANY), config(durability="disk", segment_bytes=16 << 20)
    with small_disk(run_dir, 40) as wrap, ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, BrokerProcess(run_dir, settings, wrap=wrap))
        async with Producer.open(run_dir, env="e", producer="p", group_size=SEQUENCES) as producer:
            sending = asyncio.create_task(send(producer, ids))
            await until_status(run_dir, lambda found: found.journal.health == "full", "a full disk")
            try:
                async with (
                    asyncio.timeout(LIMIT_S / 2),
                    Consumer.open(run_dir, sequences=BATCH * SEQUENCES) as consumer,
                ):
                    got = await pull_all(consumer, len(ids))
            finally:
                sending.cancel()
            assert got == ids
            assert await producer.flush(LIMIT_S)


@pytest.mark.parametrize("mebibytes", [24, 40])
async def test_a_broker_killed_on_a_full_disk_lets_training_make_room(run_dir: Path, mebibytes: int) -> None:
    """The producer resends what was not acked as soon as the next life is there."""
    if not may_mount():
        pytest.skip("this user may not mount a file system of its own")
    ids, settings = names(4 * MANY), config(durability="disk", segment_bytes=16 << 20)
    with lasting_disk(run_dir, mebibytes) as wrap, ExitStack() as stack:
        starting = lambda: BrokerProcess(run_dir, settings, wrap=wrap)  # noqa: E731
        broker = stack.enter_context(await asyncio.to_thread(starting))
        async with Producer.open(run_dir, env="e", producer="p", group_size=SEQUENCES) as producer:
            sending = asyncio.create_task(send(producer, ids))
            try:
                for _ in range(2):
                    await until_status(run_dir, lambda found: found.journal.health == "full", "a full disk")
                    await asyncio.to_thread(broker.kill_and_start)
                async with (
                    asyncio.timeout(LIMIT_S / 2),
                    Consumer.open(run_dir, sequences=BATCH * SEQUENCES) as consumer,
                ):
                    got = await pull_all(consumer, len(ids))
            finally:
                sending.cancel()
            assert sorted(got) == sorted(ids)
            assert await producer.flush(LIMIT_S)


@pytest.mark.parametrize("fault", ["sync", pytest.param("write", marks=pytest.mark.extended)])
async def test_a_disk_that_fails_ends_the_broker_and_nothing_is_acked_after(
    run_dir: Path, tmp_path: Path, fault: str
) -> None:
    ids, log, broken = names(40), tmp_path / "acks.jsonl", tmp_path / "broken"
    with ExitStack() as stack:
        starting = lambda: BrokerProcess(run_dir, config(durability="disk"), f"{fault}={broken}")  # noqa: E731
        broker = stack.enter_context(await asyncio.to_thread(starting))
        async with Producer.open(
            run_dir, env="e", producer="p", group_size=SEQUENCES, ack_log=log
        ) as producer:
            await send(producer, ids[:20])
            assert await producer.flush(LIMIT_S)
            broken.touch()
            await send(producer, ids[20:])
            assert await asyncio.to_thread(broker.child.wait) == JOURNAL_FAILED, broker.child.tail()
            assert "error: " in broker.child.tail().splitlines()[-1]
            assert [line.group_id for line in acked(log)] == ids[:20]
            await asyncio.to_thread(broker.start)
            assert await producer.flush(LIMIT_S)
        async with Consumer.open(run_dir, sequences=BATCH * SEQUENCES) as consumer:
            got = await pull_all(consumer, len(ids))
        assert (got[:20], sorted(got)) == (ids[:20], sorted(ids))
        assert (await asyncio.to_thread(status, run_dir)).pressure.ledger.accepted == len(ids)


async def test_short_writes_are_continued(run_dir: Path) -> None:
    ids = names(24)
    with BrokerProcess(run_dir, config(durability="disk"), "short=9973") as broker:
        await asyncio.to_thread(feed, run_dir, ids, nbytes=NBYTES)
        broker.kill()
        await asyncio.to_thread(broker.start)
        async with Consumer.open(run_dir, sequences=BATCH * SEQUENCES) as consumer:
            assert await pull_all(consumer, len(ids)) == ids


async def test_a_deleted_segment_stays_a_loss_by_name(run_dir: Path) -> None:
    ids = names(20)
    with BrokerProcess(run_dir, small_segments()) as broker:
        await asyncio.to_thread(feed, run_dir, ids, nbytes=NBYTES)
        broker.kill()
        (RunLayout(run_dir).journal / "groups-00000002.rmq").unlink()
        lost = problems_of(run_dir)
        assert len(lost) > 2
        await asyncio.to_thread(broker.start)
        async with Consumer.open(run_dir, sequences=SEQUENCES) as consumer:
            got = await pull_all(consumer, len(ids) - len(lost))
        assert sorted([*got, *lost]) == sorted(ids)
        for _ in range(2):
            await asyncio.to_thread(broker.kill_and_start)
            assert problems_of(run_dir) == lost


def problems_of(run_dir: Path) -> list[str]:
    """Return the ids of the groups that `ledger verify` cannot account for."""
    return [problem.group_id for problem in check(RunLayout(run_dir)).problems]


# Damaged journals.

GROUPS: Final = 60
MUTATIONS: Final = 30
LATER_STEP: Final = 100
"""Later than any step of the life before."""
FILE_HEADER_BYTES: Final = 24
"""Without them no part of a file can be distinguished from garbage."""


class Stretch(NamedTuple):
    """Part of a file of the journal."""

    file: str
    start: int
    end: int

    def meets(self, other: "Stretch") -> bool:
        """Whether damage to this stretch may be damage to the other."""
        near = self.start < other.end and other.start < self.end
        return self.file == other.file and (near or self.start < FILE_HEADER_BYTES)


class DeadRun(NamedTuple):
    """A run directory whose broker was killed with acked groups in its queue, and where each of them lies."""

    run_dir: Path
    groups: dict[str, Stretch]
    written: dict[str, int]
    """Bytes of each file that are not only reserved."""


@pytest.fixture(scope="module")
def dead_run(tmp_path_factory: pytest.TempPathFactory) -> DeadRun:
    run_dir = tmp_path_factory.mktemp("dead") / "run"
    run_dir.mkdir(mode=0o700)
    with BrokerProcess(run_dir, small_segments()) as broker:
        feed(run_dir, names(GROUPS), nbytes=NBYTES)
        broker.kill()
    groups, written = {}, {}
    for path in sorted(RunLayout(run_dir).journal.glob("*.rmq")):
        end = FILE_HEADER_BYTES
        for record in records(path):
            end = record.offset + record.span
            if path.name.startswith("groups-"):
                meta = decode_meta(record.meta)
                groups[meta.header.group_id] = Stretch(path.name, record.offset, end)
        written[path.name] = end
    assert set(groups) == set(names(GROUPS))
    assert len({stretch.file for stretch in groups.values()}) > 3
    return DeadRun(run_dir, groups, written)


def small_segments() -> RunConfig:
    return config(durability="disk", segment_bytes=1 << 18, silence_s=0.3)


def records(path: Path) -> list[Record]:
    return [found for found in scan(path.read_bytes(), sealed=False) if isinstance(found, Record)]


def mutate(path: Path, written: int, rng: random.Random) -> tuple[str, Stretch]:
    """Damage a file; return the kind of damage and the changed stretch."""
    name, start = path.name, rng.randrange(written)
    how = rng.choice(["flip", "zero", "cut", "garbage"])
    if how == "cut":
        with path.open("r+b") as file:
            file.truncate(start)
        return how, Stretch(name, start, 1 << 62)
    end = min(written, start + (1 if how == "flip" else rng.randrange(1, 5000)))
    with path.open("r+b") as file:
        file.seek(start)
        old = file.read(end - start)
        new = bytes([old[0] ^ 1 << rng.randrange(8)]) if how == "flip" else bytes(end - start)
        file.seek(start)
        file.write(rng.randbytes(end - start) if how == "garbage" else new)
    return how, Stretch(name, start, end)


def serve_all(run_dir: Path) -> tuple[list[str], StatusReply]:
    """Run a broker on a damaged directory and train all its groups; return their ids and the final status."""
    layout, served = RunLayout(run_dir), list[str]()
    with (
        running_broker(small_segments(), layout) as broker,
        BlockingClient(broker.endpoints.serve) as client,
    ):
        assert isinstance(client.request(RegisterConsumer(consumer="t")), ConsumerRegistered)
        for step in itertools.count(LATER_STEP):
            found = status(run_dir).pressure
            if not found.ledger.queued + found.ledger.leased:
                break
            queued = max(1, found.queued_sequences)
            version, after = PolicyVersion(0, step - 1), PolicyVersion(0, step)
            pull = Pull(
                consumer="t", step=step, version=version, sequences=queued, request_id=f"{step}", wait_s=0.1
            )
            batch, frames = client.request_frames(pull)
            if not isinstance(batch, Batch):
                continue  # something of it turned out to be damaged, or the lease of the dead trainer is not over
            groups, _, rejected = decode_groups(batch, frames)
            assert not rejected
            assert all(is_whole(group, NBYTES) for group in groups)
            ids = tuple(group.group_id for group in groups)
            settle = Settle(
                consumer="t", lease=batch.lease, generation=batch.generation, version=after, trained=ids
            )
            try:
                assert isinstance(client.request(settle), Settled)
            except LeaseLostError:  # this process stood still for longer than a silent consumer may
                assert isinstance(client.request(RegisterConsumer(consumer="t")), ConsumerRegistered)
                continue
            served += ids
        said = status(run_dir)
        broker.stop()
        broker.core.validate()
    return served, said


@pytest.mark.extended
def test_what_is_damaged_is_set_aside_and_the_rest_is_served(dead_run: DeadRun, tmp_path: Path) -> None:
    rng, copy = random.Random(2), tmp_path / "run"
    assert sorted(serve_all(copied(dead_run.run_dir, copy))[0]) == sorted(dead_run.groups)
    for number in range(MUTATIONS):
        kind = "events" if number % 3 == 0 else "groups"
        name = rng.choice([name for name in sorted(dead_run.written) if name.startswith(kind)])
        path = RunLayout(copied(dead_run.run_dir, copy)).journal / name
        how, damage = mutate(path, dead_run.written[name], rng)
        what = f"mutation {number}: {how} {damage}"
        harmed = {name for name, stretch in dead_run.groups.items() if damage.meets(stretch)}
        served, found = serve_all(copy)
        assert len(served) == len(set(served)), what
        assert set(dead_run.groups) >= set(served) >= set(dead_run.groups) - harmed, what
        counts = found.pressure.ledger
        assert counts.trained == len(served), what
        assert counts.queued == counts.leased == 0, what
        if len(served) < GROUPS and how != "cut":
            assert found.journal.quarantined > 0, what
            assert any((RunLayout(copy).journal / "quarantine").iterdir()), what


def copied(run_dir: Path, copy: Path) -> Path:
    """Make a fresh copy of a run whose broker is dead, in place of the last one."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("sockets", "endpoints.json"))
    return copy


def damage_each_record_of_facts(run_dir: Path, due: set[str], copy: Path) -> None:
    """Flip a bit in each record of the log in turn: every group that is due is served all the same."""
    (log,) = RunLayout(run_dir).journal.glob("events-*.rmq")
    found = records(log)
    for record in found:
        damaged = bytearray(log.read_bytes())
        damaged[record.offset + HEADER_BYTES + 1] ^= 1
        (RunLayout(copied(run_dir, copy)).journal / log.name).write_bytes(damaged)
        served, said = serve_all(copy)
        events = [type(event).__name__ for event in decode_events(b"".join(record.frames))]
        what = f"without the record at {record.offset}: {events}"
        assert set(served) >= due, what
        assert len(served) == len(set(served)), what
        assert said.journal.quarantined > 0 or record == found[-1], what


def test_queued_groups_survive_the_loss_of_any_record_of_facts(dead_run: DeadRun, tmp_path: Path) -> None:
    damage_each_record_of_facts(dead_run.run_dir, set(dead_run.groups), tmp_path / "run")


def test_the_order_of_things_survives_the_loss_of_any_record_of_facts(run_dir: Path, tmp_path: Path) -> None:
    steps = 4
    with BrokerProcess(run_dir, small_segments()), Trainer(run_dir, nbytes=NBYTES) as trainer:
        for step in range(1, steps + 1):
            feed(run_dir, names(2 * BATCH, 2 * BATCH * (step - 1)), nbytes=NBYTES)
            assert trainer.train(step).what == "batch"
            if step == 2:
                trainer.commit((0, 2))
        trainer.kill()
    untrained = set(names(2 * BATCH * steps)) - set(names(BATCH * steps))
    damage_each_record_of_facts(run_dir, untrained, tmp_path / "copy")
