"""What is said where the trainer is put together wrongly. Needs no TRL."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.trainer.integrations.trl.support import broker, config

from rolloutmq.schemas.errors import ConfigError, UsageError, WaitTimeoutError
from rolloutmq.trainer.integrations.trl import SCORE, BusRollouts


def trainer(*, training: bool = True) -> Any:
    return SimpleNamespace(model=SimpleNamespace(training=training))


def test_a_directory_without_a_broker_is_told_when_the_block_is_entered(run_dir: Path) -> None:
    bus = BusRollouts(run_dir / "nowhere", timeout_s=0.2)
    with pytest.raises(WaitTimeoutError, match=r"broker of .*nowhere: not done within .*start a broker with"):
        bus.__enter__()


def test_weights_need_a_configured_run(run_dir: Path) -> None:
    with broker(run_dir) as layout:
        layout.config.unlink()
        with pytest.raises(UsageError, match=r"publish: must not be True without a configured run"):
            BusRollouts(run_dir, publish=True).__enter__()


def test_a_run_with_a_trainer_of_its_own_is_refused(run_dir: Path) -> None:
    with broker(run_dir, config(trainer={}, inference={})) as layout, BusRollouts(run_dir) as bus:
        layout.owner.write_text("{}")  # as `rolloutmq up` leaves it
        args = SimpleNamespace(
            num_generations=4,
            per_device_train_batch_size=8,
            steps_per_generation=1,
            num_iterations=1,
            gradient_accumulation_steps=1,
            eval_strategy="no",
            eval_on_start=False,
            restore_callback_states_from_checkpoint=False,
            loss_type="dapo",
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode="sequence_mask",
            off_policy_mask_threshold=None,
        )
        with pytest.raises(ConfigError, match=r"trainer\.enabled: must be false beside TRL"):
            bus.callback.on_init_end(args, None, None)
        layout.owner.unlink()
        bus.callback.on_init_end(args, None, None)
        args.vllm_importance_sampling_correction = False
        with pytest.warns(UserWarning, match="TRL ignores the log-probabilities of the sampling policy"):
            bus.callback.on_init_end(args, None, None)


def test_what_is_missing_in_the_call_of_the_trainer_is_named() -> None:
    bus = BusRollouts("runs/mine")
    with pytest.raises(UsageError, match=r"callbacks: must contain `bus\.callback`"):
        bus.rollout([""], trainer())
    with pytest.raises(UsageError, match=r"rollout_func: must be `bus\.rollout`"):
        bus.reward([""], completions=[""])
    with pytest.raises(UsageError, match=r"max_steps: must be positive with `bus\.prompts` \(got -1\)"):
        bus.prompts(SimpleNamespace(max_steps=-1))
    with pytest.raises(UsageError, match="TRL must not evaluate"):
        bus.rollout([""], trainer(training=False))


def test_scores_and_metrics_leave_filler_out() -> None:
    told: dict[str, float] = {}
    columns: dict[str, Any] = {SCORE: [1.0, 0.0, None, None], "bus_staleness": [2, 1, 0, 0]}
    scores = BusRollouts("runs/mine").reward([""] * 4, log_metric=told.__setitem__, **columns)
    assert scores == [1.0, 0.0, None, None]
    assert told == {"rolloutmq/staleness": 1.5, "rolloutmq/filler": 0.5}


def test_the_package_alone_loads_neither_trl_nor_transformers() -> None:
    code = (
        "import sys, rolloutmq, rolloutmq.trainer.integrations as _\n"
        "print({'trl', 'transformers', 'torch'} & {*sys.modules})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "set()\n"
