"""The table of the measured cells in `docs/performance.md`: a row for each environment, a column for each start.

`python -m benchmarks.scaling.table` writes it.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from benchmarks.harness.table import PERFORMANCE, put_in
from benchmarks.scaling import cells
from benchmarks.scaling.cells import Cell
from rolloutmq.services.orchestrator.simulation.scenarios import STARTS_S

BEGIN: Final = "<!-- table: scaling -->\n"
MISSING: Final = "not measured"


def table(found: Iterable[Cell]) -> str:
    """Return the cells as a Markdown table, under a line with their number."""
    by_key = {one.key: one for one in found}
    over = sum(bool(one.broken) for one in by_key.values())
    seeds = min((one.seeds for one in by_key.values()), default=cells.SEEDS)
    head = " | ".join(f"{start_s:g} s" for start_s in STARTS_S)
    return "".join(
        [
            f"Measured, with {seeds} seeds: {len(by_key)} of {len(cells.all_keys())} cells. ",
            f"Cells that exceed a bound: {over}.\n\n",
            f"| scenario | {head} |\n|---{'|---' * len(STARTS_S)}|\n",
            *_rows(by_key),
        ]
    )


def line(cell: Cell) -> str:
    """Return a cell as text: its exceeded bounds, or the one of which most is used."""
    told = ", ".join(f"{name} {cell.bounds[name]}" for name in cell.told)
    return (
        f"{'OVER' if cell.broken else 'kept'}  {cell.scenario} ({cell.env}), start {cell.start_s:g} s: {told}"
    )


def page() -> str:
    """Return the page with the table of what was measured in its place."""
    return put_in(PERFORMANCE.read_text(), table(cells.load().values()), BEGIN)


def write() -> None:
    """Write the page."""
    PERFORMANCE.write_text(page())


def _rows(by_key: dict[cells.Key, Cell]) -> Iterator[str]:
    for scenario, env in dict.fromkeys(key[1:] for key in cells.all_keys()):
        found = (by_key.get((start_s, scenario, env)) for start_s in STARTS_S)
        yield f"| {scenario}, {env} | {' | '.join(MISSING if one is None else _text(one) for one in found)} |\n"


def _text(cell: Cell) -> str:
    told = ", ".join(f"{name} {cell.bounds[name].part:.2f}" for name in cell.told)
    return f"**{told}**" if cell.broken else told


if __name__ == "__main__":
    write()
