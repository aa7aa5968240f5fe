"""Bounded subset sums over group sizes: whether whole groups add up to an exact number of sequences.

A set of reachable sums is the bits of one integer, so a size with any count costs a logarithmic number of shifts. The
work depends on the number of distinct sizes and on the target, never on the number of groups.
"""

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Final

CELLS_LIMIT: Final = 1 << 28
"""Limit of distinct sizes times target, both by their common divisor, for one search: 32 MiB of bits.

Sizes above the target are never searched, so every target up to 16,384 is below the limit.
"""

Item = tuple[int, int]
"""A size and how many groups have it."""


def extend(bits: int, item: Item, mask: int) -> int:
    """Return the sums reachable from `bits` with up to `count` more groups of a size."""
    size, left = item
    step = 1
    while left > 0 and bits:
        take = min(step, left)
        bits |= (bits << size * take) & mask
        left -= take
        step *= 2
    return bits


def reach(counts: Mapping[int, int], limit: int) -> int:
    """Return the set of sums up to `limit`."""
    bits, mask = 1, (1 << (limit + 1)) - 1
    for size, count in counts.items():
        bits = extend(bits, (size, min(count, limit // size)), mask)
    return bits


def sumset(one: int, other: int, mask: int) -> int:
    """Return all sums of a member of one set and a member of the other."""
    if one.bit_count() > other.bit_count():
        one, other = other, one
    result = 0
    while one:
        low = one & -one
        result |= (other << (low.bit_length() - 1)) & mask
        one ^= low
    return result


def members(bits: int, limit: int) -> bytes:
    """Return the set as bytes, for `contains` in constant time."""
    return bits.to_bytes(limit // 8 + 1, "little")


def contains(cells: bytes, value: int) -> bool:
    """Return whether a set made by `members` has a value."""
    return value >= 0 and bool(cells[value >> 3] >> (value & 7) & 1)


def nearest(preferred: int, low: int, high: int) -> Iterator[int]:
    """Yield the values from `low` to `high`, the nearest to `preferred` first."""
    if low <= preferred <= high:
        yield preferred
    for step in range(1, max(preferred - low, high - preferred) + 1):
        if low <= preferred - step <= high:
            yield preferred - step
        if low <= preferred + step <= high:
            yield preferred + step


def fit(counts: Mapping[int, int], preferred: Mapping[int, int], target: int) -> dict[int, int] | None:
    """Choose counts of sizes that add up to exactly `target`, near the preferred ones.

    Args:
        counts: Available groups by size; the first sizes get their preferred counts, the last ones give way.
        preferred: Counts by size, without regard to the sum.
        target: The sum, at least 0.

    Returns:
        Counts by size, or None if no combination has the sum.
    """
    unit = gcd(*counts) or 1
    if unit > 1:
        small = {size // unit: count for size, count in counts.items()}
        wishes = {size // unit: count for size, count in preferred.items()}
        found = None if target % unit else fit(small, wishes, target // unit)
        return None if found is None else {size * unit: count for size, count in found.items()}
    items = [(size, count) for size, count in counts.items() if size <= target]
    mask = (1 << (target + 1)) - 1
    suffix = [1]
    for size, count in reversed(items):
        suffix.append(extend(suffix[-1], (size, min(count, target // size)), mask))
    suffix.reverse()
    if not suffix[0] >> target & 1:
        return None
    chosen: dict[int, int] = {}
    left = target
    for (size, count), rest in zip(items, suffix[1:], strict=True):
        cells = members(rest, target)
        most = min(count, left // size)
        wish = min(preferred.get(size, 0), most)
        chosen[size] = next(k for k in nearest(wish, 0, most) if contains(cells, left - k * size))
        left -= chosen[size] * size
    return chosen
