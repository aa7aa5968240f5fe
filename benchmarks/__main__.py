"""`make bench`: every figure with its rival in the same run; results in `results.json`. Exit 1 if a goal is unmet.

python -m benchmarks                    all parts
python -m benchmarks journal restart    only these parts; the other rows are kept

A part without its rival installed is skipped, and its rows are kept: see `make bench-rivals`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.broker import fairness, journal, latency, memory, producers, start, throughput, wire
from benchmarks.harness import results
from benchmarks.harness.row import Row
from benchmarks.queues import atropos, gateway, transferqueue
from benchmarks.training import distillation, lending, scoring, trl, weights


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
    """Measure the named parts, or all of them, and save their rows."""
    if unknown := set(words) - set(PARTS):
        print(f"unknown part: {', '.join(sorted(unknown))}; use {', '.join(PARTS)}", file=sys.stderr)
        return 2
    rows, skipped = measured({name: part for name, part in PARTS.items() if not words or name in words})
    results.keep(rows, whole=not words and not skipped)
    return int(any(row.met is False for row in rows))


def measured(parts: dict[str, Part]) -> tuple[list[Row], list[str]]:
    """Measure parts; return their rows, and the names of the skipped parts."""
    rows, skipped = [], []
    for name, part in parts.items():
        if why := part.missing():
            print(f"{name} skipped: {why}", flush=True)
            skipped.append(name)
            continue
        for row in part.rows():
            rows.append(row)
            print(row.line(), flush=True)
    return rows, skipped


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
