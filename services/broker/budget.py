"""Composing a batch under a budget of tokens: whole groups, the oldest first, by weight and minimum share.

Each lane has a wish in tokens, as in `batching`: its share by weight, at least its minimum, corrected by what earlier
batches owed it. It is met with the oldest groups; then the lanes fill what is left, the hungriest first. A group that
does not fit any more is passed over, at most `LOOK_AHEAD` times a lane: a batch costs as much as it holds, however
long the queue is.

Nobody starves. A lane gives its oldest group first, or nothing at all; a lane that gave nothing is owed more and more,
and whoever is owed most comes first, with the whole budget before it. A group that is above the budget by itself goes
out alone when its lane comes first.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from rolloutmq.services.broker.batching import quotas
from rolloutmq.services.broker.groups import StoredGroup

LOOK_AHEAD: Final = 32
"""Groups of one lane that a batch may pass over. With lengths that differ by ten times, it is full to a few percent."""


class Offer(msgspec.Struct):
    """What one lane offers to a batch, in tokens; see `batching.Supply`.

    Attributes:
        heads: The queued groups, oldest first.
        available: Tokens of all of them.
    """

    heads: Iterator[StoredGroup]
    available: int
    weight: float = 1.0
    floor: int = 0
    carry: float = 0.0


class _Hand:
    """Takes from one offer."""

    def __init__(self, offer: Offer, wish: float, largest: int) -> None:
        self.offer = offer
        self.wish = wish
        self.total = 0
        self.taken: list[StoredGroup] = []
        self._largest = largest
        self._passed = 0
        self.next: StoredGroup | None = None
        self._advance()

    def rank(self) -> tuple[float, int]:
        """Say whose turn it is: who is owed most, then whose oldest group came first."""
        return -self.offer.carry, self.next.order if self.next is not None else 0

    def fulfil(self, room: int) -> None:
        """Take up to the wish, and the oldest group even if it is above that."""
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
    """Return what a group takes of a budget; an empty one takes something, too, or a batch had no bound."""
    return max(1, group.header.tokens)


def compose(offers: Sequence[Offer], budget: int, largest: int = 1 << 62) -> list[StoredGroup]:
    """Choose groups with at most `budget` tokens together, or one that is above it.

    Args:
        offers: The lanes. Together they have something to give.
        budget: Tokens.
        largest: Groups above it are passed over, for the sake of a batch of many groups.
    """
    wishes = quotas(offers, budget) if len(offers) > 1 else [float(budget)]
    hands = [_Hand(offer, wish, largest) for offer, wish in zip(offers, wishes, strict=True)]
    turns = sorted((hand for hand in hands if hand.next is not None), key=_Hand.rank)
    if not turns:
        return []
    first = turns[0]
    if first.next is not None and tokens(first.next) > budget:
        return [first.next]
    left = budget
    for hand in [first, *sorted(turns[1:], key=lambda hand: not hand.offer.floor)]:
        hand.fulfil(left)
        left -= hand.total
    while left and turns:
        hungry = min(turns, key=lambda hand: hand.total - hand.wish)
        got = hungry.one(left)
        left -= got
        if not got:
            turns.remove(hungry)
    return [group for hand in hands for group in hand.taken]
