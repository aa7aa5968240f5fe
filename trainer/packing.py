"""Which sequences are read together: forward passes of a bounded number of tokens, and rows that sequences share. Pure.

Only lengths are looked at. No sequence is cut, neither between passes nor between rows, so that what a loss says of
whole sequences holds in any plan. A row is as wide as the longest sequence of its pass and no wider: attention is
computed over whole rows, and in wider ones most of it would be thrown away.

Sequences are taken by falling length. Alone in their rows they leave little padding then, unless they are few and
different; where sharing rows would save less than `WORTH` of what is read, each keeps its own, because attention over
a shared row needs a mask, which is slower than none.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WORTH: Final = 0.1
"""Part of all that is read, padding included, that sharing rows must save."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass.

    Attributes:
        rows: Numbers of the sequences of each row, in their order.
        width: Tokens of a row.
    """

    rows: tuple[tuple[int, ...], ...]
    width: int

    @property
    def area(self) -> int:
        """Tokens that are read, padding included."""
        return len(self.rows) * self.width

    @property
    def shared(self) -> bool:
        """Whether some row has several sequences."""
        return any(len(row) > 1 for row in self.rows)


def plan(lengths: NDArray[np.integer], tokens: int, *, share: bool = True) -> list[Pass]:
    """Cut sequences into forward passes.

    Args:
        lengths: Of each sequence; those of length 0 are in no pass.
        tokens: Most tokens of a pass, padding included. A sequence that is longer comes alone.
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
    """One sequence a row. What is one pass anyway keeps its order."""
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
    """Each sequence goes to the fullest row that has room for it; where there is none it begins another."""
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
