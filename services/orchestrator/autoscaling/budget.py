"""The process budget, shared by the environments of a run. Pure.

Each environment gets its minimum. The rest goes to the environments that want more, in proportion to their weights,
and none gets more than it wants while another wants more. What is left is room to grow, shared likewise. So all limits
together never exceed the budget, however each environment uses its own.
"""

from collections.abc import Sequence

import msgspec


class WorkerClaim(msgspec.Struct, frozen=True):
    """Bounds, demand and weight of one environment."""

    least: int
    most: int
    weight: float
    want: int


def allot(claims: Sequence[WorkerClaim], budget: int) -> list[int]:
    """Return the limit of each environment; the sum is at most `budget`, unless the minimums exceed it."""
    rooms = [claim.least for claim in claims]
    _pour(rooms, claims, [min(max(claim.want, claim.least), claim.most) for claim in claims], budget)
    _pour(rooms, claims, [claim.most for claim in claims], budget)
    return rooms


def _pour(rooms: list[int], claims: Sequence[WorkerClaim], caps: Sequence[int], budget: int) -> None:
    """Hand out the rest of the budget, one worker at a time, to the environment with the lowest count per weight."""
    order = [index for index in range(len(claims)) if rooms[index] < caps[index]]
    for _ in range(budget - sum(rooms)):
        order = [index for index in order if rooms[index] < caps[index]]
        if not order:
            return
        rooms[min(order, key=lambda index: _fill(rooms[index], claims[index].weight))] += 1


def _fill(room: int, weight: float) -> float:
    return (room + 0.5) / weight if weight > 0.0 else float("inf")


def divide(amount: float, weights: Sequence[float], wants: Sequence[float]) -> list[float]:
    """Divide an amount by weights, so that none gets more than it wants while another wants more.

    What nobody wants is divided by weights, too: the parts sum up to the amount.
    """
    parts, left = [0.0] * len(weights), amount
    least = 1e-9 * max(weights, default=0.0)
    weighted = [index for index, weight in enumerate(weights) if weight > least]
    others = [index for index, weight in enumerate(weights) if weight <= least]
    for indices, equal in ((weighted, False), (others, True)):
        open_ones = [index for index in indices if wants[index] > 0.0]
        while left > 1e-9 and open_ones:
            whole = len(open_ones) if equal else sum(weights[index] for index in open_ones)
            shares = {index: (1.0 if equal else weights[index]) / whole for index in open_ones}
            level = min((wants[index] - parts[index]) / share for index, share in shares.items())
            for index, share in shares.items():
                parts[index] += min(level, left) * share
            left -= min(level, left)
            open_ones = [index for index in open_ones if wants[index] - parts[index] > 1e-9]
    rest = weighted or others
    whole = sum(weights[index] for index in rest)
    for index in rest:
        parts[index] += max(0.0, left) * (weights[index] / whole if whole else 1.0 / len(rest))
    return parts
