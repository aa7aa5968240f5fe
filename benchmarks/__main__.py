"""`make bench`: every figure with its rival in the same run; written to `results.json`. Exit 1 if a goal is unmet.

python -m benchmarks                    all of it
python -m benchmarks journal restart    only these parts; the other rows stay as they were
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks import journal, results, start, throughput, wire
from benchmarks.row import Row

PARTS: Final[dict[str, Callable[[], Iterator[Row]]]] = {
    "wire": wire.rows,
    "throughput": throughput.rows,
    "journal": journal.rows,
    "restart": start.restart_rows,
    "ready": start.ready_rows,
}


def main(words: Sequence[str]) -> int:
    """Measure the parts that were named, or all of them, and write their rows down."""
    if unknown := set(words) - set(PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    rows = []
    for name, part in PARTS.items():
        if not words or name in words:
            for row in part():
                rows.append(row)
                print(row.line(), flush=True)
    results.keep(rows, whole=not words)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
