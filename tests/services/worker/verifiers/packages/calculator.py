"""An environment of verifiers with a tool, for the questions of `tests/examples/tool_server.py`."""

import json
from typing import Any

import verifiers as vf
from datasets import Dataset


def calculate(operation: str, a: int, b: int) -> float:
    """Add, multiply or divide.

    Args:
        operation: `add`, `multiply` or `divide`.
        a: First number.
        b: Second number.
    """
    if operation == "divide":
        return a / b
    return {"add": a + b, "multiply": a * b}[operation]


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == f"It is {answer}.")


def load_environment(rows: int = 8) -> vf.Environment:
    questions = [
        {"question": f"What is ({n} + 2) * 3?", "answer": str((n + 2) * 3), "info": json.dumps({"n": n})}
        for n in range(rows)
    ]
    return vf.ToolEnv(
        dataset=Dataset.from_list(questions), tools=[calculate], max_turns=4, rubric=vf.Rubric(funcs=[right])
    )
