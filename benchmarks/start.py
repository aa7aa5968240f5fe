"""How soon a broker is there: on a journal that holds 10 GB, and on nothing. Durability: disk.

The clock starts before the process does. On the journal it stops in a consumer that was waiting already, when its
first batch is decoded; on nothing, at the first reply. The journal is as a killed broker leaves it, and each round
kills the broker again. What the page cache holds of the files is left in it: they were just written, and read by the
rival. That one reads the same files whole, with a checksum: the least that a broker does which replays its payloads.
An interpreter that only imports libraries is a floor for the second figure, and no rival.

    python -m benchmarks.start RUN_DIR    the consumer of a round
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks import feeder, scratch, stage
from benchmarks.row import Row, within
from rolloutmq import Consumer, Group
from rolloutmq.bus.client import BlockingClient
from rolloutmq.bus.codec import EncodedGroup, checksum, encode_group, header_of
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.delivery import GetInfo
from rolloutmq.schemas.envelope import GROUP_LIMIT_BYTES, GroupHeader, Split
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.body import Ram
from rolloutmq.services.broker.journal.facts import Declared, Opened

GIB: Final = 1 << 30
SEQUENCES: Final = 8
TOKENS: Final = 3640
"""Of each sequence, so that a group has 256 KiB."""
GROUPS: Final = 40_000
SPARE_BYTES: Final = 4 * GIB
"""What a full disk is kept from."""
BATCH_GROUPS: Final = 64
ROUNDS: Final = 3
DEADLINE_S: Final = 120.0
READ_BYTES: Final = 8 << 20
LIBRARIES: Final = "import msgspec, numpy, pydantic, uvloop, zmq"


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
        0.5,
    )


def _config() -> RunConfig:
    """All of it may be queued, and nothing is dropped because of its age."""
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
    """Leave a run directory as a broker does that is killed with so many groups queued."""
    config = _config()
    write_json(layout.config, config)
    ram = Ram(config.broker.ram_bytes)
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


def _stored(encoded: EncodedGroup, groups: int, ram: Ram) -> Iterator[StoredGroup]:
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
    command = [sys.executable, "-m", "benchmarks.start", str(layout.root)]
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
    """Be the consumer: say that it waits from now on, and when the first batch came, which must be a whole one."""
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
    """Start a broker on nothing, and return the seconds until its first reply."""
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
