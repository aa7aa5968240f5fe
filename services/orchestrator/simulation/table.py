"""The table of verdicts, 120 columns wide: a block for each environment of a scenario, a row for each controller.

Each cell has the median and the worst of the seeds, and the ratio of the median to that of the reference fleet.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from rolloutmq.services.orchestrator.simulation.verdict import Bound, Figure, Verdict

HEAD: Final = ("", "starved s", "waste %", "moves", "flips", "settle s", "peak")
WIDTHS: Final = (10, 17, 15, 17, 14, 27, 14)
SHOWN: Final = 2
"""Settling times shown: of all changes, those that took longest."""
MOST: Final = 99.5
"""Ratio above which only its size is shown."""


def table(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield the lines, each block as soon as its verdicts are there."""
    blocks = groupby(verdicts, key=lambda one: (one.scenario, one.start_s, one.env))
    for number, (_, block) in enumerate(blocks):
        for place, one in enumerate(block):
            if not place:
                yield ("\n" if number else "") + _title(one)
                yield _row(HEAD)
            yield _row(_cells(one))
            if one.engines is not None:
                yield f"{'':{WIDTHS[0]}} makes {_rate(one.throughput_per_s)}, engines {_cell(one.engines)}\n"
            for bound in one.bounds:
                if not bound.is_kept:
                    yield f"{'':{WIDTHS[0]}} breaks: {_broken(bound)}\n"


def _title(one: Verdict) -> str:
    seeds = f"{one.seeds} seed{'s' if one.seeds > 1 else ''}"
    needed = f"needs {one.peak_need:.1f} workers at most, and {one.least_moves} moves at least"
    return f"{one.scenario}, environment {one.env}, start {one.start_s:g} s, {seeds}: {needed}\n"


def _cells(one: Verdict) -> Sequence[str]:
    slowest = sorted(range(len(one.settle_s)), key=lambda change: -one.settle_s[change].median)[:SHOWN]
    return (
        one.law,
        _cell(one.starved_s),
        _cell(one.waste, 100.0),
        _cell(one.moves),
        _cell(one.flips),
        " ".join(_cell(one.settle_s[change]) for change in sorted(slowest)),
        _cell(one.peak),
    )


def _cell(figure: Figure, factor: float = 1.0) -> str:
    found = f"{factor * figure.median:.0f}/{factor * figure.worst:.0f}"
    return found if figure.ratio is None else f"{found} {_ratio(figure.ratio)}"


def _rate(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f" {_ratio(figure.ratio)}"
    return f"{figure.median:.1f}/{figure.worst:.1f} sequences/s{ratio}"


def _broken(one: Bound) -> str:
    """Return a bound as `flips 7/9, at most 6/9`: median and worst, and their limits."""
    factor, unit = (100.0, " %") if one.unit == "x" else (1.0, f" {one.unit}".rstrip())
    found, limit = ((factor * one.median, factor * one.worst), (factor * one.limit, factor * one.worst_limit))
    limits = "/".join(f"{value:.4g}" for value in limit if value or not one.is_least)
    figures = "/".join(f"{value:.4g}" for value in found)
    return f"{one.name} {figures}{unit}, at {'least' if one.is_least else 'most'} {limits}{unit}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < MOST else ">99x"


def _row(cells: Sequence[str]) -> str:
    parts = (f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return " ".join(parts).rstrip() + "\n"
