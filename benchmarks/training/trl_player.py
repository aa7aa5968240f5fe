"""One process of a round of `benchmarks.training.trl`: our trainer or TRL's, each in its own environment.

python benchmarks/training/trl_player.py SIDE LENGTHS STEPS
"""

import ctypes
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from benchmarks.harness import resident
from rolloutmq.schemas.config.losses import DapoConfig
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.step.logprobs import score_tokens

if TYPE_CHECKING:
    from rolloutmq.schemas.statistics.moments import Moments
    from rolloutmq.trainer.broker_client import BrokerClient, StepBatch

PROMPTS: Final = 2
EACH: Final = 8
PROMPT_TOKENS: Final = 32
EQUAL_TOKENS: Final = 192
MIXED_TOKENS: Final = (64, 320)
RATE: Final = 1e-5
MODEL: Final = ModelConfig(
    hidden_size=256,
    layers=4,
    heads=4,
    mlp_size=688,
    vocab_size=32_000,
    max_positions=512,
    initializer_range=0.02,
)
LOSS: Final = DapoConfig(advantage="dr_grpo")


class Canned(NamedTuple):
    """Canned result of one prompt."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]


def canned(lengths: str, number: int) -> Canned:
    """Return the completions of a prompt; the same for the same number."""
    rng = np.random.default_rng([number, len(lengths)])
    counts = [EQUAL_TOKENS] * EACH if lengths == "equal" else rng.integers(*MIXED_TOKENS, EACH, endpoint=True)
    return Canned(
        rng.integers(3, MODEL.vocab_size, PROMPT_TOKENS).tolist(),
        [rng.integers(3, MODEL.vocab_size, count).tolist() for count in counts],
        rng.random(EACH).tolist(),
    )


def trained_tokens(lengths: str, step: int) -> int:
    """Return the trained tokens of a step, from 0."""
    numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
    return sum(len(one) for number in numbers for one in canned(lengths, number).completions)


class Stopwatch:
    """Records the times of steps, and their peak memory."""

    def __init__(self, lengths: str) -> None:
        self._lengths = lengths
        self._loaded = 0
        self._at: list[float] = []
        self._figures: tuple[float, ...] = ()

    def tick(self) -> None:
        """Record the time between two steps, before the first and after the last."""
        if not self._at:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory, so that no step gets it for free
            self._loaded = resident.forget_highest()
        self._at.append(time.perf_counter())

    def stop(self, first_norm: float) -> None:
        """Keep the measurements, and the norm of the first gradient; the first step does not count for the rate."""
        peak = resident.highest_bytes() - self._loaded
        steps = range(1, len(self._at) - 1)
        tokens = sum(trained_tokens(self._lengths, step) for step in steps)
        self._figures = tokens / (self._at[-1] - self._at[1]), peak / 1e6, first_norm

    def tell(self) -> None:
        """Print them after an orderly end: the reader may kill this process."""
        print("figures", *self._figures, flush=True)


def ours(lengths: str, steps: int) -> None:
    """Run the steps with our trainer, from a queue that is always full."""
    from rolloutmq.trainer.loop import train
    from rolloutmq.trainer.process import Stop

    watch = Stopwatch(lengths)
    trainer = TrainerConfig(
        steps=steps,
        batch_sequences=PROMPTS * EACH,
        learning_rate=RATE,
        warmup_steps=0,
        final_lr_fraction=1.0,
        loss=LOSS,
        checkpoint_interval=steps + 1,
    )
    stop = Stop()
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        config = RunConfig(model=MODEL, trainer=trainer)
        queue = _Queue(lengths, steps, watch)
        train(config, RunLayout(Path(directory)), stop, queue.joined)
    watch.tell()


class _Queue:
    """Stand-in for the broker: a batch is always ready."""

    def __init__(self, lengths: str, steps: int, watch: Stopwatch) -> None:
        self._watch = watch
        self._norms: list[float] = []
        # Use another process, so that this one is as cold as theirs.
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            scored = other.submit(_scored, lengths, PROMPTS * steps).result()
        self._batches = [
            [_group(lengths, number, scored[number]) for number in range(first, first + PROMPTS)]
            for first in range(0, PROMPTS * steps, PROMPTS)
        ]

    @contextmanager
    def joined(self, *_about: Any) -> "Iterator[BrokerClient]":
        yield self

    def pull(self, step: int, version: Any) -> "StepBatch":  # noqa: ARG002 - the names are those of `BrokerClient`
        self._watch.tick()
        return _Batch(self._batches[step - 1])

    def settle(self, batch: Any, **_about: Any) -> bool:  # noqa: ARG002
        return False

    def commit(self, version: Any) -> None:
        """Do nothing: the last step is over, and its checkpoint on disk, too late to be timed."""

    def progress(self) -> None:
        """Do nothing."""

    def waited(self, reason: Any, seconds: float) -> None:
        """Count nothing."""

    def publish(self, topic: bytes, message: Any) -> None:  # noqa: ARG002
        """Record the event of a step, which is its last action."""
        self._norms.append(message.extra["grad_norm"])
        if message.step == len(self._batches):
            self._watch.tick()
            self._watch.stop(self._norms[0])


class _Batch(NamedTuple):
    groups: Sequence[Group]
    rejected: Sequence[Any] = ()
    short: bool = False
    rewound: bool = False
    moments: Mapping[str, "Moments"] = {}
    lease: int = 0
    generation: int = 0


def _group(lengths: str, number: int, logprobs: list[Any]) -> Group:
    made = canned(lengths, number)
    rows = [[*made.prompt, *one] for one in made.completions]
    return Group.build(
        f"g{number}",
        tokens=[np.array(row, np.int32) for row in rows],
        mask=[np.arange(len(row)) >= PROMPT_TOKENS for row in rows],
        inference_logprobs=logprobs,
        scores=made.rewards,
    )


def _scored(lengths: str, count: int) -> list[list[Any]]:
    """Return the log-probabilities of the completions of this many prompts."""
    torch.set_num_threads(1)
    policy = build_policy(MODEL, 0)
    made = [canned(lengths, number) for number in range(count)]
    return [[_logprobs(policy, [*one.prompt, *row]) for row in one.completions] for one in made]


@torch.no_grad()
def _logprobs(policy: Any, row: list[int]) -> Any:
    """Return the log-probabilities of an engine with these weights: theirs assumes a ratio of 1 as well."""
    tokens = torch.tensor([row])
    places = torch.arange(1, len(row))
    scored, _ = score_tokens(policy, tokens, torch.zeros_like(places), places)
    return np.concatenate([[0.0], scored.numpy()]).astype(np.float32)


def theirs(lengths: str, steps: int) -> None:
    """Run the steps with TRL's trainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    watch = Stopwatch(lengths)

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_given: Any, **_more: Any) -> None:
            watch.tick()

        def on_step_end(self, _args: Any, state: Any, *_given: Any, **_more: Any) -> None:
            if state.global_step == steps:
                watch.tick()
                watch.stop(state.log_history[0]["grad_norm"])

    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        about = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * EACH,
            num_generations=EACH,
            max_completion_length=max(EQUAL_TOKENS, *MIXED_TOKENS),
            shuffle_dataset=False,
            loss_type="dapo",
            beta=0.0,
            epsilon=LOSS.clip_low,
            epsilon_high=LOSS.clip_high,
            scale_rewards="none",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            report_to="none",
            save_strategy="no",
            logging_first_step=True,
            logging_steps=1000,
            disable_tqdm=True,
        )
        numbers = [str(number) for number in range(PROMPTS * steps)]
        rollout, reward = _rollouts(lengths)
        trainer = GRPOTrainer(
            model=build_policy(MODEL, 0),
            args=about,
            processing_class=_tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": numbers}),
            reward_funcs=reward,
            rollout_func=rollout,
            callbacks=[Ticks()],
        )
        trainer.train()
    watch.tell()


def _rollouts(lengths: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the stand-in for their generation, and its reward function."""
    rewards: list[float] = []

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        made = [canned(lengths, int(prompt)) for prompt in prompts]
        attempts = [position % EACH for position in range(len(prompts))]
        rewards[:] = [one.rewards[n] for one, n in zip(made, attempts, strict=True)]
        completions = [one.completions[n] for one, n in zip(made, attempts, strict=True)]
        return {
            "prompt_ids": [one.prompt for one in made],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(one) for one in completions],
        }

    def reward(completions: list[str], **_about: Any) -> list[float]:
        assert len(completions) == len(rewards)
        return rewards

    return rollout, reward


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(MODEL.vocab_size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", bos_token="w1", eos_token="w2")


def main(side: str, lengths: str, steps: str) -> None:
    """Run one process of a round."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    {"ours": ours, "theirs": theirs}[side](lengths, int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
