"""Tokens per second and memory of a training step: ours against TRL's GRPOTrainer 1.16, on the same canned completions.

A Llama with random weights, width 256, 4 blocks, a vocabulary of 32,000, float32, on one thread. Both train on the same
token ids and rewards with the same loss: DAPO's clip and its mean over tokens, rewards centred by group, no KL, AdamW,
clipped gradient. Both use one forward pass a step, without gradient checkpointing. Theirs is configured as documented
for this case (no vLLM, no reference, completions from a `rollout_func`), and computes log-probabilities in its own
fused way, by default. Tokens are the trained ones.

Differences besides the code: ours pulls the batch from a queue, scores and journals it, and steps in shared memory
under a lock; theirs decodes the completions to text for its reward function. On a CPU theirs also scores prompts and
padding, because its kernel that skips them requires a GPU; and it pads to the longest sequence, where ours packs short
sequences into shared rows. With sequences of one length packing makes no difference.

Memory is the peak resident memory above the level when everything is loaded and the first step begins: on both sides it
includes gradients and optimizer moments, which are equal.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from benchmarks.harness import stage
from benchmarks.harness.row import Row, compare, near

Side = Literal["ours", "theirs"]
Lengths = Literal["equal", "mixed"]

ROOT: Final = Path(__file__).parents[2]
RIVAL: Final = ROOT / ".venv-trl"
RATE_GOAL: Final = 1.0
MEMORY_GOAL: Final = 0.7
ROUNDS: Final = 3
STEPS: Final = 3
"""Steps of a round; the first is not timed, because it allocates permanent buffers."""
ROUND_S: Final = 600.0
SHAPES: Final[dict[Lengths, str]] = {
    "equal": "16 completions of 192 tokens, 32,000 words",
    "mixed": "16 completions of 64 to 320 tokens, 32,000 words",
}


class Figures(NamedTuple):
    """Figures of one round. The norm of the first gradient shows that both sides compute the same step."""

    tokens_per_s: float
    peak_mb: float
    gradient_norm: float


def missing() -> str:
    """Return why the rival cannot be measured; empty if it can."""
    return stage.missing(RIVAL)


def rows() -> Iterator[Row]:
    """Rate and memory of both shapes, from the same rounds."""
    for lengths, shape in SHAPES.items():
        rounds = {side: _Rounds(side, lengths) for side in ("ours", "theirs")}
        yield compare(
            "trained tokens/s of a trainer's step, CPU",
            shape,
            rounds["ours"].rate,
            rounds["theirs"].rate,
            "TRL's GRPOTrainer 1.16",
            RATE_GOAL,
            ROUNDS,
        )
        yield near(
            "peak memory of a trainer's step above what is loaded, MB, CPU",
            shape,
            rounds["ours"].peak,
            rounds["theirs"].peak,
            "TRL's GRPOTrainer 1.16",
            MEMORY_GOAL,
            ROUNDS,
        )


class _Rounds:
    """Rounds of one side: run for the rate, and reused for the memory."""

    def __init__(self, side: Side, lengths: Lengths) -> None:
        self._measure = partial(figures, side, lengths)
        self._peaks: list[float] = []

    def rate(self) -> float:
        found = self._measure()
        self._peaks.append(found.peak_mb)
        return found.tokens_per_s

    def peak(self) -> float:
        return self._peaks.pop(0)


def figures(side: Side, lengths: Lengths, steps: int = STEPS) -> Figures:
    """Run one round in a process of its own."""
    python = RIVAL / "bin" / "python" if side == "theirs" else Path(sys.executable)
    # Not the file's own folder: from there this module's name would shadow theirs.
    paths = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    env = os.environ | paths | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with stage.player("training.trl_player", side, lengths, steps, python=python, env=env) as player:
        said = player.line(ROUND_S)
        while not said.startswith("figures "):
            said = player.line(ROUND_S)  # a library may print
    return Figures(*map(float, said.split()[1:]))
