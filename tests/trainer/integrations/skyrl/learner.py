"""The learner of the example in SkyRL's fully asynchronous trainer, with its checkpoints, in SkyRL's environment.

    python learner.py RUN_DIR RECORD STEPS

It appends a line for each optimizer step: what it learned from, by the ids of the groups in its hand.
"""

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from examples.skyrl_sort import skyrl_sort
from examples.skyrl_sort.skyrl_sort import GROUPS, Digits, Learner, Tracker, publisher
from transformers import AutoTokenizer

from rolloutmq.bus.rundir import load_run
from rolloutmq.trainer.integrations.skyrl.entrypoint import BusAsyncTrainer, bus_generator
from rolloutmq.trainer.integrations.skyrl.inference import ExternalInference
from rolloutmq.trainer.policy.model import build_policy, write_identity


class Dispatch:
    """As much of SkyRL's dispatch as its trainer needs around a step: checkpoints of policy and optimizer."""

    def __init__(self, policy: Any, optimizer: torch.optim.Optimizer) -> None:
        self._parts = {"policy": policy, "optimizer": optimizer}

    def get_lcm_dp_size(self) -> int:
        return 1

    def save_checkpoint(self, _model: str, folder: str, _tokenizer: Any = None) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save({name: part.state_dict() for name, part in self._parts.items()}, Path(folder) / "state.pt")

    def load_checkpoint(self, _model: str, folder: str, **_options: Any) -> None:
        found = torch.load(Path(folder) / "state.pt")
        for name, part in self._parts.items():
            part.load_state_dict(found[name])


class Trainer(BusAsyncTrainer):
    """SkyRL's fully asynchronous trainer with the optimizer step of the example."""

    policy: Any
    optimizer: torch.optim.Optimizer
    record: Path
    _learn = Learner._learn

    def _cleanup_old_checkpoints(self) -> None:
        """Keep all: SkyRL would start a Ray cluster for it."""

    async def _run_training(self, training_input: Any) -> Any:
        status = await asyncio.to_thread(self._learn, training_input)
        assert self._trained is not None
        trained, masked = self._trained
        hand = self.generator.running._out
        groups = {uid: [held.group_id for held in hand[uid]] for uid in trained}
        line = {"step": self.global_step, "groups": groups, "masked": masked}
        with self.record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return status


def settings(run_dir: Path) -> Any:
    """Return SkyRL's settings: those of the example, with checkpoints."""
    cfg = skyrl_sort.settings(run_dir)
    trainer = cfg.trainer
    trainer.fully_async.simulate_training = False
    trainer.ckpt_interval = 5
    trainer.ckpt_path = str(run_dir / "skyrl")
    trainer.resume_mode = "latest"
    return cfg


def main(run_dir: Path, record: Path, steps: int) -> None:
    """Train to the end."""
    run, layout = load_run(run_dir)
    policy = build_policy(run.model, run.run.seed)
    write_identity(policy, run.model, layout.model)
    cfg, tokenizer = settings(run_dir), AutoTokenizer.from_pretrained(layout.model)
    trainer = Trainer(
        cfg=cfg,
        tracker=Tracker(),
        tokenizer=tokenizer,
        train_dataset=Digits(GROUPS * steps),
        inference_engine_client=ExternalInference(),
        generator=bus_generator(cfg, tokenizer),
    )
    trainer.record, trainer.policy = record, policy
    trainer.optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.99))
    trainer.dispatch = Dispatch(policy, trainer.optimizer)
    with ExitStack() as stack:
        trainer.publish = publisher(policy, run, layout, stack)
        asyncio.run(trainer.train())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[-3]), Path(sys.argv[-2]), int(sys.argv[-1]))
