"""Cost of the latencies that processes measure: end to end, and in the broker for each group.

End to end is the CPU of a group in all processes, with small groups, which come most often: `telemetry.latencies` on
against off. On a busy machine the rate is the number of cores over this CPU. A difference of one percent is smaller
than that of two rounds of the same kind, so the brokers carry the groups in lockstep, see `lockstep`: each round starts
one with latencies and two without, and has many short blocks. The row has the mean over the rounds of the median
ratio of their blocks, and its 95 % interval, by resampling the rounds. The two brokers without latencies say in the
same way what the method can tell: the farther end of their interval must be within the goal, too. The samples are in
it, as often for each group as in a broker that is never idle.

The broker's own cost is that of its durations of all five hops (`broker.state.group_hops`), in blocks of one
environment as a trainer pulls them, samples included; beside it stands what the whole core takes for a group. Both are
as in a run: beyond a number of groups in a sample, one of several stands for all.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median
from typing import Final

import numpy as np

from benchmarks.broker import environments, throughput
from benchmarks.harness import stage
from benchmarks.harness.row import Row, within
from benchmarks.sdk import lockstep
from rolloutmq.schemas.config.run import TelemetryConfig
from rolloutmq.schemas.wire.envelope import ColumnTable, GroupHeader, PolicyVersion, RewardSummary, Split
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.group_hops import GATHERED, STRIDE, GroupHops

GOAL: Final = 1.01
"""Most CPU of a group with latencies, relative to that without."""
GOAL_US: Final = 0.6
"""Most CPU of a group in all its hops."""
ROUNDS: Final = 36
"""Brokers differ among themselves more than their blocks do, so there are many rounds of few blocks."""
BLOCKS: Final = 24
RESAMPLED: Final = 4000

Blocks = list[tuple[float, ...]]
"""CPU of a group in each lane, block by block."""

BLOCK_GROUPS: Final = 64
GROUPS: Final = 8192
AT: Final = 1_700_000_000.0


def rows() -> Iterator[Row]:
    """CPU of all processes on against off, what the method can tell, and CPU of the broker."""
    rounds = [round_of_blocks(seed=number) for number in range(ROUNDS)]
    yield on_against_off(rounds)
    yield off_against_off(rounds)
    yield within(
        "CPU of the latencies of a group in the broker, µs",
        f"blocks of {BLOCK_GROUPS} groups",
        hops_us,
        core_us,
        "the whole core without them",
        GOAL_US,
    )


def round_of_blocks(blocks: int = BLOCKS, seed: int = 0) -> Blocks:
    """Measure new brokers: one with latencies, and two without."""
    about = stage.config(durability="memory")
    lanes = [
        about.model_copy(update={"telemetry": TelemetryConfig(latencies=latencies)})
        for latencies in (True, False, False)
    ]
    return lockstep.blocks(lanes, throughput.SMALL, blocks, seed)


def on_against_off(rounds: Sequence[Blocks]) -> Row:
    """Return the row of the goal: with latencies, against the mean of both lanes without."""
    ratios = [median(on / ((off + again) / 2) for on, off, again in blocks) for blocks in rounds]
    low, high = interval(ratios)
    ratio = mean(ratios)
    return Row(
        "CPU of a group in all processes with latencies measured, µs, memory",
        str(throughput.SMALL),
        _us(rounds, lambda block: block[0]),
        _us(rounds, lambda block: (block[1] + block[2]) / 2),
        "`telemetry.latencies` off",
        round(ratio, 4),
        GOAL,
        ratio <= GOAL,
        "ratio, at most",
        spread=round((high - low) / 2, 4),
    )


def off_against_off(rounds: Sequence[Blocks]) -> Row:
    """Return the row of the method: the end of the interval that is farther from 1, as a ratio above 1."""
    low, high = interval([median(off / again for _, off, again in blocks) for blocks in rounds])
    farther = max(high, 1 / low)
    return Row(
        "CPU of a group without latencies, µs, memory: farther end of the ratio's 95 % interval",
        str(throughput.SMALL),
        _us(rounds, lambda block: block[1]),
        _us(rounds, lambda block: block[2]),
        "the same again",
        round(farther, 4),
        GOAL,
        farther <= GOAL,
        "ratio, at most",
        spread=round((high - low) / 2, 4),
    )


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of rounds, by resampling them; the same for the same rounds."""
    drawn = np.random.default_rng(0).choice(np.asarray(ratios), (RESAMPLED, len(ratios)))
    low, high = np.percentile(drawn.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def _us(rounds: Sequence[Blocks], of: Callable[[tuple[float, ...]], float]) -> float:
    return round(median(of(block) for blocks in rounds for block in blocks), 1)


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
    shares = [BatchShare(part) for part in blocks]
    assert all(share.lanes for share in shares)  # added up for the lease, with or without latencies
    started = time.process_time()
    for part in blocks:
        hops.accepted(part)
        if hops.uncounted >= GATHERED:
            hops.gather()
    for share in shares:
        hops.handed_out(share, AT + 2.0)
        hops.settled(share, 3.0)
        hops.committed(share, 60.0)
    (sample,) = hops.samples(AT + 1.0)
    passed_s = time.process_time() - started
    assert all(abs(row.durations.count - groups) < STRIDE for row in sample.rows)
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
