"""Processes the fault tests kill, stop and starve, and the groups that travel between them.

A child runs this module with the name of a role. A broker ends with its parent; a trainer does one thing for each
command, so that a test decides at which moment it dies; a worker sends until it is killed. The contents of a group
follow from its id, so that every receiver can check whether it is whole.
"""

import errno
import itertools
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import numpy as np

from rolloutmq.bus.consumer import connection
from rolloutmq.bus.consumer.client import BlockingBatch, Consumer
from rolloutmq.bus.consumer.groups import GroupConsumer, HeldGroup
from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.bus.producer import connection as uplink
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport import discovery, sockets
from rolloutmq.bus.transport.endpoint import read_endpoints, resolve_blocking
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.schemas.wire.envelope import PolicyVersion

ROOT: Final = Path(__file__).parents[3]
LIMIT_S: Final = 120.0
"""Longest wait for anything; a machine that does other things too needs a part of it."""
WAIT_S: Final = 30.0
"""Longest wait of a pull."""
POLL_S: Final = 0.01
SEQUENCES: Final = 2
"""Sequences of each group."""
GROUP_BYTES: Final = (1 << 10, 200 << 10)
"""Sizes that groups have."""
IMPATIENCE: Final[tuple[tuple[Any, str, float], ...]] = (
    (connection, "BEAT_S", 0.1),
    (connection, "PATIENCE_S", 0.5),
    (connection, "REPEAT_S", 0.1),
    (uplink, "PATIENCE_S", 0.5),
    (uplink, "REPEAT_S", 0.1),
    (discovery, "ATTEMPT_S", 0.3),
)
"""Settings with which a client soon notices that its broker is gone."""
T = TypeVar("T")


def config(**broker: Any) -> RunConfig:
    """Return a run without a staleness bound, where silence is noticed within a second."""
    env = EnvironmentConfig(entry="a:B", group_size=SEQUENCES, pacing=False, stale="pass")
    return RunConfig(
        environment={"e": env},
        broker=BrokerConfig.model_validate({"silence_s": 1.0, **broker}),
        trainer=TrainerConfig(batch_sequences=4 * SEQUENCES),
    )


def made(group_id: str, nbytes: int = 0) -> Group:
    """Return the group of that id, the same for every caller. About `nbytes`, or of a size that follows from the id."""
    rng = np.random.default_rng(zlib.crc32(group_id.encode()))
    drawn = int(rng.integers(*GROUP_BYTES))
    cut = int(rng.integers(1, 9))
    lengths = [length := max(1, (nbytes or drawn) // (5 * SEQUENCES)), length + cut]
    tokens = [rng.integers(0, 1 << 31, n, np.int32) for n in lengths]
    return Group.build(
        group_id,
        tokens=tokens,
        mask=[rng.integers(0, 2, n).astype(bool) for n in lengths],
        scores=rng.random(SEQUENCES),
        oldest=PolicyVersion(),
    )


def content(group: Group) -> int:
    """Return a checksum over all columns of a group."""
    return encode_group(group, 1 << 30).crc


def is_whole(group: Group, nbytes: int = 0) -> bool:
    """Return whether a group is bit for bit the one of its id."""
    return content(group) == content(made(group.group_id, nbytes))


def wait_until(met: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """Poll until a condition holds and return its value; fail with `what` after the time limit."""
    until = time.monotonic() + limit_s
    while not (found := met()):
        assert time.monotonic() < until, f"waited {limit_s:.0f} s for {what}"
        time.sleep(POLL_S)
    return found


def status(run_dir: Path) -> StatusReply:
    """Ask the broker of a run directory for its status."""
    with BlockingClient(resolve_blocking(run_dir, LIMIT_S).serve) as client:
        reply = client.request(GetStatus(), LIMIT_S)
    assert isinstance(reply, StatusReply)
    return reply


def feed(run_dir: Path, ids: Iterable[str], producer: str = "p", nbytes: int = 0, slots: int = 1) -> None:
    """Send groups and wait until all are acked."""
    with Producer.blocking(run_dir, env="e", producer=producer, group_size=SEQUENCES, slots=slots) as p:
        for group_id in ids:
            p.send(made(group_id, nbytes))
        assert p.flush(LIMIT_S)


def acked(log: Path) -> list[AckedGroup]:
    """Read an ack log; its last line may be torn by a kill."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return [msgspec.json.decode(line, type=AckedGroup) for line in lines]


class Child:
    """A process that runs this module; output beside its answers goes to a log."""

    def __init__(
        self, log: Path, role: str, run_dir: Path, *arguments: str, wrap: Sequence[str] = ()
    ) -> None:
        command = [
            *wrap,
            sys.executable,
            "-m",
            "tests.faults.support.processes",
            role,
            str(run_dir),
            *arguments,
        ]
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0
            )
        self._heard = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, without waiting."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it and wait until it is gone. May be called twice."""
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Wait until it has ended and return its exit code."""
        code = self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def send_line(self, line: bytes) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    def read_line(self, limit_s: float = LIMIT_S) -> bytes:
        """Read a line of its output; empty if it has ended."""
        assert self.process.stdout is not None
        until = time.monotonic() + limit_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"process {self.pid} says nothing: {self.tail()}"
            more = self.process.stdout.read(1 << 16)
            if not more:
                return b""
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:]


class BrokerProcess:
    """A broker of a run directory that may be killed and restarted.

    Args:
        run_dir: The run directory; its configuration is written there.
        settings: The configuration.
        faults: Faults of its disk: see `_break_disk`.
        wrap: Command the process is started by.
    """

    def __init__(self, run_dir: Path, settings: RunConfig, *faults: str, wrap: Sequence[str] = ()) -> None:
        self.layout = RunLayout(run_dir)
        self.log = run_dir.with_name("broker.log")
        write_json(self.layout.config, settings)
        self._faults = faults
        self._wrap = wrap
        self.child = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.child.kill()

    def _started(self) -> Child:
        child = Child(self.log, "broker", self.layout.root, *self._faults, wrap=self._wrap)

        def ready() -> bool:
            assert child.process.poll() is None, f"the broker ended: {child.tail()}"
            found = read_endpoints(self.layout.root)
            return found is not None and found.pid == child.pid

        try:
            wait_until(ready, "the broker")
        except BaseException:
            child.kill()
            raise
        return child

    @property
    def epoch(self) -> int:
        """Number of its life."""
        found = read_endpoints(self.layout.root)
        assert found is not None
        return found.epoch

    def kill(self) -> None:
        """Kill it."""
        self.child.kill()

    def start(self, *faults: str) -> None:
        """Start another life, with disk faults of its own, and wait until it serves."""
        self._faults = faults
        self.child = self._started()

    def kill_and_start(self) -> None:
        """Kill it and start another life with the state of the last one."""
        self.kill()
        self.start(*self._faults)

    def end(self) -> int:
        """End it in order and return its exit code."""
        self.child.signal(signal.SIGTERM)
        return self.child.wait()


class TrainerCommand(msgspec.Struct):
    """Command to a trainer; `policy` is (incarnation, step)."""

    what: str
    step: int = 0
    policy: tuple[int, int] = (0, 0)
    filtered: tuple[str, ...] = ()
    wait_s: float = WAIT_S


class TrainerAnswer(msgspec.Struct):
    """Answer of a trainer."""

    what: str
    """`ready`, `batch`, `none`, `settled`, `lost` or `done`."""
    ids: tuple[str, ...] = ()
    deliveries: tuple[int, ...] = ()
    whole: bool = True
    """Whether each group is bit for bit the one of its id."""
    rewound: bool = False
    lease: int = 0


class TrainerArgs(msgspec.Struct):
    """Arguments of a trainer.

    Attributes:
        dies_of: A batch with one of these groups ends its process at once.
        resume: Checkpoint it starts from, as (incarnation, step).
        nbytes: Size of the groups; 0 for a size that follows from the id.
    """

    consumer: str = "trainer-0"
    rank: int = 0
    world_size: int = 1
    sequences: int = 4 * SEQUENCES
    resume: tuple[int, int] | None = None
    dies_of: tuple[str, ...] = ()
    nbytes: int = 0


DIED_OF_POISON: Final = 77
"""Exit code of a trainer that met a group it dies of."""


class Trainer(Child):
    """A trainer that follows commands, in a process of its own; its heartbeats go on by themselves."""

    def __init__(self, run_dir: Path, **about: Any) -> None:
        told = msgspec.json.encode(TrainerArgs(**about)).decode()
        super().__init__(run_dir.with_name("trainer.log"), "trainer", run_dir, told)
        try:
            assert self.answer().what == "ready"
        except BaseException:
            self.kill()
            raise

    def pull(self, step: int, policy: tuple[int, int] | None = None, wait_s: float = WAIT_S) -> TrainerAnswer:
        """Pull the batch of a step; `what` is empty if the trainer died of it."""
        return self.ask(TrainerCommand("pull", step, policy or (0, step - 1), wait_s=wait_s))

    def settle(self, policy: tuple[int, int], filtered: tuple[str, ...] = ()) -> TrainerAnswer:
        """Settle the last batch; `policy` is the one after the step."""
        return self.ask(TrainerCommand("settle", policy=policy, filtered=filtered))

    def train(self, step: int, incarnation: int = 0) -> TrainerAnswer:
        """Pull the batch of a step, settle it, and return it; `what` is empty if the trainer died of it."""
        batch = self.pull(step, (incarnation, step - 1))
        if batch.what == "batch":
            assert batch.whole
            assert self.settle((incarnation, step)).what == "settled"
        return batch

    def commit(self, policy: tuple[int, int]) -> None:
        """Commit a checkpoint that covers everything up to that policy."""
        assert self.ask(TrainerCommand("commit", policy=policy)).what == "done"

    def progress(self) -> None:
        """Report progress."""
        assert self.ask(TrainerCommand("progress")).what == "done"

    def ask(self, request: TrainerCommand) -> TrainerAnswer:
        """Send a command and wait for the answer; `what` is empty if the trainer died of it."""
        self.send_line(msgspec.json.encode(request))
        return self.answer()

    def answer(self) -> TrainerAnswer:
        """Wait for the answer to the last command."""
        line = self.read_line()
        return msgspec.json.decode(line, type=TrainerAnswer) if line else TrainerAnswer("")


class Buffered(msgspec.Struct):
    """Arguments of a trainer with a buffer: groups that it needs for a step, and as those of a trainer."""

    needed: int
    resume: tuple[int, int] | None = None
    dies_of: tuple[str, ...] = ()


class BufferingTrainer(Child):
    """A trainer that holds groups of a window until it has enough for a step, in a process of its own."""

    def __init__(self, run_dir: Path, needed: int, **about: Any) -> None:
        told = msgspec.json.encode(Buffered(needed, **about)).decode()
        super().__init__(run_dir.with_name("trainer.log"), "buffer", run_dir, told)

    def held(self) -> tuple[str, ...]:
        """Wait until it has enough; return the ids, or none if it died of one of them."""
        line = self.read_line()
        return msgspec.json.decode(line, type=tuple[str, ...]) if line else ()

    def train(self) -> tuple[str, ...]:
        """Let it take the step and commit it; return the groups whose lease was lost before."""
        self.send_line(b"train")
        return msgspec.json.decode(self.read_line(), type=tuple[str, ...])


class Task(msgspec.Struct):
    """Work of a worker.

    Attributes:
        first, count: Numbers of the groups.
        nbytes: Size of the groups; 0 for a size that follows from the id.
        pause_s: Time between two groups.
        line: Address to send to in place of the broker's own.
    """

    producer: str
    ack_log: str
    first: int = 0
    count: int = 1 << 30
    nbytes: int = 0
    pause_s: float = 0.0
    line: str = ""


class Worker(Child):
    """A worker that sends groups of the ids `<producer>-<number>` as fast as it can, until it is killed."""

    def __init__(self, run_dir: Path, producer: str, ack_log: Path, **options: Any) -> None:
        task = Task(producer, str(ack_log), **options)
        super().__init__(
            run_dir.with_name("worker.log"), "worker", run_dir, msgspec.json.encode(task).decode()
        )


@contextmanager
def small_disk(run_dir: Path, mebibytes: int) -> Iterator[list[str]]:
    """Yield the command that runs a process with a journal on a small disk of its own."""
    journal = RunLayout(run_dir).journal
    journal.mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o size={mebibytes}m,mode=700 none "{journal}" && exec "$@"'
    yield ["unshare", "-Urm", "sh", "-c", mount, "sh"]


@contextmanager
def lasting_disk(run_dir: Path, mebibytes: int) -> Iterator[list[str]]:
    """Like `small_disk`, for several processes one after the other: the disk lasts as long as the block."""
    with (
        small_disk(run_dir, mebibytes) as mount,
        subprocess.Popen([*mount, "sh", "-c", "echo ready && exec cat"], stdin=-1, stdout=-1) as holder,
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"ready\n"
            yield ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials", f"--wd={ROOT}"]
        finally:
            holder.kill()


def may_mount() -> bool:
    """Return whether this user may mount a file system."""
    probe = "mount -t tmpfs -o size=1m none /tmp"
    command = ["unshare", "-Urm", "sh", "-c", probe]
    try:
        return subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0
    except OSError:
        return False


def limit_files(pid: int, nbytes: int) -> None:
    """Limit the size of the files a process writes; -1 lifts the limit."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if nbytes < 0 else nbytes, most))


# Roles of the children.


def _broker(run_dir: str, *faults: str) -> int:
    from rolloutmq.services.broker.server import main

    threading.Thread(target=_end_with_parent, daemon=True).start()
    for fault in faults:
        _break_disk(fault)
    return main(Path(run_dir))


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _break_disk(fault: str) -> None:
    """Make the disk of this process fail.

    `sync=FILE`: once the file exists, syncs fail; `write=FILE`: writes fail. `short=N`: each write is cut after N
    bytes, and every third one is interrupted.
    """
    from rolloutmq.services.broker.journal.disk import Disk

    what, _, told = fault.partition("=")
    sync, write, calls = Disk.fdatasync, Disk.pwritev, itertools.count()

    def fail() -> None:
        if Path(told).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def broken_sync(disk: Disk, fd: int) -> None:
        fail()
        sync(disk, fd)

    def broken_write(disk: Disk, fd: int, buffers: Sequence[Any], offset: int) -> int:
        fail()
        return write(disk, fd, buffers, offset)

    def short_write(disk: Disk, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if next(calls) % 3 == 2:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        first = next(buffer for buffer in buffers if len(buffer))
        return write(disk, fd, [memoryview(first).cast("B")[: int(told)]], offset)

    name, method = {
        "sync": ("fdatasync", broken_sync),
        "write": ("pwritev", broken_write),
        "short": ("pwritev", short_write),
    }[what]
    setattr(Disk, name, method)


def _trainer(run_dir: str, args: str) -> int:
    about = msgspec.json.decode(args, type=TrainerArgs)
    resume = PolicyVersion(*about.resume) if about.resume else None
    with Consumer.blocking(
        Path(run_dir),
        sequences=about.sequences,
        consumer=about.consumer,
        rank=about.rank,
        world_size=about.world_size,
        resume=resume,
    ) as consumer:
        _print_answer(TrainerAnswer("ready"))
        batch: BlockingBatch | None = None
        for line in sys.stdin.buffer:
            asked = msgspec.json.decode(line, type=TrainerCommand)
            version = PolicyVersion(*asked.policy)
            match asked.what:
                case "pull":
                    try:
                        batch = consumer.pull(asked.step, version, asked.wait_s)
                    except LeaseLostError:
                        _print_answer(TrainerAnswer("lost"))
                    else:
                        _print_answer(_of(batch, about))
                case "settle":
                    assert batch is not None
                    try:
                        consumer.settle(batch, version=version, filtered=asked.filtered)
                    except LeaseLostError:
                        _print_answer(TrainerAnswer("lost"))
                    else:
                        _print_answer(TrainerAnswer("settled"))
                case "commit":
                    consumer.commit(version)
                    _print_answer(TrainerAnswer("done"))
                case _:
                    consumer.progress()
                    _print_answer(TrainerAnswer("done"))
    return 0


def _of(batch: BlockingBatch | None, about: TrainerArgs) -> TrainerAnswer:
    if batch is None:
        return TrainerAnswer("none")
    ids = tuple(group.group_id for group in batch.groups)
    if not set(about.dies_of).isdisjoint(ids):
        os._exit(DIED_OF_POISON)
    return TrainerAnswer(
        "batch",
        ids,
        tuple(delivery.deliveries for delivery in batch.deliveries),
        all(is_whole(group, about.nbytes) for group in batch.groups),
        batch.rewound,
        batch.lease,
    )


def _buffer(run_dir: str, args: str) -> int:
    about = msgspec.json.decode(args, type=Buffered)
    resume = PolicyVersion(*about.resume) if about.resume else None
    opened = GroupConsumer.blocking(Path(run_dir), batch_sequences=about.needed * SEQUENCES, resume=resume)
    with opened as consumer:
        held: list[HeldGroup] = []
        for one in consumer:
            if one.group_id in about.dies_of:
                os._exit(DIED_OF_POISON)
            held.append(one)
            if len(held) < about.needed:
                continue
            sys.stdout.buffer.write(msgspec.json.encode([each.group_id for each in held]) + b"\n")
            sys.stdout.buffer.flush()
            sys.stdin.buffer.readline()
            lost = consumer.settle(held).lost
            consumer.commit(consumer.version)
            sys.stdout.buffer.write(msgspec.json.encode(lost) + b"\n")
            return 0
    return 1


def _print_answer(answer: TrainerAnswer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _worker(run_dir: str, args: str) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = msgspec.json.decode(args, type=Task)
    if task.line:
        push = sockets.producer_push
        vars(uplink)["producer_push"] = lambda context, _address, _keys: push(context, task.line)
    with Producer.blocking(
        Path(run_dir),
        env="e",
        producer=task.producer,
        group_size=SEQUENCES,
        ack_log=Path(task.ack_log),
        spool_bytes=max(64 << 20, 2 * task.nbytes),
    ) as producer:
        for number in range(task.first, task.first + task.count):
            producer.send(made(f"{task.producer}-{number}", task.nbytes))
            time.sleep(task.pause_s)
        assert producer.flush(LIMIT_S)
    return 0


if __name__ == "__main__":
    for module, name, value in IMPATIENCE:
        setattr(module, name, value)
    roles: dict[str, Callable[..., int]] = {
        "broker": _broker,
        "trainer": _trainer,
        "buffer": _buffer,
        "worker": _worker,
    }
    sys.exit(roles[sys.argv[1]](*sys.argv[2:]))
