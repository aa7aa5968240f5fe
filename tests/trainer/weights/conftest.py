"""A run directory, and the shares that a test makes in it."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.posix_shm import WeightShare


class Shares:
    """Shares of one address file; all are closed at the end."""

    def __init__(self, root: Path) -> None:
        self.address = root / "weights.json"
        self.opened: list[WeightShare] = []

    def create(self, model: nn.Module, version: PolicyVersion = PolicyVersion(), **more: Any) -> WeightShare:
        share = WeightShare.create_or_adopt(model, self.address, version=version, **more)
        self.opened.append(share)
        return share

    def attach(self, model: nn.Module, tokenizer: str = "") -> WeightShare:
        share = WeightShare.attach(model, self.address, tokenizer=tokenizer)
        self.opened.append(share)
        return share

    def close(self) -> None:
        for share in reversed(self.opened):
            share.close(unlink=True)


@pytest.fixture
def shares(run_dir: Path) -> Iterator[Shares]:
    made = Shares(run_dir)
    yield made
    made.close()
    gc.collect()
