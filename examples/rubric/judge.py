"""A language model judges the answers: a rater asks any server of OpenAI's dialect for a grade from 0 to 10."""

import random
import re

import aiohttp

from rolloutmq import Completion, Rating, SingleTurn

QUESTION = (
    "The task was to sort the digits {task}. The answer was: {answer}\nReply with a grade from 0 to 10."
)
GRADE = re.compile(r"\b(10|\d)\b")


async def judge(task: str, answer: Completion, url: str, model: str = "judge") -> Rating | None:
    """Return the grade of an answer as 0 to 1, with the tokens it took; None if the reply has no grade.

    A server that is away or answers with an error raises: the rating is missing, never 0.
    """
    content = QUESTION.format(task=task, answer=answer.text)
    request = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 8,
    }
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{url}/chat/completions", json=request) as response,
    ):
        reply = await response.json()
    grade = GRADE.search(reply["choices"][0]["message"]["content"])
    if grade is None:
        return None
    return Rating(int(grade[0]) / 10, cost=reply.get("usage", {}).get("total_tokens", 0))


class Judged(SingleTurn[str]):
    max_tokens = 4  # three digits and the end token

    def task(self, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=3))

    def prompt(self, task: str) -> str:
        return f"{task}="
