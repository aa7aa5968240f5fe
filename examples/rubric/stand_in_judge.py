"""A stand-in for the judge, to try the example offline: it grades by the places of the digits.

python examples/rubric/stand_in_judge.py 8123
"""

import re
import sys

from aiohttp import web

ASKED = re.compile(r"sort the digits (\d+)\. The answer was: (.*)\n")


async def grade(request: web.Request) -> web.Response:
    """Answer a chat completion."""
    content = (await request.json())["messages"][-1]["content"]
    found = ASKED.search(content)
    reply = "I cannot grade this." if found is None else f"Grade: {points(*found.groups())}"
    message = {"role": "assistant", "content": reply}
    usage = {"total_tokens": len(content) // 4}
    return web.json_response({"choices": [{"message": message}], "usage": usage})


def points(task: str, answer: str) -> int:
    """Return 0 to 10 for the digits in their places."""
    right = sum(a == b for a, b in zip(answer, sorted(task), strict=False))
    return 10 * right // max(len(task), len(answer))


def application() -> web.Application:
    """Return the server of the judge."""
    served = web.Application()
    served.router.add_post("/v1/chat/completions", grade)
    return served


if __name__ == "__main__":
    web.run_app(application(), host="127.0.0.1", port=int(sys.argv[1]))
