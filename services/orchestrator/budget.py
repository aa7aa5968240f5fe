"""How a budget of processes is shared by several environments. Pure.

Each has at least its fewest. What is left goes to who wants more, in proportion to the weights, and nobody gets more
than it wants while another wants more. What nobody wants is room to grow, shared likewise: so all the rooms together
are never more than the budget, whatever each of them does with its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one environment may have and wants."""

    least: int
    most: int
    weight: float
    want: int


def allot(claims: Sequence[Claim], budget: int) -> list[int]:
    """Return the most workers of each; together they are at most `budget`, unless the fewest are more already."""
    rooms = [claim.least for claim in claims]
    _pour(rooms, claims, [min(max(claim.want, claim.least), claim.most) for claim in claims], budget)
    _pour(rooms, claims, [claim.most for claim in claims], budget)
    return rooms


def _pour(rooms: list[int], claims: Sequence[Claim], caps: Sequence[int], budget: int) -> None:
    """Give out what is left of the budget, one at a time to who has least for its weight."""
    order = [index for index in range(len(claims)) if rooms[index] < caps[index]]
    for _ in range(budget - sum(rooms)):
        order = [index for index in order if rooms[index] < caps[index]]
        if not order:
            return
        rooms[min(order, key=lambda index: _fill(rooms[index], claims[index].weight))] += 1


def _fill(room: int, weight: float) -> float:
    return (room + 1) / weight if weight > 0.0 else float("inf")
