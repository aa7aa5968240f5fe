"""Short runs on a device and on the CPU, killed midway and resumed, with the same result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.support.rank_player import groups_of, taught_by
from tests.trainer.support.toy import MemoryBroker, run_config
from torch import Tensor

from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import WeightsConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.distillation import TeacherLogprobs
from rolloutmq.trainer import checkpoint, loop
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.policy.device import device_of
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.step.gradient import leave_gradient

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"loss": {"name": "gspo", "entropy": 0.01}, "pack": False},
    "in parts": {"micro_batch_tokens": 120, "logits_bytes": 4096, "recompute_blocks": True},
    "adapters": {"lora": {"rank": 4}},
    "bfloat16": {"dtype": "bfloat16"},
    "teacher": {"teacher_logprobs": TeacherLogprobs.TOP_K},
    "teacher of what was sampled": {"teacher_logprobs": TeacherLogprobs.SAMPLED},
}


class Killed(BaseException):
    """Stands for SIGKILL."""


def config_of(
    device: str,
    dtype: str = "float32",
    teacher_logprobs: TeacherLogprobs = TeacherLogprobs.NONE,
    **trainer: Any,
) -> RunConfig:
    base = run_config(steps=4, distillation=taught_by(teacher_logprobs), **trainer)
    changed = {
        "model": base.model.model_copy(update={"dtype": dtype}),
        "trainer": base.trainer.model_copy(update={"device": device}),
        "weights": WeightsConfig(backend="disk"),
    }
    return base.model_copy(update=changed)


def learned(root: Path, config: RunConfig, teacher_logprobs: TeacherLogprobs) -> dict[str, Tensor]:
    """Let a run be killed in its third step, and go on; return its last checkpoint."""
    layout, broker = RunLayout(root), MemoryBroker(groups_of(0, 1, teacher_logprobs))

    def kill(number: int) -> None:
        if number == 3:
            raise Killed

    broker.on_settle = kill
    with pytest.raises(Killed):
        train(config, layout, Stop(), broker.connect)
    broker.on_settle = lambda _number: None
    train(config, layout, Stop(), broker.connect)
    found = checkpoint.latest(layout.checkpoints)
    assert found is not None
    return {**found.weights, **found.adapters, **found.optimizer}


def require_same_steps(
    run: str, device: torch.device, root: Path, monkeypatch: pytest.MonkeyPatch, *, rtol: float, atol: float
) -> None:
    """Take the steps of a run on the device that `cuda` means to the trainer, and on the CPU, and compare."""
    monkeypatch.setattr(segment_file.SegmentOwner, "alive", lambda _self: False)
    used: set[torch.device] = set()

    def noting(passes: Any, step: int, config: Any, scorer: Any, *rest: Any) -> dict[str, float]:
        used.add(device_of(scorer.policy))
        return leave_gradient(passes, step, config, scorer, *rest)

    monkeypatch.setattr(loop, "leave_gradient", noting)
    teacher_logprobs = RUNS[run].get("teacher_logprobs", TeacherLogprobs.NONE)
    there = learned(root / "there", config_of("cuda", **RUNS[run]), teacher_logprobs)
    assert used == {device}
    here = learned(root / "here", config_of("cpu", **RUNS[run]), teacher_logprobs)
    assert there.keys() == here.keys()
    for name in here.keys() - {"random_state"}:
        torch.testing.assert_close(there[name], here[name], rtol=rtol, atol=atol)
