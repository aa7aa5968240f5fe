"""Tokens a second and memory of a trainer's step: ours against TRL's GRPOTrainer 1.16, on the same canned completions.

A Llama of random weights, 256 wide, 4 blocks, 32,000 words, float32, on one thread. Both learn from the same token ids
with the same rewards by the same loss: DAPO's clip and its mean over tokens, rewards centred by group, no KL, AdamW,
clipped gradient. One forward pass a step on both sides, without gradient checkpointing. Theirs is configured as its
documentation says for such a case (no vLLM, no reference, the completions from a `rollout_func`), and computes log-
probabilities in its own fused way, as it does by default. Tokens are those that are trained.

What differs, besides the code: ours takes the batch from a queue, judges and journals it, and steps in shared memory
under a lock; theirs decodes the completions to text for its reward function. On a CPU theirs scores prompts and padding
too, because its kernel that leaves them out is for GPUs; and it pads to the longest, where ours lets short sequences
share rows. With sequences of one length the latter makes no difference.

Memory is the most that is resident above what there is when everything is loaded and the first step begins: gradients
and moments of the optimizer, which are the same, are in it on both sides.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from benchmarks import stage
from benchmarks.row import Row, compare, near

Side = Literal["ours", "theirs"]
Lengths = Literal["equal", "mixed"]

ROOT: Final = Path(__file__).parent.parent
RIVAL: Final = ROOT / ".venv-trl"
RATE_GOAL: Final = 1.0
MEMORY_GOAL: Final = 0.7
ROUNDS: Final = 3
STEPS: Final = 3
"""Of a round; the first is not timed, because it allocates what stays."""
ROUND_S: Final = 600.0
SHAPES: Final[dict[Lengths, str]] = {
    "equal": "16 completions of 192 tokens, 32,000 words",
    "mixed": "16 completions of 64 to 320 tokens, 32,000 words",
}


class Figures(NamedTuple):
    """Of one round. The norm of the first gradient shows that both sides learn the same."""

    tokens_per_s: float
    peak_mb: float
    gradient_norm: float


def missing() -> str:
    """Why the rival cannot be measured; empty if it can."""
    return stage.missing(RIVAL)


def rows() -> Iterator[Row]:
    """Rate and memory of both shapes; what a round measured counts for both."""
    for lengths, shape in SHAPES.items():
        told = {side: _Rounds(side, lengths) for side in ("ours", "theirs")}
        yield compare(
            "trained tokens/s of a trainer's step, CPU",
            shape,
            told["ours"].rate,
            told["theirs"].rate,
            "TRL's GRPOTrainer 1.16",
            RATE_GOAL,
            ROUNDS,
        )
        yield near(
            "peak memory of a trainer's step above what is loaded, MB, CPU",
            shape,
            told["ours"].peak,
            told["theirs"].peak,
            "TRL's GRPOTrainer 1.16",
            MEMORY_GOAL,
            ROUNDS,
        )


class _Rounds:
    """Rounds of one side: measured when the rate is asked for, and told again when the memory is."""

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
    # Not the folder of the file: in it, this module is called as theirs is.
    paths = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    env = os.environ | paths | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with stage.player("trl_player", side, lengths, steps, python=python, env=env) as player:
        said = player.line(ROUND_S)
        while not said.startswith("figures "):
            said = player.line(ROUND_S)  # a library that it uses may print
    return Figures(*map(float, said.split()[1:]))
