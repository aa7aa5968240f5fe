"""CPU of a group in all processes, in microseconds, through the broker and through `zmq.proxy`; durability memory.

The rate of two cores depends on what else they do; the CPU of a group hardly does. The processes are those of
`throughput` and `proxy`: two producers, the broker or the proxy, and a consumer, saturated. Their CPU is read while the
consumer counts, and divided by the groups that it gets in that time. The broker's mark is small, so that its queue is
full by then and a group goes in for each that goes out.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.broker import proxy, throughput
from benchmarks.harness import stage
from benchmarks.harness.row import Row, within
from benchmarks.harness.workload import Shape
from rolloutmq.schemas.files import RunLayout

LASTS_S: Final = 3.0
WARM_UP_S: Final = 1.5
HIGH_BYTES: Final = 64 << 20
GOAL_US: Final = 60.0
SHAPES: Final = ((throughput.SMALL, None), (throughput.SINGLE, None), (throughput.MIDDLE, GOAL_US))


def rows() -> Iterator[Row]:
    """A short task, a single trajectory, and a group of usual size with a goal."""
    for shape, goal in SHAPES:
        yield within(
            "CPU of a group in all processes, µs, memory",
            str(shape),
            partial(ours_us, shape),
            partial(proxy_us, shape),
            "zmq.proxy",
            goal,
        )


def ours_us(shape: Shape) -> float:
    """Run one round through a new broker."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        place = Path(directory)
        about = stage.config(durability="memory", high_bytes=HIGH_BYTES)
        clock = LASTS_S, WARM_UP_S, throughput.batch_groups(shape)
        calls = [
            (f"producer-{number}", place, shape.word, 1, throughput.SLOTS)
            for number in range(throughput.PRODUCERS)
        ]
        with (
            stage.broker(RunLayout(place), about) as broker,
            stage.player("broker.throughput", "consumer", place, shape.word, *clock) as consumer,
            stage.players("broker.throughput", calls) as producers,
        ):
            return _counted_us(consumer, producers, broker.pid)


def proxy_us(shape: Shape) -> float:
    """Run one round through a bare proxy, in its fastest mode."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        words = directory, shape.word, proxy.fastest(shape).word
        calls = [(role, *words) for role in ("proxy", *_producers())]
        lasts_s = WARM_UP_S / proxy.WARM_UP_PART  # its warm-up is that part of the counted time
        with (
            stage.player("broker.proxy", "consumer", *words, lasts_s) as consumer,
            stage.players("broker.proxy", calls) as others,
        ):
            return _counted_us(consumer, others)


def _producers() -> Iterator[str]:
    yield from (f"producer-{number}" for number in range(proxy.PRODUCERS))


def _counted_us(consumer: stage.Player, others: Sequence[stage.Player], *pids: int) -> float:
    """Let the players begin; return the CPU of a group while the consumer counts."""
    players = (consumer, *others)
    for player in players:
        player.wait_ready()
    for player in players:
        player.begin()
    time.sleep(WARM_UP_S)
    all_pids = (*pids, *(player.pid for player in players))
    before, began = _cpu_s(all_pids), time.monotonic()
    time.sleep(LASTS_S)
    cpu_s, took_s = _cpu_s(all_pids) - before, time.monotonic() - began
    return cpu_s / took_s / float(consumer.line()) * 1e6


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds that processes have used."""
    ticks = 0
    for pid in pids:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
