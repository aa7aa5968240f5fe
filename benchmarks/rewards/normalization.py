"""Two environments whose rewards differ by 100, learned by one policy with normalized scores and with raw ones.

One environment asks for digits in ascending order and pays up to 1, the other in descending order and pays up to 100.
The trainer is the shipped one, with its own loss, optimizer, shared weights and log. Its broker is in the same process:
it samples from the shared weights and brings the moments of all groups so far, as a broker's lanes hold them. The
share of right tokens is compared on one fixed set of prompts, sampled at temperature 1.

Adam does not feel the scale of a gradient. A reward of 100 acts by its weight beside the other environment of the same
step, until the groups of the learned environment are equal and filtered.

    python -m benchmarks.rewards.normalization [STEPS]    the score of each environment in each arm, for each seed
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import scratch
from benchmarks.harness.row import Row
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import Message, PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected
from rolloutmq.schemas.wire.requests import TrainerPause
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.policy.model import Policy, build_policy
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare

STEPS: Final = 500
SEEDS: Final = (0, 1, 2, 3, 4)
LOSSES: Final = ("dr_grpo", "rloo", "grpo")
DIGITS: Final = 2
"""Digits of a prompt."""
LEARNING_RATE: Final = 1e-3
ENTROPY: Final = 0.08
SIZE: Final = 16
"""Sequences of a group."""
PROMPTS: Final = 8
"""Groups of each environment in a step."""
TESTED: Final = 500
"""Held-out prompts of each environment."""
LEARNED: Final = 0.9
"""Share of right tokens at which an environment counts as learned."""
SAME: Final = 0.95
"""Least ratio of two scores that count as the same."""

BEGIN, END, FIRST_DIGIT, EQUALS, SPACE = 1, 2, 3, 13, 14
HELD_OUT_SEED: Final = 1_000_003


@dataclass(frozen=True)
class Environment:
    """A task on three digits.

    Attributes:
        mark: Token that names the task in the prompt.
        pays: Reward of an answer that is right everywhere.
    """

    name: str
    mark: int
    pays: float

    def answers(self, digits: Tensor) -> Tensor:
        """Return the right answers `(B, DIGITS + 1)` to digits `(B, DIGITS)`."""
        right = digits.sort(1, descending=self.name == "descend").values
        return torch.cat([right + FIRST_DIGIT, torch.full((len(digits), 1), END)], 1)

    def prompts(self, digits: Tensor) -> Tensor:
        """Return the prompts `(B, DIGITS + 3)`."""
        begin, mark, equals = (torch.full((len(digits), 1), each) for each in (BEGIN, self.mark, EQUALS))
        return torch.cat([begin, mark, digits + FIRST_DIGIT, equals], 1)


ENVIRONMENTS: Final = (Environment("ascend", EQUALS, 1.0), Environment("descend", SPACE, 100.0))
ASKED: Final = DIGITS + 3
"""Tokens of a prompt."""


@dataclass(frozen=True)
class Answers:
    """Prompts with sampled answers and their log-probabilities `(B, T)`, lengths and share of right tokens `(B,)`."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    right: Tensor


@torch.inference_mode()
def answered(policy: Policy, digits: Tensor, chance: torch.Generator) -> Answers:
    """Sample an answer of each environment to each row of digits `(B, DIGITS)`; one environment after the other."""
    tokens = torch.cat([env.prompts(digits) for env in ENVIRONMENTS])
    answers = torch.cat([env.answers(digits) for env in ENVIRONMENTS])
    logprobs = torch.zeros(tokens.shape)
    for _ in range(DIGITS + 1):
        spread = policy(input_ids=tokens, use_cache=False).logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(spread.exp(), 1, generator=chance)
        tokens, logprobs = torch.cat([tokens, drawn], 1), torch.cat([logprobs, spread.gather(-1, drawn)], 1)
    ended = (tokens[:, ASKED:] == END).cumsum(1)
    kept = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1) == 0
    right = ((tokens[:, ASKED:] == answers) & kept).double().mean(1)
    return Answers(tokens, logprobs, ASKED + kept.sum(1), right)


@dataclass(eq=False)
class MixedBatch:
    """A step of the mixture, with the moments as of its lease."""

    groups: list[Group]
    moments: dict[str, Moments]
    rejected: tuple[Rejected, ...] = ()
    short: bool = False
    rewound: bool = False
    lease: int = 0
    generation: int = 0


@dataclass
class MixtureBroker:
    """A broker in the trainer's process; it samples each step from the weights of the step before."""

    config: RunConfig
    layout: RunLayout
    chance: torch.Generator
    policy: Policy
    share: WeightShare | None = None
    moments: dict[str, Moments] = field(default_factory=dict)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach to the shared weights, as an inference server does."""
        tokenizer = directory_fingerprint(self.layout.model)
        with closing(WeightShare.attach(self.policy, self.layout.weights, tokenizer=tokenizer)) as self.share:
            yield

    def pull(self, step: int, version: PolicyVersion) -> MixedBatch:
        """Roll out both environments."""
        assert self.share is not None
        with self.share.reading():
            groups = list(roll_out(self.policy, version, self.chance, str(step)))
        for group in groups:
            known = self.moments.get(group.env, Moments())
            self.moments[group.env] = known.after(group.rewards(), group.sequences)
        return MixedBatch(groups, dict(self.moments))

    def settle(self, batch: Any, **outcome: Any) -> bool:
        """Forget the batch."""
        del batch, outcome
        return False

    def commit(self, version: PolicyVersion) -> None:
        """Forget the checkpoint."""

    def progress(self) -> None:
        """Note nothing: no lease runs out."""

    def waited(self, reason: TrainerPause, seconds: float) -> None:
        """Count nothing: there is no evaluation."""

    def publish(self, topic: bytes, message: Message) -> None:
        """Publish nothing."""


def roll_out(policy: Policy, version: PolicyVersion, chance: torch.Generator, name: str) -> Iterator[Group]:
    """Sample the groups of both environments for a step, of the same digits."""
    digits = torch.randint(0, 10, (PROMPTS, DIGITS), generator=chance)
    found = answered(policy, digits.repeat_interleave(SIZE, 0), chance)
    lengths = found.lengths.tolist()
    for number in range(len(ENVIRONMENTS) * PROMPTS):
        env, rows = ENVIRONMENTS[number // PROMPTS], range(number * SIZE, (number + 1) * SIZE)
        group = Group.build(
            f"{env.name}-{name}-{number}",
            tokens=[found.tokens[row, : lengths[row]].numpy().astype(np.int32) for row in rows],
            mask=[np.arange(lengths[row]) >= ASKED for row in rows],
            inference_logprobs=[found.logprobs[row, : lengths[row]].numpy() for row in rows],
            scores=(env.pays * found.right[rows.start : rows.stop]).numpy(),
            oldest=version,
        )
        yield replace(group, env=env.name)


def settings(loss: str, normalize: str, seed: int, steps: int) -> RunConfig:
    """Return the configuration of an arm."""
    constant = {"length": DIGITS + 1} if loss == "dr_grpo" else {}
    return RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "trainer": {
                "steps": steps,
                "batch_sequences": len(ENVIRONMENTS) * PROMPTS * SIZE,
                "checkpoint_interval": steps,
                "learning_rate": LEARNING_RATE,
                "loss": {"name": loss, "entropy": ENTROPY, **constant},
                "rewards": {"normalize": normalize},
            },
        }
    )


def learned(run_dir: Path, loss: str, normalize: str, seed: int, steps: int = STEPS) -> dict[str, float]:
    """Train one arm and return the share of right tokens of each environment on the held-out prompts."""
    config, layout = settings(loss, normalize, seed, steps), RunLayout(run_dir)
    run_dir.mkdir(mode=0o700)
    write_json(layout.config, config)
    chance = torch.Generator().manual_seed(seed)
    broker = MixtureBroker(config, layout, chance, build_policy(config.model, seed))
    found: dict[str, float] = {}

    @contextmanager
    def join(*_about: Any) -> Iterator[MixtureBroker]:
        with broker.attached():
            yield broker
            found.update(tested(broker.policy))

    train(config, layout, Stop(), join)
    return found


def tested(policy: Policy) -> dict[str, float]:
    """Return the mean share of right tokens of each environment, on the same prompts for every arm."""
    chance = torch.Generator().manual_seed(HELD_OUT_SEED)
    digits = torch.randint(0, 10, (TESTED, DIGITS), generator=chance)
    right = answered(policy, digits, chance).right.view(len(ENVIRONMENTS), TESTED)
    return {env.name: float(mean) for env, mean in zip(ENVIRONMENTS, right.mean(1), strict=True)}


def arms(
    losses: Sequence[str] = LOSSES, seeds: Sequence[int] = SEEDS, steps: int = STEPS
) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """Train every arm; yield loss, normalization, seed and the scores of the environments."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with scratch.directory() as directory:
        for loss in losses:
            for seed in seeds:
                for normalize in ("zscore", "none"):
                    run_dir = directory / f"{loss}-{normalize}-{seed}"
                    yield loss, normalize, seed, learned(run_dir, loss, normalize, seed, steps)


def rows(losses: Sequence[str] = LOSSES, seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Iterator[Row]:
    """Return a row for each loss: the worse environment with normalized scores, beside the control with raw ones."""
    found: dict[tuple[str, str], list[float]] = {}
    for loss, normalize, _, scores in arms(losses, seeds, steps):
        found.setdefault((loss, normalize), []).append(min(scores.values()))
    for loss in losses:
        ours, rival = median(found[loss, "zscore"]), median(found[loss, "none"])
        ratios = [one / other for one, other in zip(found[loss, "zscore"], found[loss, "none"], strict=True)]
        same = loss == "grpo"
        yield Row(
            f"right tokens in the worse of two environments after {steps} steps, {loss}",
            f"sort two digits up and down, rewards 1 and 100, {len(seeds)} seeds",
            round(ours, 4),
            round(rival, 4),
            "raw scores",
            round(median(ratios), 3),
            SAME if same else 1 / LEARNED,
            min(ours, rival) >= LEARNED and median(ratios) >= SAME if same else ours >= LEARNED > rival,
        )


def main(words: Sequence[str]) -> int:
    """Print the scores of every arm."""
    for loss, normalize, seed, scores in arms(steps=int(words[0]) if words else STEPS):
        shown = "  ".join(f"{name} {score:.3f}" for name, score in scores.items())
        print(f"{loss:8} {normalize:7} seed {seed}  {shown}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
