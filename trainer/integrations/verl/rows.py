"""Groups of the bus as the keys, fields and tags that verl reads from TransferQueue. Pure.

    {uid}                 a prompt; its tag `status` is pending, running, finished or failure
    {uid}_{session}_0     a trajectory, with the fields of an agent loop's output and of its prompt

A sequence of the bus begins with its prompt: the tokens before the first trained one. The rest is verl's response, with
mask 0 where nothing is trained. Nothing is decoded, tokenized or padded; log-probabilities are verl's f32.

A trajectory that verl cannot train on is left out, and so is one beyond the sessions that verl asked for. verl calls a
prompt with fewer trajectories than sessions a failure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rolloutmq.schemas.group import RATERS, RATINGS, Group
from rolloutmq.schemas.wire.envelope import Dtype
from rolloutmq.trainer.integrations.task_feed.sequences import SampledSequence, sampled_sequences
from rolloutmq.trainer.integrations.verl.prompts import Prompt

UNKEPT: Final = frozenset({"agent_name", "multi_modal_data"})
"""Fields of a prompt that verl does not keep beside a trajectory."""


METRIC: Final = "metric_"
"""Prefix of a column with a metric of the environment, which verl knows without it."""


class Status(StrEnum):
    """Status of a prompt in TransferQueue, as verl's replay buffer reads it."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Trajectories of one group.

    Attributes:
        keys: Keys in TransferQueue.
        fields: Fields of each, all with the same names.
        tags: Tags of each.
        missing: Sessions without a trajectory.
    """

    keys: list[str]
    fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    missing: int

    @property
    def status(self) -> Status:
        """Status of their prompt."""
        return Status.FAILURE if self.missing else Status.FINISHED


def trajectories(group: Group, prompt: Prompt) -> Trajectories:
    """Return the trajectories of the group that answers a prompt."""
    kept = {name: value for name, value in prompt.fields.items() if name not in UNKEPT}
    found = Trajectories([], [], [], prompt.size)
    named = _named_scores(group)
    live = 0
    for session, sequence in enumerate(sampled_sequences(group)[: prompt.size]):
        if not sequence.usable:
            continue
        live += 1
        found.keys.append(f"{prompt.uid}_{session}_0")
        own = {name: values[session] for name, values in named.items()}
        found.fields.append(_fields(sequence, group, own, kept | {"session_id": session}))
        found.tags.append(_tags(sequence, group, prompt))
    return Trajectories(found.keys, found.fields, found.tags, prompt.size - live)


def _named_scores(group: Group) -> dict[str, list[float]]:
    """Return verl's `reward_extra_info` by name, a value for each sequence.

    Its `acc` is the score, as for a reward function of verl that returns a number, unless the group has its own.
    Columns with a number for each sequence follow, and the ratings of an ensemble, NaN where one is missing.
    """
    columns = group.columns
    scores: list[float] = columns["scores"].numbers().tolist()
    found = {"acc": scores, "score": scores}
    for name, column in columns.items():
        if name != "scores" and not column.depth and column.dtype is not Dtype.OPAQUE:
            found[name.removeprefix(METRIC)] = column.numbers().tolist()
    ratings, raters = columns.get(RATINGS), columns.get(RATERS)
    if ratings is not None and raters is not None:
        rows = [
            dict(zip(names, row, strict=False))
            for names, row in zip(raters.values, ratings.rows(), strict=False)
        ]
        for name in rows[0]:
            found[name] = [float(row.get(name, math.nan)) for row in rows]
    return found


def _fields(
    sequence: SampledSequence, group: Group, named: Mapping[str, float], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of one trajectory: those of verl's `AgentLoopOutput`, then those of the prompt."""
    prompts, responses, mask = (
        torch.from_numpy(one.astype(np.int64)) for one in (sequence.prompt, sequence.response, sequence.mask)
    )
    rewards = torch.zeros(len(mask), dtype=torch.float32)
    rewards[-1] = sequence.score
    return {
        "num_turns": 2 * _spans(sequence.mask),
        "metrics": {
            "generate_sequences": max(0.0, group.finished_at - group.started_at),
            "tool_calls": 0.0,
            "compute_score": 0.0,
            "num_preempted": -1,
        },
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": dict(named),
            "min_global_steps": group.oldest.step,
            "max_global_steps": group.newest.step,
            "stop_reason": sequence.stop_reason,
            "group_id": group.group_id,
        },
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": torch.from_numpy(sequence.logprobs.astype(np.float32)),
        "rm_scores": rewards,
        **kept,
        "loss_mask": mask,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "multi_modal_inputs": {},
    }


def _spans(mask: NDArray[np.bool_]) -> int:
    """Return the number of unbroken runs of sampled tokens: the turns of the policy."""
    return int(np.count_nonzero(np.diff(mask.astype(int), prepend=0) == 1))


def _tags(sequence: SampledSequence, group: Group, prompt: Prompt) -> dict[str, Any]:
    return {
        "status": "success",
        "prompt_len": len(sequence.prompt),
        "response_len": len(sequence.response),
        "seq_len": len(sequence.prompt) + len(sequence.response),
        "global_steps": prompt.step,
        "min_global_steps": group.oldest.step,
        "max_global_steps": group.newest.step,
    }
