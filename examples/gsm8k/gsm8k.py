"""Word problems with a number as their answer, from a file of your own: a JSON object a line, `question` and `answer`.

    {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "He has 3 + 4 = 7.\\n#### 7"}

The answer is what stands behind `####`, or else the last number. A reply scores 1 if its last number is that one, and
0.1 if it has another number at all, so that a policy that has none yet has something to go by.
"""

import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from rolloutmq import Completion, SingleTurn

NUMBER = re.compile(r"(?:(?<![\d)])-)?\d[\d,]*(?:\.\d+)?")
PROMPT = "Question: {question}\nThink step by step, and end with #### and the number.\nAnswer:"


@dataclass(frozen=True)
class Problem:
    question: str
    number: Decimal


class GSM8K(SingleTurn[Problem]):
    """Draws problems from a file.

    Args:
        problems: The file, relative to where the run was started.
        max_tokens: Longest reply.
        prompt: How a question is put, with `{question}` in it.
        chat: Put it as a message, through the chat template of the model.
    """

    def __init__(
        self, problems: str, max_tokens: int = 256, prompt: str = PROMPT, chat: bool = False
    ) -> None:
        self.problems = read(Path(problems))
        self.max_tokens = max_tokens
        self._prompt = prompt
        self._chat = chat

    def task(self, rng: random.Random) -> Problem:
        return rng.choice(self.problems)

    def prompt(self, task: Problem) -> str | list[dict[str, str]]:
        text = self._prompt.replace("{question}", task.question)
        return [{"role": "user", "content": text}] if self._chat else text

    def score(self, task: Problem, completion: Completion) -> float:
        number = last_number(completion.text)
        if number is None:
            return 0.0
        return 1.0 if number == task.number else 0.1


def read(path: Path) -> list[Problem]:
    """Read a file of problems; ValueError with the line that is none."""
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            question, answer = str(found["question"]), str(found["answer"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}:{number}: is no object with `question` and `answer`") from None
        right = last_number(answer.rpartition("####")[2])
        if right is None:
            raise ValueError(f"{path}:{number}: its answer has no number")
        problems.append(Problem(question, right))
    if not problems:
        raise ValueError(f"{path}: holds no problem")
    return problems


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; 1,234.50 and 1234.5 are the same."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
