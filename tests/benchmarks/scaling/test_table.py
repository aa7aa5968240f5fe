from benchmarks.harness.table import PERFORMANCE
from benchmarks.scaling import cells
from benchmarks.scaling.cells import Cell, CellBound
from benchmarks.scaling.table import line, page, table

KEPT = Cell(2.0, "step", "tool", 20, "law", (), {"flips": CellBound(3.0, 6.0, 6.0, 9.0, "most")})
OVER = Cell(20.0, "step", "tool", 20, "law", ("flips",), {"flips": CellBound(9.0, 9.0, 6.0, 9.0, "most")})


def test_a_row_has_the_nearest_bound_at_each_start_and_what_is_exceeded() -> None:
    said, _, head, _, *rows = table([KEPT, OVER]).splitlines()
    assert (
        said == f"Measured, with 20 seeds: 2 of {len(cells.all_keys())} cells. Cells that exceed a bound: 1."
    )
    assert head == "| scenario | 2 s | 20 s | 60 s | 120 s |"
    assert "| step, tool | flips 0.67 | **flips 1.50** | not measured | not measured |" in rows
    assert len(rows) == len({key[1:] for key in cells.all_keys()})


def test_a_cell_as_text_has_its_figures_and_limits() -> None:
    assert line(KEPT) == "kept  step (tool), start 2 s: flips 3/6, at most 6/9"
    assert line(OVER) == "OVER  step (tool), start 20 s: flips 9/9, at most 6/9"


def test_the_page_tells_what_was_measured() -> None:
    assert PERFORMANCE.read_text() == page(), "run `python -m benchmarks.scaling.table`"
