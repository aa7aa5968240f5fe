"""Shards: a batch divided among ranks into disjoint sets of whole groups with balanced tokens."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from rolloutmq.services.broker.journal.stored_group import StoredGroup


def shard(groups: Sequence[StoredGroup], world_size: int) -> list[list[StoredGroup]]:
    """Give each group to the rank with the fewest tokens, the longest groups first.

    Ties go to the rank with fewer groups, then to the lower rank. Within a rank the order of `groups` is kept. Every
    rank has a group if there are as many groups as ranks. No two ranks differ by more tokens than the longest group
    has, and the longest shard is at most 4/3 of the optimum.
    """
    if world_size == 1:
        return [list(groups)]
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    heap = [(0, 0, rank) for rank in range(world_size)]
    heapify(heap)
    longest_first = sorted(range(len(groups)), key=lambda i: -groups[i].header.tokens)
    for index in longest_first:
        tokens, count, rank = heap[0]
        ranks[rank].append(index)
        heapreplace(heap, (tokens + groups[index].header.tokens, count + 1, rank))
    return [[groups[i] for i in sorted(indexes)] for indexes in ranks]
