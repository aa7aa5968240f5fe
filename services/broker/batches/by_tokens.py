"""Composition of a batch under a token budget: whole groups, the oldest first, by weight and minimum share.

Each lane has a wish in tokens, as in `exact`: its share by weight, at least its minimum, corrected by the carry of
earlier batches. The oldest groups meet it. Then the lanes fill the rest of the budget, the one furthest below its
wish first. A group that does not fit is skipped, at most `LOOK_AHEAD` times a lane, so the cost of a batch does not
depend on the length of the queue.

No lane starves. A lane gives its oldest group first, or nothing. A lane that gave nothing is owed more and more; the
lane owed most comes first and has the whole budget before it. A group above the budget is delivered alone when its
lane comes first.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final

import msgspec

from rolloutmq.services.broker.batches.exact import quotas
from rolloutmq.services.broker.journal.stored_group import StoredGroup

LOOK_AHEAD: Final = 32
"""Groups of one lane a batch may skip. With tenfold differences in length, a batch is full to a few percent."""


class LaneOffer(msgspec.Struct):
    """The groups one lane offers to a batch, in tokens; see `exact.LaneSupply`.

    Attributes:
        heads: The queued groups, oldest first.
        available: Tokens of all of them.
    """

    heads: Iterator[StoredGroup]
    available: int
    weight: float = 1.0
    floor: int = 0
    carry: float = 0.0


class _LanePicker:
    """Takes groups from one offer."""

    def __init__(self, offer: LaneOffer, wish: float, largest: int) -> None:
        self.offer = offer
        self.wish = wish
        self.total = 0
        self.taken: list[StoredGroup] = []
        self._largest = largest
        self._passed = 0
        self.next: StoredGroup | None = None
        self._advance()

    def rank(self) -> tuple[float, int]:
        """Return the order of turns: the lane owed most first, then the one with the oldest group."""
        return -self.offer.carry, self.next.order if self.next is not None else 0

    def fulfil(self, room: int) -> None:
        """Take groups up to the wish, and the oldest group even if it is above the wish."""
        if self.wish > 0 and self.next is not None:
            self.one(room)
        while self.next is not None and self.total + tokens(self.next) <= min(room, int(self.wish + 1e-6)):
            self._take()

    def one(self, room: int) -> int:
        """Take the next group that fits into `room`, which never grows; return its tokens, 0 if none does."""
        while self.next is not None:
            size = tokens(self.next)
            if size <= room:
                self._take()
                return size
            if not self.taken:
                break
            self._passed += 1
            self._advance()
        return 0

    def _take(self) -> None:
        assert self.next is not None
        self.taken.append(self.next)
        self.total += tokens(self.next)
        self._advance()

    def _advance(self) -> None:
        self.next = next(self.offer.heads, None)
        while self.next is not None and tokens(self.next) > self._largest and self._passed <= LOOK_AHEAD:
            self._passed += 1
            self.next = next(self.offer.heads, None)
        if self._passed > LOOK_AHEAD:
            self.next = None


def tokens(group: StoredGroup) -> int:
    """Return the tokens of a group, at least 1: empty groups would leave a batch without a bound."""
    return max(1, group.header.tokens)


def compose(offers: Sequence[LaneOffer], budget: int, largest: int = 1 << 62) -> list[StoredGroup]:
    """Choose groups with at most `budget` tokens together, or one group above it.

    Args:
        offers: The lanes. Together they have at least one group.
        budget: Tokens.
        largest: Skip groups above this many tokens, so a batch has many groups.
    """
    wishes = quotas(offers, budget) if len(offers) > 1 else [float(budget)]
    pickers = [_LanePicker(offer, wish, largest) for offer, wish in zip(offers, wishes, strict=True)]
    turns = sorted((picker for picker in pickers if picker.next is not None), key=_LanePicker.rank)
    if not turns:
        return []
    first = turns[0]
    if first.next is not None and tokens(first.next) > budget:
        return [first.next]
    left = budget
    for picker in [first, *sorted(turns[1:], key=lambda picker: not picker.offer.floor)]:
        picker.fulfil(left)
        left -= picker.total
    below = [(picker.total - picker.wish, place) for place, picker in enumerate(turns)]
    heapify(below)
    while left and below:
        _, place = below[0]
        got = turns[place].one(left)
        left -= got
        if got:
            heapreplace(below, (turns[place].total - turns[place].wish, place))
        else:
            heappop(below)
    return [group for picker in pickers for group in picker.taken]
