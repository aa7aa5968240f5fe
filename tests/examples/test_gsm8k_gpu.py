"""Word problems with a trainer on a real GPU; skipped where there is none."""

from pathlib import Path

import pytest
import torch
from tests.examples.test_gsm8k import made_up, twenty_steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_twenty_steps_on_a_gpu(tmp_path: Path) -> None:
    twenty_steps(
        made_up(tmp_path / "problems.jsonl"), tmp_path, "trainer.device=cuda", "weights.backend=disk"
    )
