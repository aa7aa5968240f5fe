"""TRL trainers on the bus, in TRL's own environment: `python player.py '{"run_dir": ..., "steps": ...}'`.

It writes one line of JSON at its end, and appends a line for each generation and each optimizer step to `record`.
Without an argument it plays one plan after another from its standard input, since importing TRL takes seconds.
"""

import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rolloutmq
from rolloutmq.bus.rundir import load_run
from rolloutmq.trainer.integrations.trl import BusRollouts
from rolloutmq.trainer.policy.model import build_policy, write_identity


class Plan(msgspec.Struct):
    """What to do."""

    run_dir: str
    steps: int
    args: dict[str, Any] = {}
    record: str = os.devnull
    shuffle: bool = False
    """Give the scores of a batch to its rows at random: nothing can be learned from them."""
    evaluate: bool = False
    die_at: int = 0
    """Optimizer step after which the process kills itself; the step is not settled."""
    die_rank: int = -1
    """The only rank that dies; all by default."""
    die_in_save: bool = False
    """Die while the checkpoint of `die_at` is being committed instead."""
    stop_at: int = 0
    """Optimizer step after which the training is asked to end."""
    fails_at: int = 0
    """Optimizer step whose loss raises."""
    hang_s: float = 0.0
    """Time that each optimizer step takes longer."""
    eval_first: bool = False


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes what TRL was given and what it made of it; dies on demand. Runs before the callback of the bus."""

    def __init__(self, plan: Plan, bus: BusRollouts) -> None:
        self.plan = plan
        self.bus = bus
        self.trainer: Any = None
        self.rank = int(os.environ.get("RANK", "0"))

    def write(self, **line: Any) -> None:
        with Path(self.plan.record).open("a") as file:
            file.write(json.dumps({"rank": self.rank, **line}) + "\n")

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = self.bus.rollout(prompts, trainer)
        self.write(generation=found)
        return found

    def on_step_end(self, _args: Any, state: Any, control: Any, **_more: Any) -> Any:
        time.sleep(self.plan.hang_s)
        control.should_training_stop |= state.global_step == self.plan.stop_at
        mine = self.plan.die_rank in {-1, self.rank}
        if state.global_step == self.plan.die_at and not self.plan.die_in_save and mine:
            os.kill(os.getpid(), signal.SIGKILL)
        version = self.bus.running.version
        self.write(
            step=state.global_step,
            before=[version.incarnation, version.step],
            advantages=list(self.trainer._logs["advantages"]),
        )
        return control

    def on_save(self, _args: Any, state: Any, _control: Any, **_more: Any) -> None:
        if state.global_step == self.plan.die_at and self.plan.die_in_save:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any, **_more: Any) -> None:
        self.write(log={name: value for name, value in logs.items() if isinstance(value, float)})


def play(plan: Plan) -> dict[str, Any]:
    run, layout = load_run(Path(plan.run_dir))
    policy = build_policy(run.model, run.run.seed)
    with tempfile.TemporaryDirectory() as scratch:
        write_identity(policy, run.model, Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(scratch)
    args = GRPOConfig(
        **{
            "output_dir": str(layout.root / "trl"),
            "max_steps": plan.steps,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 4,
            "learning_rate": 1e-3,
            "adam_beta2": 0.99,
            "scale_rewards": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "disable_tqdm": True,
            **plan.args,
        }
    )
    with BusRollouts(plan.run_dir, timeout_s=5.0) as bus:
        recorder = Recorder(plan, bus)
        rng = random.Random(0)

        def shuffled(prompts: list[Any], **columns: Any) -> list[float | None]:
            scores = bus.reward(prompts, **columns)
            rng.shuffle(scores)
            return scores

        made = bus.prompts(args)
        trainer = GRPOTrainer(
            policy,
            args=args,
            processing_class=tokenizer,
            train_dataset=made,
            eval_dataset=made if plan.eval_first else None,
            rollout_func=recorder.rollout,
            reward_funcs=shuffled if plan.shuffle else bus.reward,
            callbacks=[recorder, bus.callback],
        )
        recorder.trainer = trainer
        if plan.fails_at:
            _fail(trainer, plan.fails_at)
        if plan.eval_first:
            trainer.evaluate()
        resumed = bus.last_checkpoint(args.output_dir)
        trainer.train(resume_from_checkpoint=resumed)
        greedy = rolloutmq.evaluate(plan.run_dir).all.greedy if plan.evaluate else None
        return {"greedy": greedy, "step": trainer.state.global_step, "resumed": resumed}


def _fail(trainer: Any, step: int) -> None:
    """Let the loss of an optimizer step raise."""
    whole = trainer._compute_loss

    def failing(*args: Any, **options: Any) -> Any:
        if trainer.state.global_step + 1 == step:
            raise RuntimeError("planted")
        return whole(*args, **options)

    trainer._compute_loss = failing


def serve() -> None:
    """Play the plans of standard input, one a line, and answer each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        try:
            told = play(msgspec.json.decode(line, type=Plan))
        except Exception:  # noqa: BLE001 - the test looks at it
            told = {"error": traceback.format_exc()}
        answers.write(json.dumps(told) + "\n")
        answers.flush()
        gc.collect()


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(play(msgspec.json.decode(sys.argv[1], type=Plan))) + "\n")
    else:
        serve()
