"""A trainer on a real GPU; skipped where there is none."""

from pathlib import Path

import pytest
import torch
from tests.trainer.support.device_runs import RUNS, require_same_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("run", RUNS)
def test_steps_on_a_gpu_are_those_on_the_cpu(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_same_steps(run, torch.device("cuda", 0), tmp_path, monkeypatch, rtol=0.05, atol=1e-3)
