"""Groups of the bus as the rows that TRL trains on. Pure.

A row is one sequence: the prompt reaches up to its first trained token, the completion is the rest. Tokens and
log-probabilities are those of the group, nothing is decoded or tokenized again. `env_mask` of TRL is 1 at the trained
tokens of the completion, so the tool outputs of a multi-turn rollout are in its context and not in its loss.

TRL reads the rewards of a batch as `(groups, num_generations)`, over all ranks in their order. So groups have exactly
`num_generations` rows, and a batch has a fixed number of rows. Where groups are missing (an unusable one, or a short
batch), filler rows take their place: no token of them is trained and their reward is None, which TRL gives no
advantage.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.health import LaneScores
from rolloutmq.trainer.integrations.judgement import Judge
from rolloutmq.trainer.step import overrides
from rolloutmq.trainer.step.collate import Bounds
from rolloutmq.trainer.step.lane_scores import lane_scores


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence.

    Attributes:
        prompt: `(P,)` token ids, at least one.
        completion: `(C,)` token ids, at least one.
        logprobs: `(C,)` f64, of the policy that sampled; 0 where the mask is 0.
        mask: `(C,)` u8, 1 at trained tokens.
        score: Reward; None for filler.
        env: Environment; empty for filler.
        staleness: Optimizer steps by which the policy has moved on since the group's oldest token.
    """

    prompt: NDArray[Any]
    completion: NDArray[Any]
    logprobs: NDArray[np.float64]
    mask: NDArray[np.uint8]
    score: float | None
    env: str = ""
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class PulledGroup:
    """One group of a shard, as all ranks exchange it.

    Attributes:
        group_id: Id.
        rank: Rank whose shard it belongs to, which settles it.
        fault: Why TRL cannot train on it; empty if it can.
        rows: Its sequences; none with a fault.
        staleness: Of the group.
        reward: Mean score.
        tokens: Trained tokens.
        lanes: Sums over its scores, for the checks of their health.
    """

    group_id: str
    rank: int
    fault: str
    rows: tuple[Row, ...] = ()
    staleness: int = 0
    reward: float = 0.0
    tokens: int = 0
    lanes: tuple[LaneScores, ...] = ()


class Demand(NamedTuple):
    """What TRL can train on: rows of a group, its temperature, and the limits of the policy."""

    group_size: int
    temperature: float
    bounds: Bounds


def pulled(group: Group, staleness: int, rank: int, demand: Demand) -> PulledGroup:
    """Judge a group and cut it into rows."""
    if fault := _fault(group, demand):
        return PulledGroup(group.group_id, rank, fault)
    rows = tuple(_rows(group, staleness))
    return PulledGroup(
        group_id=group.group_id,
        rank=rank,
        fault="",
        rows=rows,
        staleness=staleness,
        reward=float(group.columns["scores"].numbers().mean()),
        tokens=int(sum(row.mask.sum() for row in rows)),
        lanes=lane_scores([group]),
    )


def _fault(group: Group, demand: Demand) -> str:
    if group.sequences != demand.group_size:
        return (
            f"group {group.group_id}: has {group.sequences} sequences, num_generations is {demand.group_size}; "
            f"set environment.{group.env or 'NAME'}.group_size to the same number"
        )
    return Judge("TRL", demand.temperature, "GRPOConfig.temperature", demand.bounds, zeroes=True).find_fault(
        group
    )


def _rows(group: Group, staleness: int) -> Iterable[Row]:
    tokens = group.columns["tokens"]
    lengths = tokens.lengths[0].tolist()
    ends = np.cumsum(lengths)[:-1]
    trained = np.split(trained_tokens(group), ends)
    logprobs = np.split(group.columns["inference_logprobs"].numbers(), ends)
    parts = zip(
        tokens.rows(),
        trained,
        logprobs,
        group.columns["scores"].numbers(),
        overrides.zeroed(group),
        strict=True,
    )
    for ids, chosen, known, score, zeroed in parts:
        first = int(chosen.argmax()) if chosen.any() else max(1, len(ids) - 1)
        mask = (chosen & ~zeroed)[first:]
        prompt = ids[:first] if len(ids) else np.zeros(1, np.int32)
        completion = ids[first:] if len(ids) > first else prompt[-1:]
        if len(mask) < len(completion):  # a sequence of one token or none has no completion of its own
            mask = np.zeros(len(completion), bool)
        known = np.where(mask, known[first:] if len(known) > first else 0.0, 0.0)
        yield Row(prompt, completion, known, mask.astype(np.uint8), float(score), group.env, staleness)


def filled(groups: Sequence[PulledGroup], group_size: int, rows: int, filler: int) -> list[Row]:
    """Return exactly `rows` rows: those of the groups in their order, then filler of the token id `filler`."""
    found = [row for group in groups for row in group.rows]
    one = np.array([filler], np.int32)
    blank = Row(one, one, np.zeros(1), np.zeros(1, np.uint8), None)
    assert len(found) % group_size == 0
    return found + [blank] * (rows - len(found))


def without_signal(rewards: Iterable[Sequence[float]], groups: int, group_size: int) -> list[bool]:
    """Return for each group whether every reward function gave all its rows the same; then TRL's advantages are 0.

    Args:
        rewards: For each reward function, one number for each row of the batch; NaN for None.
        groups: Number of groups, in the order of the rows.
        group_size: Rows of a group.
    """
    flat = [True] * groups
    for given in rewards:
        table = np.asarray(given[: groups * group_size], np.float64).reshape(groups, group_size)
        for number, row in enumerate(table):
            known = row[~np.isnan(row)]
            flat[number] &= not known.size or bool((known == known[0]).all())
    return flat
