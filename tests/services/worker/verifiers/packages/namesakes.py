"""An environment of verifiers with reward functions of one name, one of which each rollout adds again."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def graded(value: float) -> Any:
    def grade(answer: str) -> float:
        if answer == "fails" and value == 3.0:
            raise ConnectionError("the judge is away")
        return value

    return grade


def num_turns(answer: str) -> float:
    return float(len(answer))


class Adding(vf.SingleTurnEnv):  # type: ignore[misc]
    async def setup_state(self, state: Any) -> Any:
        first = self.rubric.rubrics[0]
        if len(first.funcs) == 1:
            first.add_reward_func(graded(3.0), weight=2.0)
        return state


def load_environment() -> vf.Environment:
    rows = [{"prompt": [{"role": "user", "content": "1="}], "answer": way} for way in ("fine", "fails")]
    rubrics = [vf.Rubric(funcs=[graded(1.0)]), vf.Rubric(funcs=[graded(2.0), num_turns], weights=[0.25, 0.5])]
    return Adding(dataset=Dataset.from_list(rows), rubric=vf.RubricGroup(rubrics=rubrics))
