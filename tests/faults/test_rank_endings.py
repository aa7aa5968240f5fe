"""The end of two ranks of a trainer, again and again: each exits with code 0."""

import os
from pathlib import Path
from typing import Final

import pytest
from tests.trainer.test_ranks import play

ENDINGS: Final = int(os.environ.get("ROLLOUTMQ_SOAK_ROUNDS", "2"))


@pytest.mark.extended
def test_every_ending_of_two_ranks_is_in_order(tmp_path: Path) -> None:
    endings = [play(tmp_path / str(number), 2, "bfloat16") for number in range(ENDINGS)]
    assert endings == [[0, 0]] * ENDINGS
