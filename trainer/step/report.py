"""Report of a batch: a line for `trained.jsonl` and an event, of a step or of a batch without a signal. Pure.

Rewards are the raw scores of all groups, including those without a signal: shuffling, centring and dividing for the
advantages never show here. If several ranks share a step, each contributes a part, and the report covers the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self

import msgspec
import numpy as np

from rolloutmq.schemas.config.trainer import NormalizationConfig
from rolloutmq.schemas.files import SettledBatch
from rolloutmq.schemas.wire.control import StepDone, StepSkipped
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.health import LaneScores
from rolloutmq.trainer.broker_client import StepBatch
from rolloutmq.trainer.step.advantages import HIDDEN, BatchAdvantages, mean_score
from rolloutmq.trainer.step.lane_scores import lane_scores, merged

LOSS: Final = "loss"


class Metrics(msgspec.Struct, frozen=True):
    """One rank's part of each metric of a step."""

    values: dict[str, float]


def total_of(parts: Sequence[Metrics]) -> dict[str, float]:
    """Add up the metrics of all ranks."""
    names = dict.fromkeys(name for part in parts for name in part.values)
    return {name: sum(part.values.get(name, 0.0) for part in parts) for name in names}


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a batch and its outcome.

    Attributes:
        trained, filtered, rejected, repeated: Ids of groups: trained on; without a signal; unusable, including those
            that did not decode; trained on before.
        fault: Reason of the first rejection.
        staleness: Staleness of each trained group.
        too_old: Filtered groups that are too stale for the loss.
        negligible: Filtered groups whose scores are alike in the unit of their environment, by environment.
        rewards: Mean score of each trained group, then of each filtered one.
        lanes: Scores of each environment, for the checks of their health.
        score: Sum of all scores of the groups that decoded, with their `sequences` and `tokens`.
        groups: Groups of the batch, those that did not decode included.
        moments: Groups in the moments that normalized the scores, by environment; the same on every rank.
    """

    trained: tuple[str, ...]
    filtered: tuple[str, ...]
    rejected: tuple[str, ...]
    repeated: tuple[str, ...]
    fault: str
    staleness: tuple[int, ...]
    too_old: int
    rewards: tuple[float, ...]
    score: float
    sequences: int
    tokens: int
    groups: int
    short: bool
    rewound: bool
    moments: dict[str, int] = {}
    negligible: dict[str, int] = {}
    lanes: tuple[LaneScores, ...] = ()

    @classmethod
    def of(
        cls,
        batch: StepBatch,
        advantages: BatchAdvantages,
        rewards: NormalizationConfig = NormalizationConfig.default(),
    ) -> Self:
        """Summarize a pulled batch and its advantages."""
        scores = [group.columns["scores"].numbers() for group in batch.groups]
        unusable = (*batch.rejected, *advantages.rejected)
        return cls(
            trained=tuple(group.group_id for group in advantages.trained),
            filtered=tuple(group.group_id for group in advantages.filtered),
            rejected=tuple(one.group_id for one in unusable),
            repeated=tuple(advantages.repeated),
            fault=unusable[0].reason if unusable else "",
            staleness=tuple(example.staleness for example in advantages.examples),
            too_old=advantages.too_old,
            negligible=advantages.negligible,
            rewards=tuple(mean_score([group]) for group in (*advantages.trained, *advantages.filtered)),
            score=float(np.concatenate(scores).sum()) if scores else 0.0,
            sequences=sum(len(each) for each in scores),
            tokens=sum(group.tokens for group in batch.groups),
            groups=len(batch.groups) + len(batch.rejected),
            short=batch.short,
            rewound=batch.rewound,
            moments={} if rewards.normalize == "none" else {e: m.groups for e, m in batch.moments.items()},
            lanes=lane_scores(batch.groups),
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished batch.

    Attributes:
        parts: Part of each rank.
        after: Policy version after the batch.
        metrics: Metrics of the step; empty if there was none.
    """

    parts: Sequence[StepPart]
    after: PolicyVersion
    metrics: dict[str, float]

    @property
    def trained(self) -> list[str]:
        """Ids of the groups the step trained on."""
        return [one for part in self.parts for one in part.trained]

    @property
    def repeated(self) -> list[str]:
        """Ids of the groups an earlier step trained on."""
        return [one for part in self.parts for one in part.repeated]

    @property
    def negligible(self) -> dict[str, int]:
        """Groups of all ranks that are left out because of the scale of their environment, by environment."""
        names = dict.fromkeys(name for part in self.parts for name in part.negligible)
        return {name: sum(part.negligible.get(name, 0) for part in self.parts) for name in names}

    @property
    def barren_because(self) -> str:
        """Reason why there was no signal, from one group of any rank; empty if all were trained on before."""
        if fault := next((part.fault for part in self.parts if part.fault), ""):
            return fault
        if any(part.too_old for part in self.parts):
            return "its groups are older than trainer.loss.correction.max_staleness"
        if hidden := self.negligible:
            return f"{HIDDEN} (environment {next(iter(hidden))})"
        return "all scores of each group are equal" if any(part.filtered for part in self.parts) else ""

    def line(self, at: float) -> SettledBatch | None:
        """Return the line of the log, or None if earlier lines cover the whole batch."""
        filtered = tuple(chain.from_iterable(part.filtered for part in self.parts))
        rejected = tuple(chain.from_iterable(part.rejected for part in self.parts))
        trained = tuple(self.trained)
        if not (trained or filtered or rejected):
            return None
        return SettledBatch(
            at=at,
            version=self.after,
            trained=trained,
            filtered=filtered,
            rejected=rejected,
            staleness=tuple(self._staleness()),
            rewards=self._rewards(),
            rewound=any(part.rewound for part in self.parts),
            moments=self.parts[0].moments,
        )

    def _rewards(self) -> tuple[float, ...]:
        """Return the rewards of all trained groups, then those of the filtered ones."""
        learned = [reward for part in self.parts for reward in part.rewards[: len(part.trained)]]
        flat = [reward for part in self.parts for reward in part.rewards[len(part.trained) :]]
        return (*learned, *flat)

    def event(self, run: str, at: float, pull_s: float, step_s: float) -> StepDone:
        """Return the event of a batch that was a step."""
        staleness, parts = self._staleness(), self.parts
        rest = {name: value for name, value in self.metrics.items() if name != LOSS}
        return StepDone(
            run=run,
            incarnation=self.after.incarnation,
            step=self.after.step,
            at=at,
            reward=sum(part.score for part in parts) / max(1, sum(part.sequences for part in parts)),
            loss=self.metrics[LOSS],
            tokens=sum(part.tokens for part in parts),
            groups=sum(part.groups for part in parts),
            filtered=sum(len(part.filtered) for part in parts),
            staleness_max=max(staleness),
            staleness_mean=sum(staleness) / len(staleness),
            pull_s=pull_s,
            step_s=step_s,
            scores=self._scores(),
            extra=rest
            | {
                "rejected": sum(len(part.rejected) for part in parts),
                "repeated": len(self.repeated),
                "too_old": sum(part.too_old for part in parts),
                "negligible": sum(self.negligible.values()),
                "short": float(any(part.short for part in parts)),
                "rewound": float(any(part.rewound for part in parts)),
                **{f"moments_groups/{env}": groups for env, groups in parts[0].moments.items()},
            },
        )

    def skipped(self, run: str, at: float) -> StepSkipped:
        """Return the event of a batch that was no step: its scores count for their health."""
        return StepSkipped(
            run=run,
            incarnation=self.after.incarnation,
            step=self.after.step,
            at=at,
            reason=self.barren_because,
            groups=sum(part.groups for part in self.parts),
            filtered=sum(len(part.filtered) for part in self.parts),
            rejected=sum(len(part.rejected) for part in self.parts),
            scores=self._scores(),
        )

    def _scores(self) -> tuple[LaneScores, ...]:
        return merged([lane for part in self.parts for lane in part.lanes])

    def _staleness(self) -> list[int]:
        return [one for part in self.parts for one in part.staleness]
