"""Reader of the tensors that `make.py` writes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import TypeAdapter

from rolloutmq.schemas.config.losses import LossConfig, LossSection
from rolloutmq.trainer.losses.inputs import LossInputs, StepSize

MAKE: Final = Path(__file__).with_name("make.py")
GOLDEN: Final = Path(__file__).with_name("losses.json")


@dataclass(frozen=True)
class Known:
    """One loss, with what TRL computed of it."""

    name: str
    inputs: LossInputs
    config: LossSection
    loss: float
    gradient: torch.Tensor


def read(path: Path) -> list[Known]:
    """Return the cases of a file."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    return [_known(tree, case) for case in tree["cases"]]


def _known(tree: dict[str, Any], case: dict[str, Any]) -> Known:
    columns: dict[str, Any] = {
        name: torch.tensor(row, dtype=torch.float64) for name, row in tree["tokens"].items()
    }
    far = columns.pop("far_ref_logprobs")
    if case["far"]:
        columns["ref_logprobs"] = far
    lengths = torch.tensor(tree["lengths"])
    given = LossInputs(
        **columns,
        sequences=torch.arange(len(lengths)).repeat_interleave(lengths),
        sequence_count=len(lengths),
        step=StepSize(int(lengths.sum()), len(lengths)),
        staleness=torch.zeros(int(lengths.sum()), dtype=torch.int64),
    )
    given.logprobs.requires_grad_()
    if case["on_policy"]:
        given = replace(given, behaviour_logprobs=given.logprobs.detach(), proximal_logprobs=None)
    config = TypeAdapter[LossSection](LossConfig).validate_python({"entropy": 0.0, **case["ours"]})
    gradient = torch.tensor(case["gradient"], dtype=torch.float64)
    return Known(case["name"], given, config, case["loss"], gradient)
