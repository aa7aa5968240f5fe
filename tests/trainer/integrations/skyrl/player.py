"""SkyRL's own simulated trainer on the bus, in SkyRL's environment. Its last argument is the plan, a JSON object.

Its optimizer step changes one weight of a small module, which is published. It writes a line for each step, with all
that SkyRL would train on, and one for each record of its tracker.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from torch import nn

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.integrations.skyrl.generator import BusGenerator
from rolloutmq.trainer.integrations.skyrl.inference import ExternalInference
from rolloutmq.trainer.integrations.skyrl.training import BusAsyncTraining
from rolloutmq.trainer.weights.disk import DiskShare

RISE = 0.125
"""What a step adds to the weight: exact in every float type."""


class Tokenizer:
    """As much of a tokenizer as SkyRL needs of one whose prompts are lists of ids."""

    pad_token_id = 0
    eos_token_id = 1

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **_options: Any) -> list[int]:
        return [int(token) for token in messages[0]["content"].split()]


class Prompts:
    """A data set whose row `n` is the prompt `n + 10`."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": str(row + 10)}]
        return {"prompt": messages, "env_class": "played", "env_extras": {"row": row}, "uid": str(row)}

    def collate_fn(self, rows: list[Any]) -> list[Any]:
        return rows


class Tracker:
    """Writes what SkyRL tracks."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def log(self, metrics: dict[str, Any], step: int, commit: bool = False) -> None:  # noqa: ARG002
        self._record("metrics", {"step": step, **metrics})

    def finish(self) -> None:
        """Do nothing."""


class Played(BusAsyncTraining, FullyAsyncTrainerSim):  # type: ignore[misc]
    """SkyRL's simulated trainer with a step that changes a weight."""

    record: Any
    weight = 0.0

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        names = (
            "prompt_token_ids",
            "response_ids",
            "loss_masks",
            "rollout_logprobs",
            "stop_reasons",
            "rewards",
        )
        rows = {name: generator_output[name] for name in names}
        found = super().convert_to_training_input(generator_output, uids)
        self.record(
            "step", {"step": self.global_step, "uids": uids, "shape": list(found["sequences"].shape), **rows}
        )
        return found

    async def _run_training(self, training_input: Any) -> Any:
        self.weight += RISE
        return await super()._run_training(training_input)


def config(plan: dict[str, Any], directory: Path) -> SkyRLTrainConfig:
    batch = plan["batch"]
    given: dict[str, Any] = {
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.simulate_training": True,
        "trainer.fully_async.simulate_training_step_seconds": 0,
        "trainer.fully_async.max_staleness_steps": 2,
        "trainer.fully_async.num_parallel_generation_workers": batch * 2,
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": batch,
        "trainer.placement.colocate_all": False,
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.epochs": plan.get("epochs", 1),
        "trainer.ckpt_path": str(directory / "checkpoints"),
        "trainer.export_path": str(directory / "exports"),
        "trainer.enable_ray_gpu_monitor": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.batched": False,
        "generator.n_samples_per_prompt": plan["size"],
        "data.dataloader.num_workers": 0,
        "data.dataloader.persistent_workers": False,
        **plan.get("settings", {}),
    }
    return SkyRLTrainConfig.from_cli_overrides({name: _text(value) for name, value in given.items()})


def _text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def play(plan: dict[str, Any]) -> None:
    directory = Path(plan["record"]).parent
    with Path(plan["record"]).open("a") as file:

        def record(kind: str, line: dict[str, Any]) -> None:
            file.write(json.dumps({kind: line}) + "\n")
            file.flush()

        settings, tokenizer = config(plan, directory), Tokenizer()
        generator = BusGenerator(
            plan["run_dir"],
            batch_sequences=plan["batch"] * plan["size"],
            tokenizer=tokenizer,
            environments={"played": "mine"},
            deadline_s=plan.get("deadline_s", 120.0),
        )
        trainer = Played(
            cfg=settings,
            tracker=Tracker(record),
            tokenizer=tokenizer,
            train_dataset=Prompts(plan["rows"]),
            inference_engine_client=ExternalInference(),
            generator=generator,
        )
        trainer.record = record
        module = nn.Linear(1, 1, bias=False)
        address = Path(plan["weights"])
        shares: list[DiskShare] = []

        def publish(version: PolicyVersion) -> None:
            if not shares:
                nn.init.zeros_(module.weight)
                shares.append(DiskShare.create(module, address, version=version))
            with shares[0].writing(version), torch.no_grad():
                module.weight.fill_(trainer.weight)

        trainer.publish = publish
        asyncio.run(trainer.train())
        shares[0].close(unlink=True)
        record("end", {"step": trainer.bus_version.step, "incarnation": trainer.bus_version.incarnation})


if __name__ == "__main__":
    play(json.loads(sys.argv[-1]))
