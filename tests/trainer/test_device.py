"""A trainer on a GPU takes the very steps of one on the CPU: on a GPU that the CPU plays, and on a real one."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.played import PLAYED, playing
from tests.trainer.rank_player import groups_of, taught_by
from tests.trainer.toy import MemoryBroker, run_config
from tests.trainer.weights.test_cuda_ipc import FakeCuda, FakeShare
from torch import Tensor

from rolloutmq.bus import segments
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.teaching import Lore
from rolloutmq.schemas.training import WeightsConfig
from rolloutmq.trainer import checkpoint, loop
from rolloutmq.trainer.device import device_of, find_device
from rolloutmq.trainer.gradient import leave_gradient
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.model import build_policy
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.weights import backends
from rolloutmq.trainer.weights.share import SharedWeights
from rolloutmq.trainer.weights.tokenizer import directory_fingerprint

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"loss": {"name": "gspo", "entropy": 0.01}, "pack": False},
    "in parts": {"micro_batch_tokens": 120, "logits_bytes": 4096, "recompute_blocks": True},
    "adapters": {"lora": {"rank": 4}},
    "bfloat16": {"dtype": "bfloat16"},
    "teacher": {"lore": Lore.TOP_K},
    "teacher of what was sampled": {"lore": Lore.SAMPLED},
}
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture(params=["played", GPU])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The GPU, and the one that `cuda` means to the trainer."""
    monkeypatch.setattr(segments.Owner, "alive", lambda _self: False)
    if request.param == "cuda":
        yield torch.device("cuda", 0)
        return
    real = find_device
    monkeypatch.setattr(loop, "find_device", lambda name: PLAYED if name == "cuda" else real(name))
    with playing(monkeypatch) as device:
        yield device


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


@pytest.mark.parametrize("run", RUNS)
def test_steps_on_a_gpu_are_those_on_the_cpu(
    gpu: torch.device, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[torch.device] = set()

    def noting(passes: Any, step: int, config: Any, scorer: Any, *rest: Any) -> dict[str, float]:
        used.add(device_of(scorer.policy))
        return leave_gradient(passes, step, config, scorer, *rest)

    monkeypatch.setattr(loop, "leave_gradient", noting)
    lore = RUNS[run].get("lore", Lore.NONE)
    there = learned(tmp_path / "there", config_of("cuda", **RUNS[run]), lore)
    assert used == {gpu}
    here = learned(tmp_path / "here", config_of("cpu", **RUNS[run]), lore)
    assert there.keys() == here.keys()
    # Kernels of another kind add up in another order.
    close = gpu == PLAYED and "dtype" not in RUNS[run]
    rtol, atol = (1e-3, 1e-5) if close else (0.05, 1e-3)
    for name in here.keys() - {"random_state"}:
        torch.testing.assert_close(there[name], here[name], rtol=rtol, atol=atol)


def test_a_server_on_the_same_gpu_maps_each_version(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing is played, and that the trainer computes there is not: the other way round than above."""
    monkeypatch.setattr(loop, "find_device", lambda _name: torch.device("cpu"))
    monkeypatch.setattr(backends, "CudaShare", FakeShare)
    monkeypatch.setattr(FakeShare, "cuda", FakeCuda())
    config = config_of("cuda")
    config = config.model_copy(update={"weights": WeightsConfig(backend="cuda_ipc")})
    layout, broker = RunLayout(run_dir), MemoryBroker(groups_of(0, 1))
    reader = build_policy(config.model, 9)
    seen: dict[int, float] = {}
    shares: list[SharedWeights] = []
    with ExitStack() as stack:

        def look(_number: int) -> None:
            if not shares:
                own = directory_fingerprint(layout.model)
                shares.append(backends.attach(reader, layout.weights, tokenizer=own))
                stack.callback(shares[0].close)
            with shares[0].reading() as version:
                seen[version.step] = float(next(reader.parameters()).sum())

        broker.on_pull = look
        train(config, layout, Stop(), broker.connect)
    assert list(seen) == [0, 1, 2, 3]
    assert len(set(seen.values())) == 4
    assert not layout.weights.exists()


def test_the_played_gpu_refuses_to_be_mixed_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing(monkeypatch) as device:
        there = torch.ones(3, device=device)
        assert float((there * torch.tensor(2.0)).sum()) == 6
        with pytest.raises(AssertionError, match="two devices"):
            there + torch.ones(3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(MissingError, match=f"{name}.*sees 0 GPUs"):
        find_device(name)
