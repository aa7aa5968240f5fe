"""Groups that another project's trainer would learn something wrong from. Pure.

Such a trainer scores all groups at one temperature, computes its own advantages and reads no requests of an
environment. A group that wants something else would give it wrong importance ratios without an error, so it is not
handed out.
"""

from typing import Final, NamedTuple

import numpy as np

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.trainer.step import collate, overrides
from rolloutmq.trainer.step.collate import Bounds

UNUSED: Final = ("advantages", "distill_token_ids", "distill_logprobs")
"""Columns that change a step of the shipped trainer and that others would ignore."""
UNBOUNDED: Final = Bounds(1 << 31, 1 << 31)


class Judge(NamedTuple):
    """What a trainer can learn from.

    Attributes:
        trainer: Its name, for people.
        temperature: At which it scores.
        key: Its setting of the temperature.
        bounds: Limits of its policy.
        zeroes: It can train on some sequences of a group without their advantage (`set_advantage_to_zero`).
    """

    trainer: str
    temperature: float
    key: str
    bounds: Bounds = UNBOUNDED
    zeroes: bool = False

    def find_fault(self, group: Group) -> str:
        """Return why the trainer cannot learn from a group, or an empty string."""
        for name in UNUSED:
            if name in group.columns:
                return (
                    f"{name}: {self.trainer} computes its own and would ignore the column; "
                    "leave it out, or use another trainer"
                )
        if fault := collate.find_fault(group, self.bounds) or overrides.find_fault(group):
            return fault
        if not self.zeroes and overrides.zeroed(group).any():
            return (
                f"{overrides.OVERRIDES}: {self.trainer} knows no {overrides.ZERO_ADVANTAGE}; "
                "leave it out, or leave those sequences out"
            )
        return self._other_temperature(group)

    def _other_temperature(self, group: Group) -> str:
        warm = collate.temperatures(group)[trained_tokens(group)]
        same = np.isclose(warm, self.temperature, rtol=1e-6)
        if same.all():
            return ""
        return (
            f"temperatures: the group was sampled at {float(warm[~same][0]):g}, {self.trainer} scores at "
            f"temperature={self.temperature:g}; set {self.key} to the same number"
        )
