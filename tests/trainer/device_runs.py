"""Short runs on a device and on the CPU, killed in their middle and resumed, which must come to the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.rank_player import groups_of, taught_by
from tests.trainer.toy import MemoryBroker, run_config
from torch import Tensor

from rolloutmq.bus import segments
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.teaching import Lore
from rolloutmq.schemas.training import WeightsConfig
from rolloutmq.trainer import checkpoint, loop
from rolloutmq.trainer.device import device_of
from rolloutmq.trainer.gradient import leave_gradient
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.process import Stop

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"loss": {"name": "gspo", "entropy": 0.01}, "pack": False},
    "in parts": {"micro_batch_tokens": 120, "logits_bytes": 4096, "recompute_blocks": True},
    "adapters": {"lora": {"rank": 4}},
    "bfloat16": {"dtype": "bfloat16"},
    "teacher": {"lore": Lore.TOP_K},
    "teacher of what was sampled": {"lore": Lore.SAMPLED},
}


class Killed(BaseException):
    """Stands for SIGKILL."""


def config_of(device: str, dtype: str = "float32", lore: Lore = Lore.NONE, **trainer: Any) -> RunConfig:
    base = run_config(steps=4, distillation=taught_by(lore), **trainer)
    changed = {
        "model": base.model.model_copy(update={"dtype": dtype}),
        "trainer": base.trainer.model_copy(update={"device": device}),
        "weights": WeightsConfig(backend="disk"),
    }
    return base.model_copy(update=changed)


def learned(root: Path, config: RunConfig, lore: Lore) -> dict[str, Tensor]:
    """Let a run be killed in its third step, and go on; return its last checkpoint."""
    layout, broker = RunLayout(root), MemoryBroker(groups_of(0, 1, lore))

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
    monkeypatch.setattr(segments.Owner, "alive", lambda _self: False)
    used: set[torch.device] = set()

    def noting(passes: Any, step: int, config: Any, scorer: Any, *rest: Any) -> dict[str, float]:
        used.add(device_of(scorer.policy))
        return leave_gradient(passes, step, config, scorer, *rest)

    monkeypatch.setattr(loop, "leave_gradient", noting)
    lore = RUNS[run].get("lore", Lore.NONE)
    there = learned(root / "there", config_of("cuda", **RUNS[run]), lore)
    assert used == {device}
    here = learned(root / "here", config_of("cpu", **RUNS[run]), lore)
    assert there.keys() == here.keys()
    for name in here.keys() - {"random_state"}:
        torch.testing.assert_close(there[name], here[name], rtol=rtol, atol=atol)
