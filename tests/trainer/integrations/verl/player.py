"""verl's own trainers on the bus and on a real TransferQueue, in verl's environment. Its last argument is the plan.

verl's loop, data loader, replay buffer, advantages, metrics and checkpoints are real, and so is TransferQueue with its
Ray actors. verl's GPU workers are not there: `Workers` reads what the optimizer step would learn from, and writes it
down.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.import_utils import load_class_from_fqn

ADAPTER = "rolloutmq.trainer.integrations.verl"
FIELDS = (
    "prompts",
    "responses",
    "response_mask",
    "rollout_log_probs",
    "rm_scores",
    "old_log_probs",
    "advantages",
)


SEPARATE = {
    "trainer.v1.separate_async.parameter_sync_step": 2,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
    "actor_rollout_ref.hybrid_engine": False,
}
"""What verl's separate trainer asks of its settings: two mini-batches in a step, and engines of their own."""


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set as verl's own is read: row `n` is about the number `n`."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {
            "raw_prompt": [{"role": "user", "content": str(row)}],
            "data_source": "played",
            "reward_model": {"ground_truth": str(row)},
            "extra_info": {"index": row},
            "index": row,
            "tools_kwargs": {},
            "interaction_kwargs": {},
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }


class Nothing:
    """Stands for what has no part here: every method does nothing, but for those that are given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None


class Workers(Nothing):
    """As much of verl's worker group as a step needs."""

    def __init__(self, play: "Play") -> None:
        super().__init__(_play=play, _dispatch_info={"actor": [0]})

    def update_actor(self, batch: Any) -> dict[str, Any]:
        """Write down what the optimizer step would learn from."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        rows = []
        for place, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding"):
                continue
            row = {name: data[name][place].tolist() for name in FIELDS}
            row |= {"key": key, "uid": data["uid"][place], "row": data["index"][place], "tag": tag}
            row["data"] = data["raw_prompt"][place][0]["content"]
            rows.append(row)
        self._play.step(rows)
        return {"metrics": {"mfu": 0.0}}

    def save_checkpoint(self, folder: str, *_args: Any, **_kwargs: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)


class Tokenizer:
    """As much of a tokenizer as verl's loop needs."""

    eos_token_id = 1
    pad_token_id = 0

    def decode(self, tokens: Any, **_options: Any) -> str:
        return " ".join(map(str, tokens.tolist()))


class Play:
    """One life of a trainer, and its record."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self._file = Path(plan["record"]).open("a")  # noqa: SIM115 - open until the process ends
        self.trainer: Any = None

    def record(self, kind: str, line: Any) -> None:
        self._file.write(json.dumps({kind: line}) + "\n")
        self._file.flush()

    def step(self, rows: list[dict[str, Any]]) -> None:
        """Take an optimizer step; it may fail, or the process be killed right after it."""
        step = self.trainer.global_steps
        self.record("step", {"step": step, "rows": rows})
        if step == self.plan.get("fails_at"):
            raise RuntimeError("planted")
        if step == self.plan.get("dies_at"):
            os.kill(os.getpid(), signal.SIGKILL)


def settings(plan: dict[str, Any], directory: Path) -> Any:
    mode, batch = plan.get("mode", "sync"), plan["batch"]
    given: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_batch_size": batch,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.actor.ppo_mini_batch_size": batch,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.rollout.n": plan["size"],
        "actor_rollout_ref.rollout.val_kwargs.n": 2,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": f"{ADAPTER}.manager.BusAgentLoopManager",
        "trainer.v1.trainer_mode": mode,
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{ADAPTER}.sampling",
        "trainer.v1.sampler.custom_sampler.name": "BusReplayBuffer"
        if mode == "sync"
        else "BusReplayBufferAsync",
        "trainer.checkpoint_callback_class": f"{ADAPTER}.sampling.BusCheckpoint",
        "trainer.default_local_dir": str(directory / "checkpoints"),
        "trainer.logger": ["console"],
        "trainer.val_before_train": False,
        "trainer.save_freq": plan.get("save_freq", -1),
        "trainer.test_freq": plan.get("test_freq", -1),
        "trainer.total_epochs": plan.get("epochs", 1),
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "+trainer.v1.sampler.sampler_kwargs.poll_interval": 0.05,
        "+bus.where": plan["run_dir"],
        "+bus.environments.played": "mine",
        "+bus.deadline_s": plan.get("deadline_s", 120.0),
        **(SEPARATE if mode == "separate_async" else {}),
        **plan.get("settings", {}),
    }
    if mode == "separate_async":
        given["actor_rollout_ref.actor.ppo_mini_batch_size"] = batch // 2
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={_text(value)}" for name, value in given.items()])


def _text(value: Any) -> Any:
    return "null" if value is None else json.dumps(value) if isinstance(value, list) else str(value)


def trainer_class(mode: str) -> type[Any]:
    """Return verl's trainer of a mode, without its GPU workers."""

    class Played(get_trainer_cls(mode)):  # type: ignore[misc]
        play: Play

        def _setup(self) -> None:
            plan, data = self.play.plan, self.config.data
            self.tokenizer, self.processor = Tokenizer(), None
            self.train_dataset = Rows(plan["rows"])
            with open_dict(self.config):
                chunk = data.train_batch_size if self.trainer_mode == "sync" else 1
                data.gen_batch_size = plan.get("gen_batch_size", chunk)
            self.train_dataloader = StatefulDataLoader(
                self.train_dataset, batch_size=data.gen_batch_size, collate_fn=collate_fn
            )
            self.train_dataloader_it = None
            self.val_dataloader = StatefulDataLoader(
                Rows(plan.get("validated", 0)), batch_size=3, collate_fn=collate_fn
            )
            self.steps_per_epoch = plan["rows"] // data.train_batch_size
            self.total_training_steps = plan.get(
                "steps", self.steps_per_epoch * self.config.trainer.total_epochs
            )
            self._init_dump_executor()
            self.use_teacher_policy, self.ref_in_actor = False, False
            self.actor_rollout_wg = Workers(self.play)
            self.checkpoint_manager = self.standalone_checkpoint_manager = Nothing()
            self.current_mode = HybridEngineMode.TRAINER
            self.reward_loop_manager = Nothing(reward_loop_worker_handles=[])
            self.resource_pool_manager = Nothing(get_n_gpus=lambda: 1)
            self._load_checkpoint()

        def get_llm_client(self) -> None:
            return None

    return Played


class Tracker:
    """Writes what verl tracks."""

    def __init__(self, play: Play) -> None:
        self._play = play

    def __call__(self, *_args: Any, **_kwargs: Any) -> "Tracker":
        return self

    def log(self, data: dict[str, Any], step: int, **_options: Any) -> None:
        metrics = {name: float(value) for name, value in data.items() if isinstance(value, int | float)}
        self._play.record("metrics", {"step": step, **metrics})


def play(plan: dict[str, Any]) -> None:
    directory = Path(plan["record"]).parent
    player, config = Play(plan), settings(plan, directory)
    from verl.trainer.ppo.v1 import trainer_base

    trainer_base.Tracking = Tracker(player)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=plan["ray"])
    with open_dict(config):
        config.transfer_queue.enable = True
        config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    OmegaConf.resolve(config)
    tq.init(config.transfer_queue)
    try:
        made = trainer_class(config.trainer.v1.trainer_mode)
        made.play = player
        trainer = player.trainer = made(config=config)
        trainer.init()
        manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class).create(
            config=config, llm_client=None, teacher_client=None, reward_loop_worker_handles=[]
        )
        trainer.fit(manager)
        left = {name: len(keys) for name, keys in (tq.kv_list() or {}).items()}
        player.record("end", {"step": trainer.global_steps, "left": left})
        manager.close()
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    play(json.loads(sys.argv[-1]))
