"""Prompts of a verl batch, and their tasks. Pure.

verl draws a new uid each time that it reads a row of its data set, also for the same row after a resume. So the id of a
task names the content of the prompt before the uid: a group answers any prompt of the same content, see `content_key`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.trainer.integrations.task_feed.payloads import content_digest, plain

UNCARRIED: Final = frozenset({"uid", "dummy_tensor", "global_steps", "agent_name"})
"""Fields of a prompt that are no part of its content."""
ROLLOUTS: Final = "__rollout_n__"
"""Field with which verl's data set asks for another number of sessions."""
SAMPLES: Final = "__do_sample__"
"""Field with which verl's data set asks for greedy sampling, if it is false."""
GREEDY: Final = {"temperature": 0, "top_p": 1.0, "top_k": -1}


class Sampling(NamedTuple):
    """Sampling that verl's configuration asks for: sessions of a prompt, and parameters for the environment."""

    sessions: int
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of verl: a GRPO group.

    Attributes:
        uid: verl's id, the key of the prompt in TransferQueue.
        fields: Fields of the data set; verl keeps them beside each trajectory.
        size: Number of sessions: trajectories of the group.
        step: Step that verl submitted it for.
        sampling: Sampling parameters for the environment.
        validates: It belongs to a validation.
    """

    uid: str
    fields: Mapping[str, Any]
    size: int
    step: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    validates: bool = False

    @property
    def partition(self) -> str:
        """Partition of TransferQueue."""
        return "val" if self.validates else "train"

    @property
    def split(self) -> Split:
        """Split of the task."""
        return Split.EVAL if self.validates else Split.TRAIN

    @property
    def content(self) -> dict[str, Any]:
        """What the prompt is about, as msgpack can carry it."""
        return {name: plain(value) for name, value in self.fields.items() if name not in UNCARRIED}

    @property
    def payload(self) -> dict[str, Any]:
        """Payload of the task: the fields of the data set, and the sampling parameters."""
        return {"uid": self.uid, **self.content, "sampling_params": dict(self.sampling)}

    def task(self, training: str) -> str:
        """Return the id of the task in a training, without the attempt: `training/phase/content/uid`."""
        phase = "eval" if self.validates else "train"
        uid = (
            self.uid
            if len(self.uid) <= 36
            else hashlib.blake2b(self.uid.encode(), digest_size=16).hexdigest()
        )
        return f"{training}/{phase}/{content_digest(self.content)}/{uid}"


def content_key(task_id: str) -> str:
    """Return what the ids of two tasks have in common if the group of one answers the other."""
    return task_id.rpartition("/")[0]


def prompts_of(rows: Iterable[Mapping[str, Any]], training: Sampling, validation: Sampling) -> list[Prompt]:
    """Return the prompts of the rows of a batch.

    Args:
        rows: Fields of each prompt, with `uid`, `global_steps` and, in a validation, `validate`.
        training: Sampling of verl's `rollout`.
        validation: Sampling of verl's `rollout.val_kwargs`.
    """
    found = []
    for row in rows:
        fields = dict(row)
        validates = bool(fields.pop("validate", False))
        asked, samples = fields.pop(ROLLOUTS, None), fields.pop(SAMPLES, True)
        sessions, params = validation if validates else training
        if not validates and not samples:
            params = {**params, **GREEDY}
        size, step = sessions if asked is None else int(asked), int(fields.get("global_steps", 0))
        found.append(Prompt(str(fields["uid"]), fields, size, step, params, validates))
    return found
