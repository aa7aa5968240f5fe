"""Prompt groups of a `GeneratorInput`, and groups of the bus as the rows of a `GeneratorOutput`. Pure.

A sequence of the bus begins with its prompt: the tokens before the first trained one. The rest is SkyRL's response,
with loss mask 0 where nothing is trained, such as the results of tools.

SkyRL needs a row for each trajectory that it asked for. A missing one becomes a masked row: one token with loss mask 0,
and the reason as its stop reason. Its reward is one of the group's other rewards, which take turns, or 0 without any:
then mean and deviation of the group's rewards stay about as they are, and so do the advantages of the others. No row is
ever empty, because SkyRL puts the reward on the last token.

`follow_stop_reasons` does what SkyRL's own generator does, behind its metrics, for `zero_reward_on_non_stop` and
`apply_overlong_filtering`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

from rolloutmq.trainer.integrations.task_feed.answers import Answer, Missing
from rolloutmq.trainer.integrations.task_feed.payloads import content_digest, plain
from rolloutmq.trainer.integrations.task_feed.sequences import STOP, SampledSequence, sampled_sequences

TASK_CHARS: Final = 120
"""Longest task id before the number of the attempt; the broker allows 128 in all."""
_REMEDIES: Final[Mapping[str, tuple[str, str]]] = {
    Missing.DEADLINE: (
        "generator.bus.deadline_s",
        "raise it, or see in `rolloutmq status` why no group comes",
    ),
    Missing.REFUSED: ("generator.bus.environments", "name environments of the run; the log has the reason"),
}
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._/-]")


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Trajectories of one instance in a `GeneratorInput`.

    Attributes:
        uid: SkyRL's id of the instance.
        env: SkyRL's class of environment.
        payload: Content of the task.
        places: Places of the trajectories in the input, in the order of their repetitions.
    """

    uid: str
    env: str
    payload: dict[str, Any]
    places: tuple[int, ...]


def prompt_groups(given: Mapping[str, Any]) -> list[PromptGroup]:
    """Divide a `GeneratorInput` into its instances, in the order of the first trajectory of each."""
    ids = given.get("trajectory_ids")
    prompts = given["prompts"]
    places: dict[str, list[int]] = {}
    for place in range(len(prompts)):
        uid = str(place) if ids is None else str(ids[place].instance_id)
        places.setdefault(uid, []).append(place)
    extras = given.get("env_extras")
    found = []
    for uid, of_uid in places.items():
        first = of_uid[0]
        payload = {
            "uid": uid,
            "messages": plain(prompts[first]),
            "env_class": given["env_classes"][first],
            "env_extras": plain(extras[first]) if extras else {},
            "sampling_params": plain(given.get("sampling_params") or {}),
        }
        found.append(PromptGroup(uid, str(given["env_classes"][first]), payload, tuple(of_uid)))
    return found


def task_name(training: str, phase: str, epoch: str, group: PromptGroup, env: str) -> str:
    """Return the id of an instance's task, without the attempt: the same in every life of a training.

    It has a digest of the content, because an instance of the same uid may be another one: of other data, say.

    Args:
        training: Name of the training.
        phase: `train` or `eval`.
        epoch: Part of the training in which each instance is a new task.
        group: The instance.
        env: Environment of the bus.
    """
    digest = content_digest([env, len(group.places), group.payload])
    name = f"{training}/{phase}/{epoch}/{digest}"
    whole = f"{name}/{group.uid}"
    return name if len(whole) > TASK_CHARS or _UNSAFE.search(whole) else whole


@dataclass(slots=True)
class Rows:
    """Rows of a `GeneratorOutput` under construction, one for each trajectory of the input.

    Attributes:
        pad: Token of a masked row.
    """

    count: int
    pad: int = 0
    prompts: list[list[int]] = field(init=False)
    responses: list[list[int]] = field(init=False)
    masks: list[list[int]] = field(init=False)
    logprobs: list[list[float]] = field(init=False)
    rewards: list[float] = field(init=False)
    stop_reasons: list[str] = field(init=False)
    times: list[float] = field(init=False)
    _repeats: dict[int, int | None] = field(default_factory=dict)
    """Masked rows, and the row whose reward each of them repeats."""

    def __post_init__(self) -> None:
        self.prompts = [[] for _ in range(self.count)]
        self.responses = [[] for _ in range(self.count)]
        self.masks = [[] for _ in range(self.count)]
        self.logprobs = [[] for _ in range(self.count)]
        self.rewards = [0.0] * self.count
        self.stop_reasons = [""] * self.count
        self.times = [0.0] * self.count

    def fill(self, places: Sequence[int], answer: Answer, prompt: Sequence[int] = ()) -> int:
        """Write the rows of one prompt group; return how many of them are masked.

        Args:
            places: Rows of its trajectories.
            answer: What came.
            prompt: Prompt of masked rows if no sequence tells it.
        """
        sequences = [] if answer.group is None else sampled_sequences(answer.group)
        elapsed_s = answer.waited_s
        if answer.group is not None:
            elapsed_s = max(0.0, answer.group.finished_at - answer.group.started_at)
        usable = {place: one for place, one in zip(places, sequences, strict=False) if one.usable}
        for place, one in usable.items():
            self._write(place, one)
        repeated = cycle(usable or [None])
        stand_in = self.prompts[next(iter(usable))] if usable else prompt
        absent = answer.missing or Missing.SHORT
        for number, place in enumerate(places):
            self.times[place] = elapsed_s
            if place not in usable:
                why = Missing.UNUSABLE if number < len(sequences) else absent
                self._mask(place, stand_in, why, next(repeated))
        return len(places) - len(usable)

    def _write(self, place: int, one: SampledSequence) -> None:
        self.prompts[place] = one.prompt.tolist()
        self.responses[place] = one.response.tolist()
        self.masks[place] = one.mask.astype(int).tolist()
        self.logprobs[place] = one.logprobs.tolist()
        self.rewards[place] = one.score
        self.stop_reasons[place] = one.stop_reason

    def _mask(self, place: int, prompt: Sequence[int], why: Missing, repeated: int | None) -> None:
        self.prompts[place] = list(prompt) or [self.pad]
        self.responses[place] = [self.pad]
        self.masks[place] = [0]
        self.logprobs[place] = [0.0]
        self._repeats[place] = repeated
        self.rewards[place] = 0.0 if repeated is None else self.rewards[repeated]
        self.stop_reasons[place] = str(why)

    def follow_stop_reasons(self, *, zero_rewards: bool, mask: bool) -> None:
        """Change the rows of trajectories that came and did not end with `stop`.

        Args:
            zero_rewards: Their reward is 0; masked rows that repeat it follow.
            mask: Their loss mask is 0. Their reward stays in the baseline, as with SkyRL's own generator.
        """
        for place, reason in enumerate(self.stop_reasons):
            if place in self._repeats or reason == STOP:
                continue
            if zero_rewards:
                self.rewards[place] = 0.0
            if mask:
                self.masks[place] = [0] * len(self.masks[place])
        for place, repeated in self._repeats.items():
            self.rewards[place] = 0.0 if repeated is None else self.rewards[repeated]

    def output(self, trajectory_ids: Any, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the `GeneratorOutput`."""
        return {
            "prompt_token_ids": self.prompts,
            "response_ids": self.responses,
            "rewards": self.rewards,
            "loss_masks": self.masks,
            "stop_reasons": self.stop_reasons,
            "rollout_metrics": dict(metrics),
            "rollout_logprobs": self.logprobs,
            "trajectory_ids": trajectory_ids,
            "trajectory_generation_times": self.times,
            "rollout_expert_indices": None,
            "is_last_step": None,
        }


def bus_metrics(answers: Iterable[Answer], masked: int) -> dict[str, float]:
    """Return the metrics of one call for SkyRL's tracker: the same names in every call.

    SkyRL adds them up over the calls of a step, but for names with `mean` and `max` in them.
    """
    answers = list(answers)
    came = [one for one in answers if one.group is not None]
    ages = [one.staleness for one in came]
    found: dict[str, float] = {
        "bus/groups": float(len(came)),
        "bus/masked_trajectories": float(masked),
        "bus/staleness_mean": sum(ages) / len(ages) if ages else 0.0,
        "bus/staleness_max": float(max(ages, default=0)),
    }
    for why in (
        Missing.FAILED,
        Missing.DEADLINE,
        Missing.LOST,
        Missing.UNUSABLE,
        Missing.CANCELLED,
        Missing.REFUSED,
        Missing.CLOSED,
    ):
        found[f"bus/groups_{why}"] = float(sum(one.missing is why for one in answers))
    return found


def why_nothing_came(stop_reasons: Sequence[str], step: int) -> str:
    """Return why none of the trajectories of a step came and what to do, by key; empty if one did."""
    counted = Counter(stop_reasons)
    if not counted or any(reason not in set(Missing) for reason in counted):
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in counted.most_common())
    key, remedy = _REMEDIES.get(
        counted.most_common(1)[0][0], ("generator.bus", "see the reasons of single prompts in the log")
    )
    return f"{key}: step {step} has no trajectory to learn from (got {reasons}); {remedy}"
