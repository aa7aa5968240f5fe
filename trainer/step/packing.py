"""Packing: plans forward passes of bounded size, and rows that several sequences share. Pure.

Only lengths matter. No sequence is split between passes or rows, so losses over whole sequences hold for any plan. A
row is exactly as wide as the longest sequence of its pass: attention runs over whole rows, and wider ones would waste
it.

Sequences are taken by descending length, so that rows with one sequence each have little padding, unless they are few
and differ much. Rows are shared only if that saves at least `WORTH` of all tokens read: attention over a shared row
needs a mask, which is slower than none.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WORTH: Final = 0.1
"""Fraction of all tokens read, padding included, that sharing rows must save."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass.

    Attributes:
        rows: Numbers of the sequences of each row, in order.
        width: Tokens per row.
    """

    rows: tuple[tuple[int, ...], ...]
    width: int

    @property
    def area(self) -> int:
        """Tokens read, padding included."""
        return len(self.rows) * self.width

    @property
    def shared(self) -> bool:
        """Whether any row has several sequences."""
        return any(len(row) > 1 for row in self.rows)


def plan(lengths: NDArray[np.integer], tokens: int, *, share: bool = True) -> list[Pass]:
    """Split sequences into forward passes.

    Args:
        lengths: Length of each sequence; those of length 0 are left out.
        tokens: Most tokens of a pass, padding included. A longer sequence gets its own pass.
        share: Whether sequences may share a row.
    """
    present = np.flatnonzero(lengths)
    alone = _alone(lengths, present, tokens)
    if not share or present.size < 2:
        return alone
    together = _together(lengths, present, tokens)
    return together if _area(together) <= (1 - WORTH) * _area(alone) else alone


def _area(passes: Sequence[Pass]) -> int:
    return sum(one.area for one in passes)


def _falling(lengths: NDArray[np.integer], present: NDArray[np.integer]) -> list[int]:
    order: list[int] = present[np.argsort(-lengths[present].astype(np.int64), kind="stable")].tolist()
    return order


def _alone(lengths: NDArray[np.integer], present: NDArray[np.integer], tokens: int) -> list[Pass]:
    """Put one sequence into each row. A single pass keeps the given order."""
    widest = int(lengths[present].max(initial=0))
    if widest * present.size <= tokens:
        return [Pass(tuple((n,) for n in present.tolist()), widest)] if present.size else []
    passes, order, start = [], _falling(lengths, present), 0
    while start < len(order):
        width = int(lengths[order[start]])
        end = start + max(1, tokens // width)
        passes.append(Pass(tuple((n,) for n in order[start:end]), width))
        start = end
    return passes


def _together(lengths: NDArray[np.integer], present: NDArray[np.integer], tokens: int) -> list[Pass]:
    """Put each sequence into the fullest row with room for it, or into a new row."""
    passes, waiting = [], _falling(lengths, present)
    while waiting:
        width = int(lengths[waiting[0]])
        limit = max(1, tokens // width)
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []  # of each row that has any, and the row's number; rising
        left: list[int] = []
        for number in waiting:
            length = int(lengths[number])
            place = bisect_left(room, (length, -1))
            if place < len(room):
                free, row = room.pop(place)
                rows[row].append(number)
                insort(room, (free - length, row))
            elif len(rows) < limit:
                insort(room, (width - length, len(rows)))
                rows.append([number])
            else:
                left.append(number)
        passes.append(Pass(tuple(map(tuple, rows)), width))
        waiting = left
    return passes
