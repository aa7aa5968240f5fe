"""Sums of reasoning-gym as an environment package of `verifiers`: a module with `load_environment`."""

import re
from typing import Any

import verifiers as vf
from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv


def first_number(text: str) -> str:
    found = re.search(r"-?\d+", text)
    return found.group() if found else ""


def load_environment(
    digits: int = 1, terms: int = 2, rows: int = 1000, eval_rows: int = 64
) -> vf.Environment:
    numbers = {"min_digits": 1, "max_digits": digits, "min_terms": terms, "max_terms": terms}
    sums = ReasoningGymEnv(
        gym=[{"name": "chain_sum", "weight": 1.0, "config": numbers}],
        num_train_examples=rows,
        num_eval_examples=eval_rows,
        system_prompt="",
        parser=vf.Parser(extract_fn=first_number),
    )

    def near(completion: Any, answer: str, parser: vf.Parser) -> float:
        """Reward a number by its distance from the sum; the gym rewards the sum alone."""
        said = parser.parse_answer(completion)
        return 1 / (1 + abs(int(said) - int(sums.rg_dataset[int(answer)]["answer"]))) if said else 0.0

    sums.rubric.add_reward_func(near, weight=0.5)
    return sums
