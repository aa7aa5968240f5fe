"""The trainer's events: settings are checked when it is made, the bus is joined when training begins, a batch is
settled after its last optimizer step, and a checkpoint commits."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any, Final, Protocol

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.errors import UsageError
from rolloutmq.trainer.integrations.trl.settings import ignores_logprobs, name_of
from rolloutmq.trainer.integrations.trl.training import Training

logger = logging.getLogger(__name__)

STATE: Final = "trainer_state.json"
STEP: Final = "bus_step"
"""Attribute of the callback's state in a checkpoint: step of the policy, or None inside a generation."""


class Bus(Protocol):
    """What the events are told to, see `rollouts.BusRollouts`."""

    @property
    def training(self) -> Training | None: ...
    @property
    def running(self) -> Training: ...
    def check(self, args: Any, /) -> object: ...
    def begin(self, args: Any, state: Any, step: int | None, model: Any, tokenizer: Any, /) -> None: ...
    def progress(self) -> None: ...
    def end(self) -> None: ...


class BusCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Joins the events of a `transformers.Trainer` to a `BusRollouts`. Made by it, one for each."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes into each checkpoint."""
        training = self._bus.training
        attributes = {} if training is None else {STEP: training.step_covered}
        return {"args": {}, "attributes": attributes}

    def on_init_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:  # noqa: ARG002
        """Check the settings; see `settings.generation_of`."""
        self._bus.check(args)
        if ignores_logprobs(args):
            warnings.warn(
                "vllm_importance_sampling_correction: is False and off_policy_mask_threshold is None, so TRL ignores "
                "the log-probabilities of the sampling policy, and trains groups of older policies as if they were "
                "of its own",
                stacklevel=2,
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Join the bus, from the step of the checkpoint if the trainer resumes from one."""
        self._bus.begin(args, state, step_of(state), more["model"], more["processing_class"])

    def on_step_begin(self, *_given: Any, **_more: Any) -> None:
        """Report progress, so that a long step keeps its lease."""
        self._bus.progress()

    def on_substep_end(self, *_given: Any, **_more: Any) -> None:
        """Report progress."""
        self._bus.progress()

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> Any:  # noqa: ARG002
        """Settle the batch if the step used it up; ask for a checkpoint if the broker wants one.

        Without checkpoints (`save_strategy` is `no`) the broker forgets the oldest batches that it keeps.
        """
        wanted = self._bus.running.stepped()
        if wanted and name_of(args.save_strategy) != "no":
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_more: Any) -> None:  # noqa: ARG002
        """Commit, once the checkpoint is on disk."""
        training = self._bus.running
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if training.step_covered is None:
            logger.warning("checkpoint inside a generation, not resumable path=%s", path)
            return
        training.commit(path)

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Note the loss, for the run's own displays."""
        if self._bus.training is not None:
            self._bus.training.logged(more.get("logs") or {})

    def on_train_end(self, *_given: Any, **_more: Any) -> None:
        """Settle a batch that was used in part, and leave the bus."""
        self._bus.end()


def step_of(state: Any, callback: str = BusCallback.__name__) -> int | None:
    """Return the step of the policy in the checkpoint that a trainer resumed from; None if it did not resume.

    Args:
        state: Of the trainer.
        callback: Class whose state tells the step.

    Raises:
        UsageError: The checkpoint does not tell: it is from another training, or was written inside a generation.
    """
    if not state.global_step:
        return None
    saved = state.stateful_callbacks.get(callback, {})
    step = _step(saved)
    if step is None:
        raise UsageError(
            f"resume_from_checkpoint: the checkpoint of step {state.global_step} has no step of the bus, so it is not "
            "known which groups it has learned from; pass `last_checkpoint(output_dir)`"
        )
    return step


def last_checkpoint(output_dir: str | os.PathLike[str], callback: str = BusCallback.__name__) -> str | None:
    """Return the newest complete checkpoint in a directory that a training on the bus can continue from, if any.

    Args:
        output_dir: The trainer's directory of checkpoints.
        callback: Class whose state tells the step.
    """
    found = [
        path for path in Path(output_dir).glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()
    ]
    for path in sorted(found, key=lambda one: -int(one.name.partition("-")[2])):
        try:
            known = read_json(path / STATE, dict[str, Any]) or {}  # the trainer writes this file last
        except ValueError:
            continue
        if _step(known.get("stateful_callbacks", {}).get(callback)) is not None:
            return str(path)
    return None


def _step(saved: Any) -> int | None:
    attributes = saved.get("attributes") if isinstance(saved, dict) else None
    step = attributes.get(STEP) if isinstance(attributes, dict) else None
    return step if isinstance(step, int) else None
