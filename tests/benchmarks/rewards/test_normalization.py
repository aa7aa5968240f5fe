"""The arms of the mixture: both environments in each step, and a capped run of one seed."""

from pathlib import Path

import pytest
import torch

from benchmarks.rewards import normalization
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.services.monitor.text.jsonl import read_lines

DIGITS = torch.tensor([[3, 1], [0, 9]])


def test_each_environment_knows_its_answers() -> None:
    ascend, descend = normalization.ENVIRONMENTS
    assert (ascend.answers(DIGITS) - normalization.FIRST_DIGIT)[:, :2].tolist() == [[1, 3], [0, 9]]
    assert (descend.answers(DIGITS) - normalization.FIRST_DIGIT)[:, :2].tolist() == [[3, 1], [9, 0]]
    assert ascend.answers(DIGITS)[:, 2].tolist() == [normalization.END] * 2
    assert ascend.prompts(DIGITS).tolist() != descend.prompts(DIGITS).tolist()


def test_an_arm_trains_on_both_environments_with_their_own_moments(tmp_path: Path) -> None:
    scores = normalization.learned(tmp_path / "run", "dr_grpo", "zscore", seed=0, steps=2)
    assert set(scores) == {"ascend", "descend"}
    assert all(0 <= score < 0.5 for score in scores.values())
    first, second = read_lines(RunLayout(tmp_path / "run").trained, SettledBatch)
    assert first.moments == {"ascend": 8, "descend": 8}
    assert second.moments == {"ascend": 16, "descend": 16}
    assert len(first.trained) + len(first.filtered) == 16


@pytest.mark.extended
def test_one_seed_of_one_loss_shows_the_difference() -> None:
    steps = 250
    found = {
        normalize: min(scores.values())
        for _, normalize, _, scores in normalization.arms(("dr_grpo",), (0,), steps)
    }
    assert found["zscore"] > found["none"] + 0.1
