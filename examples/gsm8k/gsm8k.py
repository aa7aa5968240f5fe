"""Word problems with numeric answers, from your own file: one JSON object with `question` and `answer` on each line.

    {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "He has 3 + 4 = 7.\\n#### 7"}

The right answer is the number after `####`, or else the last number. A reply scores 1 if its last number is right, and
0.1 if it has any other number, so a policy without a format yet has a signal.
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
        problems: Path of the file, relative to the working directory of the run.
        max_tokens: Longest reply, in tokens.
        prompt: Template of the prompt, with `{question}`.
        chat: Send the prompt as a chat message through the model's chat template.
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
    """Read a file of problems; ValueError names a line that is not a problem."""
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            question, answer = str(found["question"]), str(found["answer"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}:{number}: must be an object with `question` and `answer`") from None
        right = last_number(answer.rpartition("####")[2])
        if right is None:
            raise ValueError(f"{path}:{number}: its answer has no number (got {answer!r:.80})")
        problems.append(Problem(question, right))
    if not problems:
        raise ValueError(f"{path}: has no problem; write one JSON object on each line")
    return problems


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, or None; 1,234.50 equals 1234.5."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
