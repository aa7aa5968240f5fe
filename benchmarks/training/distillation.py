"""Distance of a student to its teacher after 300 steps of `examples/distillation/distillation.toml`, and two controls.

The distance is the reverse KL divergence of the student from the teacher, over the whole vocabulary, in nats per token,
on the student's samples for held-out prompts. The teacher is a policy trained by the quickstart. The student starts
with random weights and learns only from the teacher. The controls are the same run with a weight of zero, and with the
teacher's log-probabilities permuted within each group.

    python -m benchmarks.training.distillation STUDENT TEACHER    the divergence of one directory's model from another's
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.end_to_end import scenario
from benchmarks.harness import scratch
from benchmarks.harness.row import Row
from rolloutmq.launch.settings import load
from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.trainer.losses.distillation import reverse_divergence
from rolloutmq.trainer.policy.model import Policy, build_policy

EXAMPLE: Final = scenario.QUICKSTART.parent / "distillation" / "distillation.toml"
STEPS: Final = 300
TEACHER_STEPS: Final = 500
GOAL: Final = 0.5
"""Maximum part of the distance that may be left."""
SAMPLES: Final = 16
"""Samples of each prompt."""
TOKENS: Final = 4
"""Longest answer: three digits and the end."""
CONTROLS: Final = {
    "the same with weight 0": "trainer.distillation.weight=0.0",
    "the same with the teacher shuffled": "trainer.distillation.shuffle_teacher=true",
}


def rows() -> Iterator[Row]:
    """Return the part of the distance that is left, against each of the controls."""
    with scratch.directory() as directory:
        teacher = teach(directory / "teacher")
        ours = left(directory / "student", teacher)
        for number, (name, assignment) in enumerate(CONTROLS.items()):
            rival = left(directory / f"control-{number}", teacher, assignment)
            yield Row(
                f"divergence from the teacher that is left after {STEPS} steps, part of that before",
                "sort three digits, top 8 and tail, held-out prompts",
                round(ours, 4),
                round(rival, 4),
                name,
                round(ours / rival, 3),
                GOAL,
                ours <= GOAL < rival,
                "ours, at most",
            )


def teach(run_dir: Path) -> Path:
    """Run the quickstart and return the directory of its trained policy."""
    scenario.run(run_dir, [f"trainer.steps={TEACHER_STEPS}"])
    return newest(run_dir)


def left(run_dir: Path, teacher: Path, *assignments: str, steps: int = STEPS) -> float:
    """Run the example and return the part of the divergence left at its end."""
    settings = [f"trainer.steps={steps}", f"teacher.path={teacher}", *assignments]
    scenario.run(run_dir, settings, config=EXAMPLE)
    config = load(EXAMPLE, environ={}, assignments=settings)
    after = newest(run_dir)
    before = gap(build_policy(config.model, config.run.seed), after, teacher)
    return gap(loaded(after), after, teacher) / before


def newest(run_dir: Path) -> Path:
    """Return the directory of the last policy a run has saved."""
    return max(RunLayout(run_dir).checkpoints.glob("step-*"))


def loaded(directory: Path) -> Policy:
    """Read a policy from its directory."""
    return build_policy(ModelConfig(path=str(directory)), seed=0)


@torch.inference_mode()
def gap(student: Policy, tokenizer: Path, teacher: Path) -> float:
    """Return the divergence of a student from a teacher, in nats per token sampled by the student.

    Args:
        student: The policy.
        tokenizer: Directory of its tokenizer.
        teacher: Directory of the teacher.
    """
    words: Any = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    prompts = torch.tensor([words.encode(f"{task}=").ids for task in held_out()])
    tokens, spread = sampled(student, prompts.repeat_interleave(SAMPLES, 0), seed=0)
    judge: Any = loaded(teacher)
    theirs = judge(input_ids=tokens[:, :-1]).logits[:, -TOKENS:].float().log_softmax(-1)
    end = words.token_to_id("<eos>")
    ended = (tokens[:, -TOKENS:] == end).cumsum(1)
    alive = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1) == 0  # the end itself counts
    return reverse_divergence(spread, theirs)[alive].mean().item()


def held_out() -> list[str]:
    """Return the held-out digits of the prompts, as defined by `examples/distillation/distilled_digits.py`."""
    every = (f"{number:03d}" for number in range(1000))
    return [task for task in every if sum(map(int, task)) % 10 == 3]


def sampled(policy: Any, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Continue prompts `(B, P)`; return tokens `(B, P + T)` and the log-probabilities `(B, T, V)` drawn from."""
    random = torch.Generator().manual_seed(seed)
    tokens, spreads = prompts, []
    for _ in range(TOKENS):
        spread = policy(input_ids=tokens).logits[:, -1].float().log_softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(spread.exp(), 1, generator=random)], 1)
        spreads.append(spread)
    return tokens, torch.stack(spreads, 1)


def main(words: Sequence[str]) -> int:
    """Print the divergence between two directories."""
    student, teacher = map(Path, words)
    print(gap(loaded(student), student, teacher))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
