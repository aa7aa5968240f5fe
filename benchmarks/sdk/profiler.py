"""Cost of the latencies that processes measure: end to end, and in the broker for each group.

End to end is the round of `broker.throughput`, with small groups, which come most often: with `telemetry.latencies` on
against off, in turns in one run.

The broker's own cost is that of its durations of all five hops (`broker.state.group_hops`), in blocks of one
environment as a trainer pulls them, samples included; beside it stands what the whole core takes for a group. Nothing
is left out or drawn by chance: every group counts, in vectorised blocks.
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.broker import environments, throughput
from benchmarks.harness import stage
from benchmarks.harness.row import Row, compare, within
from rolloutmq.schemas.config.run import TelemetryConfig
from rolloutmq.schemas.wire.envelope import ColumnTable, GroupHeader, PolicyVersion, RewardSummary, Split
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup
from rolloutmq.services.broker.state.group_hops import GATHERED, GroupHops

GOAL: Final = 0.99
"""Least throughput with latencies, relative to that without."""
GOAL_US: Final = 0.6
"""Most CPU of a group in all its hops."""
ROUNDS: Final = 11
"""More than usual: the difference is smaller than the noise of one round."""
BLOCK_GROUPS: Final = 64
GROUPS: Final = 8192
AT: Final = 1_700_000_000.0


def rows() -> Iterator[Row]:
    """Throughput on against off, and CPU of the broker."""
    yield compare(
        "groups/s end to end with latencies measured, memory",
        str(throughput.SMALL),
        partial(rate, latencies=True),
        partial(rate, latencies=False),
        "`telemetry.latencies` off",
        GOAL,
        rounds=ROUNDS,
    )
    yield within(
        "CPU of the latencies of a group in the broker, µs",
        f"blocks of {BLOCK_GROUPS} groups",
        hops_us,
        core_us,
        "the whole core without them",
        GOAL_US,
    )


def rate(*, latencies: bool) -> float:
    """Run one round through a new broker, and return groups a second."""
    about = stage.config(durability="memory")
    about = about.model_copy(update={"telemetry": TelemetryConfig(latencies=latencies)})
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        return throughput.through(Path(directory), about, throughput.SMALL)


def core_us(batches: int = environments.BATCHES) -> float:
    """Return the CPU of a group in the core without latencies, in microseconds."""
    loaded = environments.LoadedCore(1, environments.QUEUED, latencies=False)
    for _ in range(environments.SETTLES):
        loaded.train()
    started = time.process_time()
    for _ in range(batches):
        loaded.train()
    return (time.process_time() - started) * 1e6 / (batches * environments.BATCH_GROUPS)


def hops_us(groups: int = GROUPS, block: int = BLOCK_GROUPS) -> float:
    """Return the CPU of the five hops of a group, in microseconds."""
    made = [stored(number) for number in range(groups)]
    blocks = [made[at : at + block] for at in range(0, groups, block)]
    hops = GroupHops("here")
    hops.samples(AT)
    started = time.process_time()
    for group in made:
        hops.arrived.append(group)
        if len(hops.arrived) >= GATHERED:
            hops.gather()
    for part in blocks:
        hops.handed_out(part, AT + 2.0)
        hops.settled(part, 3.0)
        hops.committed(part, 60.0)
    (sample,) = hops.samples(AT + 1.0)
    passed_s = time.process_time() - started
    assert {row.durations.count for row in sample.rows} == {groups}
    return passed_s * 1e6 / groups


def stored(number: int) -> StoredGroup:
    """Return a group that was accepted, with times of its own."""
    accepted_at = AT + 1.0 + number % 997 * 0.001
    header = GroupHeader(
        seq=number + 1,
        position=0,
        group_id=f"e-0/{number}",
        table="",
        frames=1,
        nbytes=1,
        crc=0,
        sequences=4,
        tokens=40,
        oldest=PolicyVersion(),
        newest=PolicyVersion(),
        started_at=AT + number % 991 * 0.001,
        finished_at=accepted_at - number % 13 * 0.001,
        rewards=RewardSummary(),
    )
    return StoredGroup(
        header=header,
        env="e",
        split=Split.TRAIN,
        run="default",
        producer="e-0",
        session=1,
        table=ColumnTable(()),
        body=GroupBody((b"",), 1),
        accepted_at=1.0,
        accepted_wall=accepted_at,
        deliveries=1,
        order=number + 1,
    )
