"""Shards: a batch divided among ranks into disjoint sets of whole groups with balanced tokens, and their outcomes."""

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Final

from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import StoredGroup

Outcome = tuple[GroupState, str]
"""State and reason of a settled group."""

TRAINED: Final[Outcome] = (GroupState.TRAINED, "")
FILTERED: Final[Outcome] = (GroupState.FILTERED, "")


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


def outcomes(groups: Sequence[StoredGroup], settle: Settle) -> list[Outcome] | None:
    """Return the outcome of each group of a shard; None if the lists of `settle` do not match the shard."""
    held = [group.header.group_id for group in groups]
    if not settle.filtered and not settle.rejected and held == list(settle.trained):
        all_trained: list[Outcome] = [TRAINED] * len(held)
        return all_trained
    named: dict[str, list[Outcome]] = {}
    for group_id in settle.trained:
        named.setdefault(group_id, []).append(TRAINED)
    for group_id in settle.filtered:
        named.setdefault(group_id, []).append(FILTERED)
    for rejected in settle.rejected:
        named.setdefault(rejected.group_id, []).append((GroupState.DEAD, rejected.reason))
    result = []
    for group_id in held:
        left = named.get(group_id)
        if not left:
            return None
        result.append(left.pop(0))
    return None if any(named.values()) else result


def mismatch(groups: Sequence[StoredGroup], settle: Settle) -> str:
    """Return the error of a settlement without `outcomes`."""
    rejected = [rejected.group_id for rejected in settle.rejected]
    named = Counter([*settle.trained, *settle.filtered, *rejected])
    held = Counter(group.header.group_id for group in groups)
    missing, surplus = sorted((held - named).elements()), sorted((named - held).elements())
    return (
        "settle: every group of this rank's shard must appear exactly once in trained, filtered or rejected "
        f"(missing: {_some(missing)}; surplus: {_some(surplus)})"
    )


def _some(names: list[str]) -> str:
    """Return up to three names, for an error."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
