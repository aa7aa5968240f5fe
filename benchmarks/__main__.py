"""`make bench`: every figure with its rival in the same run; written to `results.json`. Exit 1 if a goal is unmet."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import throughput, wire

PARTS = {"wire": wire.rows, "throughput": throughput.rows}
RESULTS = Path(__file__).parent / "results.json"


def main(words: Sequence[str]) -> int:
    """Measure the parts that were named, or all of them; only all of them are written down."""
    rows = []
    for name, part in PARTS.items():
        if not words or name in words:
            for row in part():
                rows.append(row)
                print(row.line(), flush=True)
    if not words:
        machine = {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        RESULTS.write_text(
            json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
