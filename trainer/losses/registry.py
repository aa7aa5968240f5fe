"""Losses by name.

A loss is a pure function of its inputs and its configuration section. To add one, write its section in
`schemas/config/losses.py`, a module here, and a line below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rolloutmq.schemas.config.losses import LossSection
from rolloutmq.trainer.losses.cispo import cispo
from rolloutmq.trainer.losses.clipped import clipped
from rolloutmq.trainer.losses.gspo import gspo
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs
from rolloutmq.trainer.losses.reinforce import reinforce


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function and its needs.

    Attributes:
        compute: Maps inputs and the loss's own section to outputs.
        columns: Columns every group must have; they arrive in `LossInputs.columns`.
    """

    compute: Callable[[LossInputs, Any], LossOutputs]
    columns: tuple[str, ...] = ()


LOSSES: Final[Mapping[str, Loss]] = {
    "dapo": Loss(clipped),
    "grpo": Loss(clipped),
    "dr_grpo": Loss(clipped),
    "decoupled_ppo": Loss(clipped),
    "gspo": Loss(gspo),
    "cispo": Loss(cispo),
    "reinforce": Loss(reinforce),
    "rloo": Loss(reinforce),
}

REFERENCE: Final = "ref_logprobs"


def find_loss(config: LossSection) -> Loss:
    """Return the loss of a section."""
    return LOSSES[config.name]


def columns_needed(config: LossSection) -> tuple[str, ...]:
    """Return the columns that groups need in addition to those every loss needs."""
    reference = (REFERENCE,) if config.kl else ()
    return (*reference, *find_loss(config).columns)
