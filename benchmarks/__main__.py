"""`make bench`: every figure with its rival in the same run; written to `results.json`. Exit 1 if a goal is unmet.

python -m benchmarks                    all of it
python -m benchmarks journal restart    only these parts; the other rows stay as they were

A part whose rival is not installed is left out, and its rows stay as they were too: see `make bench-rivals`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import (
    atropos,
    distillation,
    fairness,
    gateway,
    journal,
    latency,
    lending,
    memory,
    producers,
    results,
    scoring,
    start,
    throughput,
    transferqueue,
    trl,
    weights,
    wire,
)
from benchmarks.row import Row


@dataclass(frozen=True)
class Part:
    """Rows that are measured together.

    Attributes:
        rows: Measures them, one after the other.
        missing: Says why they cannot be measured, empty if they can.
    """

    rows: Callable[[], Iterator[Row]]
    missing: Callable[[], str] = str


PARTS: Final = {
    "wire": Part(wire.rows),
    "throughput": Part(throughput.rows),
    "atropos": Part(atropos.rows, atropos.missing),
    "gateway": Part(gateway.rows, atropos.missing),
    "transferqueue": Part(transferqueue.rows, transferqueue.missing),
    "latency": Part(latency.rows),
    "lending": Part(lending.rows, lending.missing),
    "memory": Part(memory.rows),
    "producers": Part(producers.rows),
    "trl": Part(trl.rows, trl.missing),
    "scoring": Part(scoring.rows),
    "distillation": Part(distillation.rows),
    "fairness": Part(fairness.rows),
    "journal": Part(journal.rows),
    "restart": Part(start.restart_rows),
    "ready": Part(start.ready_rows),
    "weights": Part(weights.rows),
}


def main(words: Sequence[str]) -> int:
    """Measure the parts that were named, or all of them, and write their rows down."""
    if unknown := set(words) - set(PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    rows, skipped = measured({name: part for name, part in PARTS.items() if not words or name in words})
    results.keep(rows, whole=not words and not skipped)
    return int(any(row.met is False for row in rows))


def measured(parts: dict[str, Part]) -> tuple[list[Row], list[str]]:
    """Measure parts and return their rows, and the names of those that could not be."""
    rows, skipped = [], []
    for name, part in parts.items():
        if why := part.missing():
            print(f"{name} is left out: {why}", flush=True)
            skipped.append(name)
            continue
        for row in part.rows():
            rows.append(row)
            print(row.line(), flush=True)
    return rows, skipped


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
