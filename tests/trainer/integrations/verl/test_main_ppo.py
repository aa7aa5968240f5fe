"""verl's `main_ppo` with its own workers, engines and optimizer, on a GPU. No GPU has run it yet."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.integrations.verl.played import SIZE
from tests.trainer.integrations.verl.support import (
    PYTHON,
    Stage,
    config,
    environment,
    missing,
    ray_files,
    run,
    verify,
    workers,
)

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.trainer.policy.model import build_policy, write_identity

pytestmark = [
    pytest.mark.rival,
    pytest.mark.gpu,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

ADAPTER = "rolloutmq.trainer.integrations.verl"
ROWS, BATCH, EPOCHS = 12, 4, 1


def settings(run_dir: Path, place: Path) -> list[str]:
    """Return the page's arguments, and those of a tiny model on one GPU."""
    given: dict[str, Any] = {
        "+bus.where": run_dir,
        "+bus.environment": "mine",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": f"{ADAPTER}.manager.BusAgentLoopManager",
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{ADAPTER}.sampling",
        "trainer.v1.sampler.custom_sampler.name": "BusReplayBuffer",
        "trainer.checkpoint_callback_class": f"{ADAPTER}.sampling.BusCheckpoint",
        "trainer.save_freq": 1,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": place / "prompts.jsonl",
        "data.val_files": place / "prompts.jsonl",
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": place / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": BATCH,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.actor.use_kl_loss": "false",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": SIZE,
        "actor_rollout_ref.rollout.calculate_log_probs": "true",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_epochs": EPOCHS,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.logger": "['console']",
        "trainer.default_local_dir": place / "checkpoints",
    }
    return [f"{name}={value}" for name, value in given.items()]


def write_inputs(place: Path, about: RunConfig) -> None:
    """Write the data set of verl's form, and a model of random weights."""
    rows = [
        {
            "prompt": [{"role": "user", "content": str(row + 10)}],
            "data_source": "played",
            "reward_model": {"style": "rule", "ground_truth": str(row)},
            "extra_info": {"index": row},
        }
        for row in range(ROWS)
    ]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy: Any = build_policy(about.model, 0)
    policy.save_pretrained(place / "model")
    write_identity(policy, about.model, place / "model")


async def test_verl_steps_on_groups_of_the_bus(run_dir: Path) -> None:
    place, layout, about = run_dir.parent, RunLayout(run_dir), config(durability="os")
    write_json(layout.config, about)
    write_inputs(place, about)
    words = [str(PYTHON), "-m", "verl.trainer.main_ppo", *settings(run_dir, place)]
    with running_broker(about, layout), ray_files() as folder:
        async with workers(Stage(run_dir)):
            code, output = await run(words, place / "verl.log", environment() | {"RAY_TMPDIR": folder})
    assert code == 0, output[-6000:]
    steps = [line for line in read_lines(layout.trained, SettledBatch) if not line.resumed]
    assert [line.version.step for line in steps] == list(range(1, ROWS // BATCH * EPOCHS + 1))
    assert len({name for line in steps for name in line.trained}) == ROWS * EPOCHS
    verify(run_dir)
