"""`make bench`: every figure with its rival in the same run; results in `results.json`. Exit 1 if a goal is unmet.

python -m benchmarks                    all parts
python -m benchmarks journal restart    only these parts; the other rows are kept

A part without its rival installed is skipped, and its rows are kept: see `make bench-rivals`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.broker import (
    environments,
    fairness,
    journal,
    latency,
    mark,
    memory,
    one_way,
    producers,
    start,
    throughput,
    wire,
)
from benchmarks.end_to_end import panel
from benchmarks.harness import results
from benchmarks.harness.row import Row
from benchmarks.network import curve, fleet
from benchmarks.queues import atropos, gateway, minimal, skyrl, transferqueue
from benchmarks.rewards import sampling
from benchmarks.sdk import group_cpu, profiler, user_path
from benchmarks.training import distillation, lending, scoring, stream, trl, weights


@dataclass(frozen=True)
class Part:
    """Rows measured together.

    Attributes:
        rows: Measures the rows, one after another.
        missing: Returns why they cannot be measured; empty if they can.
    """

    rows: Callable[[], Iterator[Row]]
    missing: Callable[[], str] = str


PARTS: Final = {
    "wire": Part(wire.rows),
    "throughput": Part(throughput.rows),
    "group-cpu": Part(group_cpu.rows),
    "curve": Part(curve.rows),
    "fleet": Part(fleet.rows),
    "atropos": Part(atropos.rows, atropos.missing),
    "gateway": Part(gateway.rows, atropos.missing),
    "transferqueue": Part(transferqueue.rows, transferqueue.missing),
    "skyrl": Part(skyrl.rows, skyrl.missing),
    "latency": Part(latency.rows),
    "one-way": Part(one_way.rows),
    "minimal-bus": Part(minimal.rows),
    "lending": Part(lending.rows, lending.missing),
    "user-path": Part(user_path.rows),
    "profiler": Part(profiler.rows),
    "panel": Part(panel.rows),
    "memory": Part(memory.rows),
    "producers": Part(producers.rows),
    "environments": Part(environments.rows),
    "mark": Part(mark.rows),
    "trl": Part(trl.rows, trl.missing),
    "scoring": Part(scoring.rows),
    "distillation": Part(distillation.rows),
    "fairness": Part(fairness.rows),
    "journal": Part(journal.rows),
    "restart": Part(start.restart_rows),
    "ready": Part(start.ready_rows),
    "import": Part(start.import_rows),
    "weights": Part(weights.rows),
    "stream": Part(stream.rows),
    "samplers": Part(sampling.rows),
}


def main(words: Sequence[str]) -> int:
    """Measure the named parts, or all of them, and save their rows."""
    if unknown := set(words) - set(PARTS):
        print(f"unknown part: {', '.join(sorted(unknown))}; use {', '.join(PARTS)}", file=sys.stderr)
        return 2
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's programs start from bytecode
    parts = {name: part for name, part in PARTS.items() if not words or name in words}
    rows, skipped = measured(parts, lambda row: results.keep([row], whole=False))
    results.keep(rows, whole=not words and not skipped)
    return int(any(row.met is False for row in rows))


def measured(parts: dict[str, Part], keep: Callable[[Row], None]) -> tuple[list[Row], list[str]]:
    """Measure parts; return their rows, and the names of the skipped parts.

    Each row is kept as soon as it is measured: an error hours later must not cost it.
    """
    rows, skipped = [], []
    for name, part in parts.items():
        if why := part.missing():
            print(f"{name} skipped: {why}", flush=True)
            skipped.append(name)
            continue
        for row in part.rows():
            rows.append(row)
            keep(row)
            print(row.line(), flush=True)
    return rows, skipped


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
