"""Groups per second through SkyRL's generator, and the CPU of a group in the trainer's process.

The payload is that of the rows of TransferQueue: groups of eight samples of 2,048 tokens, 26.6 kB each, in steps of 64
groups, in memory. A worker in a process of its own answers tasks with prepared groups. Ours is `BusGenerator.generate`
in SkyRL's environment, with 128 calls at once, up to the rows that SkyRL trains on: lists of Python numbers, and
SkyRL's metrics of them. Our own `GroupConsumer` on the same tasks returns the groups as arrays: the difference is what
the rows cost. Where TransferQueue is installed (`make bench-rivals`), its put and get of the same samples by one
process, without tasks, is beside it.

On two cores broker, worker and trainer compete, so groups per second say less than the CPU of a group.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from benchmarks.harness import stage
from benchmarks.harness.row import Row, compare, near
from benchmarks.queues import transferqueue
from benchmarks.queues.transferqueue import GROUP, HIGH_BYTES, LASTS_S
from rolloutmq.schemas.files import RunLayout

Side = Literal["generator", "consumer"]

ROOT: Final = Path(__file__).parents[2]
RIVAL: Final = ROOT / ".venv-skyrl"
PAYLOAD: Final = "groups of 8 x 2,048 tokens, 213 kB"
STARTS_S: Final = 120.0
"""Start-up limit: SkyRL imports much of torch and Ray."""


class Figures(NamedTuple):
    """Figures of one round."""

    groups_per_s: float
    cpu_ms: float


def missing() -> str:
    """Return why SkyRL's generator cannot be measured; empty if it can."""
    return stage.missing(RIVAL)


def rows() -> Iterator[Row]:
    """The generator beside the consumer, and beside TransferQueue where it is installed."""
    rounds = {side: _Rounds(side) for side in ("generator", "consumer")}
    yield compare(
        "groups/s from tasks to SkyRL's rows, memory",
        PAYLOAD,
        rounds["generator"].rate,
        rounds["consumer"].rate,
        "our GroupConsumer: arrays, no rows",
    )
    yield near(
        "CPU of a group in the trainer, ms, SkyRL's rows, memory",
        PAYLOAD,
        rounds["generator"].cpu_ms,
        rounds["consumer"].cpu_ms,
        "our GroupConsumer: arrays, no rows",
    )
    if transferqueue.missing():
        return
    with transferqueue.their_side() as rival:
        yield compare(
            "groups/s from tasks to SkyRL's rows, memory",
            PAYLOAD,
            lambda: figures("generator").groups_per_s,
            lambda: transferqueue.their_rate(rival, "batch") / GROUP,
            "TransferQueue, SimpleStorage: tensors, no tasks, no rows",
        )


class _Rounds:
    """Rounds of one side: run for the rate, and reused for the CPU."""

    def __init__(self, side: Side) -> None:
        self._measure = partial(figures, side)
        self._cpu: list[float] = []

    def rate(self) -> float:
        found = self._measure()
        self._cpu.append(found.cpu_ms)
        return found.groups_per_s

    def cpu_ms(self) -> float:
        return self._cpu.pop(0)


def figures(side: Side, lasts_s: float = LASTS_S) -> Figures:
    """Run one round through a new broker."""
    theirs = side == "generator"
    # Not the file's own folder: from there this module's name would shadow SkyRL's.
    paths = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    env = os.environ | paths | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LOG_LEVEL": "WARNING"}
    python = RIVAL / "bin" / "python" if theirs else Path(sys.executable)
    player = partial(stage.player, "queues.skyrl_player", python=python, env=env)
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        about = stage.config(durability="memory", high_bytes=HIGH_BYTES)
        with (
            stage.broker(RunLayout(Path(directory)), about),
            stage.player("queues.skyrl_player", "worker", directory, lasts_s) as worker,
            player(side, directory, lasts_s) as trainer,
        ):
            worker.wait_ready()
            worker.begin()
            trainer.wait_ready(STARTS_S)
            trainer.begin()
            said = trainer.line()
            while not said.startswith("figures "):
                said = trainer.line()  # a library may print
    return Figures(*map(float, said.split()[1:]))
