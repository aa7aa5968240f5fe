"""Curves of a plant as given: a number, a list of points, or a CSV file beside the plant.

    demand = 40
    demand = [[0, 40], [600, 80]]                               # each value holds until the next point
    demand = {points = [[0, 40], [600, 80]], lines = true}      # straight lines between the points
    demand = {csv = "demand.csv", lines = true}                 # seconds, value; a header is skipped

The seconds of a CSV file count from its first row.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from rolloutmq.bus.files import open_regular
from rolloutmq.services.orchestrator.simulation.series import Series

LONGEST_S: Final = 43_200.0
"""Longest simulation, in seconds; a curve may go on for longer."""
FARTHEST_S: Final = 1e9
MOST_POINTS: Final = 100_000
MOST_BYTES: Final = 10_000_000
_KEYS: Final = ("points", "csv", "lines")


def curve(given: object, folder: Path, low: float, high: float) -> Series:
    """Return a curve as a series.

    Args:
        given: The value of its key.
        folder: Folder that paths of CSV files start from.
        low, high: Bounds of the values.

    Raises:
        ValueError: The curve is invalid; the text says what is wrong.
    """
    if not isinstance(given, Mapping):
        return _series(given, low, high, is_linear=False)
    if unknown := [key for key in given if key not in _KEYS]:
        raise ValueError(f"unknown key {unknown[0]}; allowed: {', '.join(_KEYS)}")
    lines, sources = given.get("lines", False), [key for key in ("points", "csv") if key in given]
    if not isinstance(lines, bool):
        raise ValueError(f"lines must be true or false (got {lines!r})")
    if len(sources) != 1:
        raise ValueError(f"needs either points or csv (got {', '.join(sources) or 'neither'})")
    if "csv" not in given:
        return _series(given["points"], low, high, is_linear=lines)
    if not isinstance(given["csv"], str):
        raise ValueError(f"csv must be a path (got {given['csv']!r})")
    return csv_curve(folder / given["csv"], low, high, is_linear=lines)


def csv_curve(path: Path, low: float, high: float, *, is_linear: bool = False) -> Series:
    """Return a series from a CSV file with seconds and values.

    Raises:
        ValueError: The file is unreadable or invalid.
    """
    try:
        with open_regular(path) as file:
            text = file.read(MOST_BYTES + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read: {reason}") from None
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path}: is larger than {MOST_BYTES} bytes; thin it out")
    try:
        rows = list(_rows(text))
        if not rows:
            raise ValueError("has no rows; give at least one of seconds and a value")
        origin = rows[0][0]
        return _series([(at - origin, value) for at, value in rows], low, high, is_linear=is_linear)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from None


def _rows(text: str) -> Iterable[tuple[float, float]]:
    for number, row in enumerate(csv.reader(text.splitlines()), 1):
        if not row or (number == 1 and not any(character.isdigit() for character in row[0])):
            continue
        try:
            at, value = (float(cell) for cell in row[:2])
        except ValueError:
            raise ValueError(
                f"line {number} must be seconds and a value (got {','.join(row)[:40]!r})"
            ) from None
        yield at, value


def _series(given: object, low: float, high: float, *, is_linear: bool) -> Series:
    if _is_number(given):
        return Series((0.0,), (_within(given, low, high),))
    if not isinstance(given, list) or not given:
        raise ValueError(
            f"must be a number, points [seconds, value], or a table with csv (got {_short(given)})"
        )
    if len(given) > MOST_POINTS:
        raise ValueError(f"at most {MOST_POINTS} points (got {len(given)}); thin them out")
    times, values = [], []
    for place, point in enumerate(given, 1):
        if not isinstance(point, list | tuple) or len(point) != 2 or not all(map(_is_number, point)):
            raise ValueError(f"point {place} must be [seconds, value] (got {_short(point)})")
        try:
            times.append(_within(point[0], 0.0, FARTHEST_S))
            values.append(_within(point[1], low, high))
        except ValueError as error:
            raise ValueError(f"point {place} {error}") from None
    for place, (before, after) in enumerate(pairwise(times), 2):
        if after <= before:
            raise ValueError(f"point {place}: seconds must increase (got {after:g} after {before:g})")
    return Series(tuple(times), tuple(values), is_linear)


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _within(given: object, low: float, high: float) -> float:
    assert isinstance(given, int | float)
    if not low <= given <= high or math.isnan(given):
        raise ValueError(f"must be {low:g} to {high:g} (got {_short(given)})")
    return float(given)


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 40 else f"{text[:40]}..."
