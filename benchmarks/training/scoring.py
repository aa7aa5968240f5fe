"""Memory and time of a step's log-probabilities and their gradient: in chunks, as in the trainer, and all at once.

All at once is the usual way: the head's logits of all tokens, `log_softmax`, `gather`, and the entropy from it. The
figure is the peak resident memory above the process's baseline, which includes hidden states and head.

    python -m benchmarks.training.scoring WAY TOKENS VOCABULARY HIDDEN    one process of a round; a line with MB and
    seconds
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Final, Literal

from benchmarks.harness import resident, stage
from benchmarks.harness.row import Row, compare, near

Way = Literal["parts", "whole"]

TOKENS: Final = 4096
VOCABULARY: Final = 32_000
HIDDEN: Final = 256
MEMORY_GOAL: Final = 0.4
ROUNDS: Final = 3
LOGITS_BYTES: Final = 64 << 20
RIVAL: Final = "all logits at once"
ROUND_S: Final = 300.0


def rows() -> Iterator[Row]:
    """Memory, then time."""
    shape = f"{TOKENS:,} tokens, {VOCABULARY:,} words, {HIDDEN} wide"
    yield near(
        "peak memory of log-probabilities, entropy and gradient, MB",
        shape,
        partial(peak_mb, "parts"),
        partial(peak_mb, "whole"),
        RIVAL,
        MEMORY_GOAL,
        ROUNDS,
    )
    yield compare(
        "tokens/s of log-probabilities, entropy and gradient",
        shape,
        partial(tokens_per_s, "parts"),
        partial(tokens_per_s, "whole"),
        RIVAL,
        rounds=ROUNDS,
    )


def peak_mb(way: Way, hidden: int = HIDDEN) -> float:
    """Return the memory of one round, in MB."""
    return _measured(way, hidden)[0]


def tokens_per_s(way: Way, hidden: int = HIDDEN) -> float:
    """Return the rate of one round."""
    return TOKENS / _measured(way, hidden)[1]


def _measured(way: Way, hidden: int) -> tuple[float, float]:
    with stage.player("training.scoring", way, TOKENS, VOCABULARY, hidden) as player:
        megabytes, seconds = player.line(ROUND_S).split()
    return float(megabytes), float(seconds)


def main(way: Way, tokens: str, vocabulary: str, hidden: str) -> None:
    """Run one process of a round."""
    import torch
    from torch import nn

    from rolloutmq.trainer.step import logprobs as scoring

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = nn.Linear(int(hidden), int(vocabulary), bias=False)
    states = torch.randn(int(tokens), int(hidden), requires_grad=True)
    asked = torch.randint(int(vocabulary), (int(tokens),))
    head(states[:2]).sum().backward()  # the first product allocates permanent buffers
    before, began = resident.forget_highest(), time.perf_counter()
    if way == "parts":
        logprobs, entropy = scoring.score_hidden(states, head, asked, LOGITS_BYTES)
    else:
        logprobs, entropy = scoring.score_logits(head(states), asked)
    (logprobs.mean() + entropy.mean()).backward()  # type: ignore[no-untyped-call]
    print((resident.highest_bytes() - before) / 1e6, time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
