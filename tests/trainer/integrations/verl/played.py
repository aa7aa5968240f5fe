"""Trajectories of known contents: what a worker answers, and what verl must train on. Needs neither verl nor torch."""

import random
from typing import Any

SIZE = 4
"""Sessions of a prompt."""


def sequence(row: int, place: int) -> tuple[list[int], list[int], list[float], float]:
    """Return tokens, mask, log-probabilities and score of a trajectory: two turns, with a tool's tokens between."""
    rng = random.Random(f"{row}/{place}")
    prompt = [row + 10, 3, 4]
    answer = [20 + place] * (1 + (row + place) % 3)
    tool, last = [7, 8], [30 + place, 1]
    mask = [0] * len(prompt) + [1] * len(answer) + [0] * len(tool) + [1] * len(last)
    logprobs = [-rng.random() * 5 if one else 0.0 for one in mask]
    return prompt + answer + tool + last, mask, logprobs, (row + place) % 5 / 4


def columns(row: int, size: int = SIZE) -> dict[str, Any]:
    """Return the columns of the group of a row."""
    rows = [sequence(row, place) for place in range(size)]
    return {
        "tokens": [one[0] for one in rows],
        "mask": [one[1] for one in rows],
        "inference_logprobs": [one[2] for one in rows],
        "scores": [one[3] for one in rows],
        "stop_reasons": ["stop"] * size,
    }


class Played:
    """The environment of a worker process: it answers the tasks of verl's prompts without an engine."""

    async def rollout(self, policy: Any, size: int, rng: random.Random) -> Any:
        raise NotImplementedError  # all tasks are submitted

    async def rollout_task(self, policy: Any, payload: Any, size: int, rng: random.Random) -> Any:  # noqa: ARG002
        from rolloutmq import Trajectory  # the tests read only what is above

        row = payload["extra_info"]["index"]
        rows = [sequence(row, place) for place in range(size)]
        return [
            Trajectory(
                token_ids=tokens,
                mask=[bool(one) for one in mask],
                logprobs=logprobs,
                score=score,
                finish_reason="stop",
            )
            for tokens, mask, logprobs, score in rows
        ]
