"""Start-up times: of a broker, on a journal of 10 GB and on an empty directory, and of the SDK. Durability: disk.

The clock starts before the process. On the journal it stops when an already waiting consumer has decoded its first
batch; on an empty directory, at the first reply. The journal is in the state of a killed broker, and each round kills
the broker again. The files stay in the page cache: they were just written, and the rival has read them. The rival reads
the same files whole, with a checksum: the minimum work of a broker that replays its payloads. For the second figure an
interpreter that only imports libraries is a floor, not a rival. The SDK's import is compared with that of the libraries
it needs, in CPU time, with bytecode, and including the interpreter.

    python -m benchmarks.broker.start RUN_DIR    the consumer of a round
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.broker import feeder
from benchmarks.harness import scratch, stage
from benchmarks.harness.row import Row, near, within
from rolloutmq import Consumer, Group
from rolloutmq.bus.encoding.codec import EncodedGroup, checksum, encode_group, header_of
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import GROUP_LIMIT_BYTES, GroupHeader, Split
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.services.broker.journal.format.events import Declared, Opened
from rolloutmq.services.broker.journal.stored_group import BodyMemory, StoredGroup

GIB: Final = 1 << 30
SEQUENCES: Final = 8
TOKENS: Final = 3640
"""Tokens of each sequence, so that a group has 256 KiB."""
GROUPS: Final = 40_000
SPARE_BYTES: Final = 4 * GIB
"""Disk space left free."""
BATCH_GROUPS: Final = 64
ROUNDS: Final = 3
DEADLINE_S: Final = 120.0
READ_BYTES: Final = 8 << 20
LIBRARIES: Final = "import msgspec, numpy, pydantic, uvloop, zmq"
SDK: Final = "from rolloutmq import Consumer, Group, Producer"
SDK_LIBRARIES: Final = "import msgspec, numpy, uvloop, zmq, zmq.asyncio"
IMPORTS: Final = 5
"""Interpreters of one round."""


def restart_rows() -> Iterator[Row]:
    """Seconds to the first batch."""
    encoded = encode_group(group(), GROUP_LIMIT_BYTES)
    room = max(0, scratch.free_bytes() - SPARE_BYTES) // encoded.nbytes
    groups = min(GROUPS, room)
    with scratch.directory() as directory:
        layout = RunLayout(directory)
        write_journal(layout, encoded, groups)
        nbytes = sum(path.stat().st_size for path in _files(layout))
        yield within(
            "restart to the first batch, s, disk",
            f"journal of {nbytes / 1e9:.1f} GB, {groups:,} groups of {encoded.nbytes / 1e3:.0f} kB",
            partial(first_batch_s, layout),
            partial(read_s, layout),
            "reading the journal's files whole, with a checksum",
            5.0,
            ROUNDS,
        )


def ready_rows() -> Iterator[Row]:
    """Seconds to the first reply."""
    yield within(
        "broker ready from nothing, s, disk",
        "empty run directory",
        ready_s,
        _libraries_s,
        f"python -c '{LIBRARIES}': a floor, no rival",
        0.4,
    )


def import_rows() -> Iterator[Row]:
    """Seconds of CPU."""
    import_s(SDK)  # writes the bytecode
    yield near(
        "import of the SDK, s of CPU",
        SDK,
        partial(import_s, SDK),
        partial(import_s, SDK_LIBRARIES),
        f"python -c '{SDK_LIBRARIES}'",
        1.1,
    )


def import_s(code: str) -> float:
    """Run the code in new interpreters, and return the CPU seconds of one."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = _children_cpu_s()
    for _ in range(IMPORTS):
        subprocess.run([sys.executable, "-c", code], check=True, env=environ)
    return (_children_cpu_s() - began) / IMPORTS


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _config() -> RunConfig:
    """Return a configuration that queues everything and drops nothing by age."""
    return stage.config(durability="disk", high_bytes=16 * GIB)


def group() -> Group:
    """Eight long sequences, 256 KiB."""
    return Group.build(
        "g",
        tokens=np.ones((SEQUENCES, TOKENS), np.int32),
        mask=np.ones((SEQUENCES, TOKENS), bool),
        scores=np.zeros(SEQUENCES),
        inference_logprobs=np.zeros((SEQUENCES, TOKENS), np.float32),
    )


def write_journal(layout: RunLayout, encoded: EncodedGroup, groups: int) -> None:
    """Leave a run directory in the state of a broker killed with this many groups queued."""
    config = _config()
    write_json(layout.config, config)
    ram = BodyMemory(config.broker.ram_bytes)
    with feeder.running(layout.journal, config.broker, ram) as running:
        running.tell([_opened(), Declared(feeder.SESSION, (encoded.table,))])
        running.feed(_stored(encoded, groups, ram))


def _opened() -> Opened:
    return Opened(
        number=feeder.SESSION,
        producer=feeder.PRODUCER,
        env=feeder.ENV,
        split=Split.TRAIN,
        slots=64,
        group_size=SEQUENCES,
        weight=1.0,
        min_share=0.0,
        pid=1,
        host="",
    )


def _stored(encoded: EncodedGroup, groups: int, ram: BodyMemory) -> Iterator[StoredGroup]:
    frame = memoryview(b"".join(encoded.frames))
    for header in _headers(encoded, groups):
        yield feeder.stored(header, encoded.table, frame, ram)


def _headers(encoded: EncodedGroup, groups: int) -> Iterator[GroupHeader]:
    first = header_of(group(), encoded, seq=1, position=encoded.nbytes)
    for number in range(1, groups + 1):
        yield msgspec.structs.replace(
            first,
            seq=number,
            position=number * encoded.nbytes,
            group_id=f"{feeder.PRODUCER}/{number}",
        )


def _files(layout: RunLayout) -> list[Path]:
    return sorted(layout.journal.glob("*.rmq"))


def first_batch_s(layout: RunLayout) -> float:
    """Restart a broker on a journal, and return the seconds until a waiting consumer has a batch."""
    command = [sys.executable, "-m", "benchmarks.broker.start", str(layout.root)]
    consumer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with consumer:
        try:
            _line_of(consumer)
            started = time.monotonic()
            with stage.broker(layout):
                at, _ = consumer.communicate(timeout=DEADLINE_S)
        finally:
            consumer.kill()
    return float(at) - started


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def main(run_dir: str) -> None:
    """Run the consumer: print when it starts to wait, and when the first batch came, which must be complete."""
    print("waiting", flush=True)
    with Consumer.blocking(Path(run_dir), sequences=BATCH_GROUPS * SEQUENCES) as consumer:
        batch = next(consumer)
        at = time.monotonic()
        assert len(batch.groups) == BATCH_GROUPS
        batch.ack()
    print(at)


def read_s(layout: RunLayout) -> float:
    """Read the journal's files whole, and return the seconds."""
    started = time.perf_counter()
    buffer = memoryview(bytearray(READ_BYTES))
    for path in _files(layout):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum([buffer[:count]])
    return time.perf_counter() - started


def ready_s() -> float:
    """Start a broker in an empty directory, and return the seconds until its first reply."""
    with scratch.directory() as directory:
        layout = RunLayout(directory)
        write_json(layout.config, _config())
        started = time.perf_counter()
        with stage.broker(layout) as process:
            with BlockingClient(stage.bound(layout, process).serve) as client:
                client.request(GetInfo())
            return time.perf_counter() - started


def _libraries_s() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", LIBRARIES], check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
