"""Determinism of scores: the same rollouts scored several times must get the same scores and ratings. Pure.

A scoring is a list of groups, as plain values, so that it can come from another process.
"""

from collections.abc import Iterator, Sequence
from math import isnan

import msgspec
import numpy as np

from rolloutmq.schemas.group import RATERS, RATINGS, Group


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one group.

    Attributes:
        tokens: Token ids `[n][length]`: what was scored.
        scores: `[n]`.
        ratings: `[n][raters]`, None for a missing one; empty without raters.
        raters: Names of the raters.
    """

    tokens: list[list[int]]
    scores: list[float]
    ratings: list[list[float | None]] = []
    raters: list[str] = []

    @classmethod
    def of(cls, group: Group) -> "ScoredGroup":
        """Return the scores of a group."""
        rows = group.columns[RATINGS].rows() if RATINGS in group.columns else []
        return cls(
            tokens=[row.tolist() for row in group["tokens"]],
            scores=group.columns["scores"].numbers().tolist(),
            ratings=[[None if isnan(value) else value for value in row.tolist()] for row in rows],
            raters=list(group.columns[RATERS].values[0]) if RATERS in group else [],
        )


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two scorings of one sequence that differ.

    Attributes:
        group, row: Numbers of the group and of the sequence, from 0.
        what: `score`, the name of a rater, or `tokens` if not even the rollouts are the same.
        values: Both values; None is a missing rating.
    """

    group: int
    row: int
    what: str
    values: tuple[float | None, float | None]

    @property
    def is_missing(self) -> bool:
        """Whether a rater gave a rating in one scoring, and none in the other."""
        return self.what != "tokens" and None in self.values


def differences(first: Sequence[ScoredGroup], second: Sequence[ScoredGroup]) -> Iterator[Difference]:
    """Yield where two scorings of the same groups differ, bit for bit.

    A sequence whose rollout differs is told as such, and not compared further.
    """
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if len(one.tokens) != len(other.tokens):
            yield Difference(group=number, row=0, what="tokens", values=(len(one.tokens), len(other.tokens)))
            continue
        for row in range(len(one.tokens)):
            if one.tokens[row] != other.tokens[row]:
                yield Difference(group=number, row=row, what="tokens", values=(None, None))
                continue
            for what, *values in _values(one, other, row):
                if not _same(*values):
                    yield Difference(group=number, row=row, what=what, values=(values[0], values[1]))


def _values(
    one: ScoredGroup, other: ScoredGroup, row: int
) -> Iterator[tuple[str, float | None, float | None]]:
    if one.raters == other.raters and one.ratings and other.ratings:
        yield from zip(one.raters, one.ratings[row], other.ratings[row], strict=True)
    yield "score", one.scores[row], other.scores[row]


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.float64(one).tobytes() == np.float64(other).tobytes())
