"""SkyRL's fully asynchronous loop learns to sort three digits on a CPU, beside `rolloutmq up skyrl_sort.toml`.

SkyRL's own policy workers need GPUs. Its simulated trainer has none, so the optimizer step here is a few lines of
torch; prompts, staleness control, buffer, mini-batches and their tensors are SkyRL's.
"""

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # SkyRL 0.3 on Python 3.11

import asyncio  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import rolloutmq  # noqa: E402
from rolloutmq import PolicyVersion  # noqa: E402
from rolloutmq.bus.rundir import load_run  # noqa: E402
from rolloutmq.schemas.config.run import RunConfig  # noqa: E402
from rolloutmq.schemas.files import RunLayout  # noqa: E402
from rolloutmq.trainer.integrations.skyrl.entrypoint import (  # noqa: E402
    BusSimulatedTrainer,
    BusTrainConfig,
    bus_generator,
)
from rolloutmq.trainer.integrations.skyrl.inference import ExternalInference  # noqa: E402
from rolloutmq.trainer.integrations.skyrl.training import Publish  # noqa: E402
from rolloutmq.trainer.policy.model import build_policy, skeleton, write_identity  # noqa: E402
from rolloutmq.trainer.weights.backends import owned  # noqa: E402

GROUPS, SIZE = 16, 16


class Digits:
    """A data set of prompts, as SkyRL reads them."""

    def __init__(self, rows: int) -> None:
        rng = random.Random(0)
        self._prompts = ["".join(rng.choices("0123456789", k=3)) for _ in range(rows)]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._prompts[row]}]
        return {"prompt": messages, "env_class": "sort3", "env_extras": {}, "uid": str(row)}

    def collate_fn(self, rows: list[Any]) -> list[Any]:
        return rows


class Tracker:
    """Prints every 20th step."""

    def log(self, metrics: dict[str, Any], step: int, commit: bool = False) -> None:  # noqa: ARG002
        if "reward/avg_raw_reward" in metrics and step % 20 == 0:
            reward, age = metrics["reward/avg_raw_reward"], metrics["async/staleness_mean"]
            sys.stdout.write(f"step {step}: reward {reward:.3f}, staleness {age:.2f}\n")

    def finish(self) -> None:
        """Do nothing."""


class Learner(BusSimulatedTrainer):
    """SkyRL's simulated trainer with an optimizer step."""

    policy: Any
    optimizer: torch.optim.Optimizer

    async def _run_training(self, training_input: Any) -> dict[str, float]:
        return await asyncio.to_thread(self._learn, training_input)

    def _learn(self, batch: Any) -> dict[str, float]:
        mask = batch["loss_mask"]
        length = mask.shape[1]
        logits = self.policy(input_ids=batch["sequences"], attention_mask=batch["attention_mask"]).logits
        every = logits[:, -length - 1 : -1].float().log_softmax(-1)
        chosen = every.gather(-1, batch["sequences"][:, -length:, None]).squeeze(-1)
        rewards = batch["rewards"].sum(1).view(-1, SIZE)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        ratio = (chosen.detach() - batch["rollout_logprobs"]).exp().clamp(max=2.0)
        entropy = -(every.exp() * every).sum(-1)
        loss = -((ratio * advantages * chosen + 0.02 * entropy) * mask).sum() / mask.sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item()}


def settings(run_dir: Path) -> Any:
    """Return SkyRL's settings."""
    return BusTrainConfig.from_cli_overrides(
        {
            "generator.bus.where": str(run_dir),
            "generator.n_samples_per_prompt": SIZE,
            "generator.batched": False,
            "generator.inference_engine.enable_ray_prometheus_stats": False,
            "trainer.fully_async.enabled": True,
            "trainer.fully_async.simulate_training": True,
            "trainer.fully_async.max_staleness_steps": 2,
            "trainer.fully_async.num_parallel_generation_workers": GROUPS * 2,
            "trainer.train_batch_size": GROUPS,
            "trainer.policy_mini_batch_size": GROUPS,
            "trainer.placement.colocate_all": False,
            "trainer.algorithm.policy_loss_type": "rollout_is",
            "trainer.eval_interval": -1,
            "trainer.ckpt_interval": -1,
            "trainer.resume_mode": "none",
            "trainer.enable_ray_gpu_monitor": False,
            "data.dataloader.num_workers": 0,
            "data.dataloader.persistent_workers": False,
        }
    )


def publisher(policy: Any, run: RunConfig, layout: RunLayout, stack: ExitStack) -> Publish:
    """Return what shares the policy with the engines of the run, until the stack is closed."""
    shares: list[Any] = []

    def publish(version: PolicyVersion) -> None:
        if not shares:
            meant = skeleton(policy.config, policy.dtype)
            share = owned(meant, run, layout, version, lambda: policy.state_dict().items())
            shares.append(stack.enter_context(share))
        with shares[0].writing(version):
            pass

    return publish


async def train(run_dir: Path, steps: int) -> None:
    run, layout = load_run(run_dir)
    policy = build_policy(run.model, run.run.seed)
    write_identity(policy, run.model, layout.model)
    cfg, tokenizer = settings(run_dir), AutoTokenizer.from_pretrained(layout.model)
    trainer = Learner(
        cfg=cfg,
        tracker=Tracker(),
        tokenizer=tokenizer,
        train_dataset=Digits(GROUPS * steps),
        inference_engine_client=ExternalInference(),
        generator=bus_generator(cfg, tokenizer),
    )
    trainer.policy = policy
    trainer.optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.99))
    with ExitStack() as stack:
        trainer.publish = publisher(policy, run, layout, stack)
        await trainer.train()
        scores = await rolloutmq.evaluate_async(run_dir)
        sys.stdout.write(f"greedy score of held-out tasks: {scores.all.greedy:.3f}\n")


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/skyrl-sort")
    asyncio.run(train(where, int(sys.argv[2]) if len(sys.argv) > 2 else 300))
