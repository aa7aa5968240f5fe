"""`make bench-scaling`: the control law on all scenarios and starts, over many seeds. Exit 1 if a bound is exceeded.

python -m benchmarks.scaling                       everything that this law was not measured on
python -m benchmarks.scaling --start 20 step few   only these scenarios, with workers that start in 20 s

Each scenario is saved in `results.json` once it is measured, so an interrupted run continues where it was. The run uses
all processors, and ends with the table in `docs/performance.md`.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from benchmarks.scaling import cells, table
from benchmarks.scaling.cells import Cell
from rolloutmq.services.orchestrator.simulation.comparison import compared, processors
from rolloutmq.services.orchestrator.simulation.scenarios import STARTS_S, all_scenarios

LAW: Final = "rolloutmq"


def main(words: Sequence[str]) -> int:
    """Measure the scenarios that are missing, and tell all of them."""
    asked = _asked(words)
    chosen = [
        one
        for start_s in asked.start or STARTS_S
        for one in all_scenarios(start_s)
        if not asked.scenario or one.name in asked.scenario
    ]
    found = cells.load(asked.out)
    missing = [
        one
        for one in chosen
        if not all(cells.is_measured(found, key, asked.seeds) for key in cells.keys(one))
    ]
    print(f"{len(chosen) - len(missing)} of {len(chosen)} scenarios are measured", flush=True)
    verdicts = compared(missing, asked.seeds, [LAW], asked.processes)
    for _, of_one in groupby(verdicts, key=lambda one: (one.start_s, one.scenario)):
        for cell in map(Cell.of, of_one):
            found[cell.key] = cell
            print(table.line(cell), flush=True)
        cells.save(found.values(), asked.out)
    if asked.out == cells.RESULTS:
        table.write()
    told = [found[key] for one in chosen for key in cells.keys(one)]
    over = [cell for cell in told if cell.broken]
    print(
        "\n".join(
            [f"{len(told) - len(over)} cells keep their bounds, {len(over)} do not", *map(table.line, over)]
        )
    )
    return int(bool(over))


def _asked(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("scenario", nargs="*", help="names of scenarios; all by default")
    parser.add_argument("--start", type=float, action="append", choices=STARTS_S, help="start of a worker, s")
    parser.add_argument("--seeds", type=int, default=cells.SEEDS)
    parser.add_argument("--processes", type=int, default=processors())
    parser.add_argument("--out", type=Path, default=cells.RESULTS, help="file of the results")
    asked = parser.parse_args(words)
    known = [one.name for one in all_scenarios(STARTS_S[0])]
    if unknown := set(asked.scenario) - set(known):
        parser.error(f"unknown scenario (got {min(unknown)!r}); use one of {', '.join(map(repr, known))}")
    return asked


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
