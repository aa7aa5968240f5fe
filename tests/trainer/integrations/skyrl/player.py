"""Trainers of SkyRL on the bus, in SkyRL's environment. Its last argument is the plan, a JSON object.

Its optimizer step changes one weight of a small module, which is published. It writes a line for each step, with all
that SkyRL would train on, and one for each record of its tracker.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.integrations.skyrl import entrypoint
from rolloutmq.trainer.integrations.skyrl.entrypoint import (
    BusAsyncTrainer,
    BusExp,
    BusSimulatedTrainer,
    BusSyncTrainer,
    BusTrainConfig,
)
from rolloutmq.trainer.integrations.skyrl.training import Publish
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


class Weight:
    """The policy: one number, which a step raises by `RISE`."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.value = 0.0
        self._dies_at = plan.get("dies_at", 0)
        self._fails_at = plan.get("fails_at", 0)

    def step(self, number: int) -> None:
        """Take optimizer step `number`; it may fail, or the process be killed right after it."""
        if number == self._fails_at:
            raise RuntimeError("planted")
        self.value += RISE
        if number == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Dispatch:
    """As much of SkyRL's dispatch as its trainers need around a step: checkpoints of the weight.

    As that of SkyRL 0.4 it may write a checkpoint later, until `finalize_pending_saves`.
    """

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._pending: list[tuple[Path, str]] = []

    def get_lcm_dp_size(self) -> int:
        return 1

    def save_checkpoint(self, model: str, folder: str, tokenizer: Any = None) -> None:  # noqa: ARG002
        self._pending.append((Path(folder) / "weight.json", json.dumps(self._weight.value)))

    def finalize_pending_saves(self, model: str) -> None:
        assert model == "policy"
        for path, text in self._pending:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._pending.clear()

    def load_checkpoint(self, model: str, folder: str, **_options: Any) -> None:  # noqa: ARG002
        self._weight.value = json.loads((Path(folder) / "weight.json").read_text())


class Recording:
    """Writes what a step would train on."""

    record: Any
    weight: Weight
    global_step: int

    def _cleanup_old_checkpoints(self) -> None:
        """Keep all: SkyRL would start a Ray cluster for it."""

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
        found = super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]
        self.record("step", {"step": self.global_step, "uids": uids, **rows})
        return found


class Simulated(Recording, BusSimulatedTrainer):
    """SkyRL's simulated trainer."""

    async def _run_training(self, training_input: Any) -> Any:
        self.weight.step(self.global_step)
        return await super()._run_training(training_input)


class Asynchronous(Recording, BusAsyncTrainer):
    """SkyRL's fully asynchronous trainer, with its checkpoints and evaluations."""

    async def _run_training(self, training_input: Any) -> Any:  # noqa: ARG002
        self.weight.step(self.global_step)
        return {}


class Synchronous(Recording, BusSyncTrainer):
    """SkyRL's synchronous trainer."""

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        training_input["values"] = None  # there is no critic
        return training_input

    def train_critic_and_policy(self, data: Any) -> Any:  # noqa: ARG002
        self.weight.step(self.global_step)
        return {}


KINDS: dict[type, type] = {
    BusSimulatedTrainer: Simulated,
    BusAsyncTrainer: Asynchronous,
    BusSyncTrainer: Synchronous,
}
"""What the test makes of the trainer that the settings name."""


class Experiment(BusExp):
    """The entry point's experiment without a model and files."""

    def __init__(self, cfg: Any, publish: Publish) -> None:
        self.cfg = cfg
        self._publish = publish

    def get_publish(self) -> Publish:
        return self._publish


def config(plan: dict[str, Any], directory: Path) -> Any:
    batch = plan["batch"]
    given: dict[str, Any] = {
        "trainer.fully_async.enabled": plan["kind"] != "sync",
        "trainer.fully_async.simulate_training": plan["kind"] == "sim",
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
        "trainer.dump_eval_results": False,
        "trainer.eval_batch_size": 4,
        "trainer.export_path": str(directory / "exports"),
        "trainer.enable_ray_gpu_monitor": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.batched": False,
        "generator.n_samples_per_prompt": plan["size"],
        "generator.bus.where": plan["run_dir"],
        "generator.bus.environments.played": "mine",
        "generator.bus.deadline_s": plan.get("deadline_s", 120.0),
        "data.dataloader.num_workers": 0,
        "data.dataloader.persistent_workers": False,
        **plan.get("settings", {}),
    }
    return BusTrainConfig.from_cli_overrides(given)


def play(plan: dict[str, Any]) -> None:
    directory = Path(plan["record"]).parent
    with Path(plan["record"]).open("a") as file:

        def record(kind: str, line: dict[str, Any]) -> None:
            file.write(json.dumps({kind: line}) + "\n")
            file.flush()

        settings, tokenizer, weight = config(plan, directory), Tokenizer(), Weight(plan)
        module = nn.Linear(1, 1, bias=False)
        shares: list[DiskShare] = []

        def publish(version: PolicyVersion) -> None:
            with torch.no_grad():
                if not shares:
                    module.weight.fill_(weight.value)
                    shares.append(DiskShare.create(module, Path(plan["weights"]), version=version))
                    return
                with shares[0].writing(version):
                    module.weight.fill_(weight.value)

        experiment = Experiment(settings, publish)
        client = experiment.get_inference_client()
        chosen = entrypoint.trainer_class(settings)
        entrypoint.trainer_class = lambda _cfg: KINDS[chosen]  # type: ignore[assignment]
        trainer = experiment.get_trainer(
            cfg=settings,
            tracker=Tracker(record),
            tokenizer=tokenizer,
            train_dataset=Prompts(plan["rows"]),
            eval_dataset=Prompts(plan["evaluated"]) if "evaluated" in plan else None,
            inference_engine_client=client,
            generator=experiment.get_generator(settings, tokenizer, client),
            colocate_pg=None,
        )
        trainer.record, trainer.weight = record, weight
        if plan["kind"] != "sim":
            trainer.dispatch = Dispatch(weight)
        asyncio.run(trainer.train())
        shares[0].close(unlink=True)
        record("end", {"step": trainer.bus_version.step, "incarnation": trainer.bus_version.incarnation})


if __name__ == "__main__":
    play(json.loads(sys.argv[-1]))
