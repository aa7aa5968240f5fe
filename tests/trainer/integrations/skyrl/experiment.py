"""SkyRL's entry point on the bus with an experiment of its own, in SkyRL's environment: `python experiment.py ...`

The weights are those of `support.Stage`: they say by how much each step changes them. `WEIGHTS` names their file.
"""

import os
from pathlib import Path
from typing import Any

import torch
from skyrl.train.dataset import PromptDataset
from torch import nn

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.integrations.skyrl.entrypoint import BusExp, main
from rolloutmq.trainer.integrations.skyrl.training import Publish
from rolloutmq.trainer.weights.disk import DiskShare

RISE = 0.125


class Experiment(BusExp):
    """Prompts of a file, and weights that change with each step."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._shares: list[DiskShare] = []
        self._module = nn.Linear(1, 1, bias=False)

    def get_train_dataset(self) -> PromptDataset:
        """Return the prompts, without the eight processes that SkyRL starts for them."""
        limit = self.cfg.trainer.max_prompt_length
        return PromptDataset(self.cfg.data.train_data, self.tokenizer, limit, num_workers=1)

    def get_publish(self) -> Publish:
        return self.publish

    def publish(self, version: PolicyVersion) -> None:
        with torch.no_grad():
            if not self._shares:
                self._module.weight.fill_(0.0)
                self._shares.append(
                    DiskShare.create(self._module, Path(os.environ["WEIGHTS"]), version=version)
                )
                return
            with self._shares[0].writing(version):
                self._module.weight.fill_(RISE * version.step)


if __name__ == "__main__":
    main(Experiment)
