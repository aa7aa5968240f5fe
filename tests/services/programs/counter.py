"""A program of somebody else's: an environment that knows Atropos' HTTP interface, and nothing of ours.

`python counter.py URL RECORD SECONDS [VOCABULARY]`: every group has a number of its own, and takes so many seconds.
What was posted and answered 200 is written down. With a VOCABULARY the tokens are those of a policy of that size.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

GROUP = 2
ENOUGH = 3
"""Batches in the queue at which it starts nothing more."""


def ask(url: str, path: str, body: Any = None, method: str = "POST") -> Any:
    """Send a request until it is answered 200."""
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(
            url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)


def made(number: int, env_id: int, vocabulary: int) -> dict[str, Any]:
    """Return the group of a number."""
    row = [number % vocabulary or 1, 1] if vocabulary else [number, 1]
    return {
        "tokens": [row] * GROUP,
        "masks": [[-100, 1]] * GROUP,
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, -1.0]] * GROUP,
        "env_id": env_id,
    }


def main(url: str, record: str, seconds: str, vocabulary: str = "0") -> None:
    """Register, and post until ended."""
    asked = {"max_token_length": 8, "desired_name": "counter", "weight": 1.0, "group_size": GROUP}
    while (registered := ask(url, "/register-env", asked))["status"] != "success":
        time.sleep(0.1)
    env_id, batch = registered["env_id"], ask(url, "/info", method="GET")["batch_size"]
    number = os.getpid() * 100_000
    with open(record, "a", buffering=1) as out:  # noqa: PTH123 - as plain as can be
        while True:
            queued = ask(url, "/status-env", {"env_id": env_id}, "GET")["queue_size"]
            if queued * GROUP >= ENOUGH * batch:
                time.sleep(0.05)
                continue
            number += 1
            time.sleep(float(seconds))
            ask(url, "/scored_data", made(number, env_id, int(vocabulary)))
            out.write(f"{number}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
