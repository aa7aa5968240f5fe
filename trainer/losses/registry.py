"""The losses by name.

A loss is a pure function of its inputs and its section of the configuration. A new one needs its section in
`schemas/losses.py`, a file here, and a line below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rolloutmq.schemas.losses import LossSection
from rolloutmq.trainer.losses.cispo import cispo
from rolloutmq.trainer.losses.clipped import clipped
from rolloutmq.trainer.losses.gspo import gspo
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs
from rolloutmq.trainer.losses.reinforce import reinforce


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss.

    Attributes:
        compute: From inputs and its own section to outputs.
        columns: Columns of a group that it cannot do without; each reaches it in `LossInputs.columns`.
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
    """Return the loss that a section is of."""
    return LOSSES[config.name]


def columns_needed(config: LossSection) -> tuple[str, ...]:
    """Return the columns that a group must have to be learned from, beside those that every loss needs."""
    reference = (REFERENCE,) if config.kl else ()
    return (*reference, *find_loss(config).columns)
