"""A request to a real vLLM that is under way for seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.services.inference.vllm.support.lent import ASKED_S, Engine, long_prompt

GONE_S = 10.0
ANSWERED_S = 15.0
"""Within so long each request is answered, whoever is stopped: the bounds are 5 s and the stall limit."""


def until(condition: Callable[[], bool], limit_s: float = GONE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@contextmanager
def under_way(engine: Engine) -> Iterator[Callable[[], int]]:
    """Have a request under way that takes seconds; yields what waits for its status."""
    found: list[int] = []
    body: dict[str, Any] = {"prompt": long_prompt(9, 60), "max_tokens": 440, "n": 32}
    asking = threading.Thread(target=lambda: found.append(engine.status(**body)), daemon=True)
    asking.start()

    def status() -> int:
        asking.join(ANSWERED_S)
        assert found, "it hangs"
        return found[0]

    try:
        until(lambda: engine.running() > 0)
        assert not found, "it is too short for this test"
        yield status
    finally:
        asking.join(ASKED_S)
