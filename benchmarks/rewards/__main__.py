"""`make bench-rewards`: evidence that rewards and curriculum act, saved in `results.json`. Exit 1 if a goal is unmet.

python -m benchmarks.rewards               all parts, at most 90 minutes
python -m benchmarks.rewards curriculum    only these parts; the other rows are kept
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.harness import results
from benchmarks.harness.row import Row
from benchmarks.rewards import curriculum, normalization, raters

PARTS: Final[dict[str, Callable[[], Iterator[Row]]]] = {
    "curriculum": curriculum.rows,
    "normalization": normalization.rows,
    "raters": raters.rows,
}


def main(words: Sequence[str]) -> int:
    """Measure the named parts, or all of them, and save their rows."""
    if unknown := set(words) - set(PARTS):
        print(f"unknown part: {', '.join(sorted(unknown))}; use {', '.join(PARTS)}", file=sys.stderr)
        return 2
    unmet = False
    for name, part in PARTS.items():
        if words and name not in words:
            continue
        rows = list(part())
        results.keep(rows, whole=False)  # after each part: the next may be interrupted
        for row in rows:
            print(row.line(), flush=True)
            unmet |= row.met is False
    return int(unmet)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
