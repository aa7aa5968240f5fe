"""A trainer on a simulated GPU takes the same steps as one on the CPU; `test_device_gpu` uses a real one."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.trainer.support.cpu_gpu import PLAYED, playing
from tests.trainer.support.device_runs import RUNS, config_of, require_same_steps
from tests.trainer.support.rank_player import groups_of
from tests.trainer.support.toy import MemoryBroker
from tests.trainer.weights.test_cuda_ipc import FakeCuda, FakeShare

from rolloutmq.schemas.config.trainer import WeightsConfig
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.trainer import loop
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.policy.device import find_device
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.weights import backends, cuda_ipc
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.share import SharedWeights


@pytest.mark.parametrize("run", RUNS)
def test_steps_on_a_gpu_are_those_on_the_cpu(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "find_device", lambda name: PLAYED if name == "cuda" else find_device(name))
    # Attention is computed by other kernels, which add up in another order.
    rtol, atol = (0.05, 1e-3) if "dtype" in RUNS[run] else (1e-3, 1e-5)
    with playing(monkeypatch):
        require_same_steps(run, PLAYED, tmp_path, monkeypatch, rtol=rtol, atol=atol)


def test_a_server_on_the_same_gpu_maps_each_version(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing is played, and that the trainer computes there is not: the other way round than above."""
    monkeypatch.setattr(loop, "find_device", lambda _name: torch.device("cpu"))
    for module in (backends, cuda_ipc):
        monkeypatch.setattr(module, "CudaShare", FakeShare)
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
