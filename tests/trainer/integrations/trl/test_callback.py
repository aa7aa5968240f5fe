"""The step of the bus in a trainer's checkpoints."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.schemas.errors import UsageError
from rolloutmq.trainer.integrations.trl.callback import STATE, BusCallback, last_checkpoint, step_of


class Told:
    """A bus that a callback was made for."""

    training: Any = None
    running: Any = None

    def check(self, args: Any) -> None:
        """Find nothing wrong."""

    def begin(self, *given: Any) -> None:
        """Begin."""

    def progress(self) -> None:
        """Go on."""

    def end(self) -> None:
        """End."""


def state(step: int | None) -> dict[str, Any]:
    """State of the callback in a checkpoint."""
    bus = Told()
    bus.training = SimpleNamespace(step_covered=step)
    return {BusCallback.__name__: BusCallback(bus).state()}


def write(directory: Path, number: int, callbacks: dict[str, Any] | None) -> Path:
    path = directory / f"checkpoint-{number}"
    path.mkdir()
    if callbacks is not None:
        (path / STATE).write_text(json.dumps({"global_step": number, "stateful_callbacks": callbacks}))
    return path


def test_a_checkpoint_tells_the_step_of_its_policy() -> None:
    assert step_of(SimpleNamespace(global_step=0, stateful_callbacks={})) is None
    assert step_of(SimpleNamespace(global_step=12, stateful_callbacks=state(6))) == 6
    assert BusCallback(Told()).state() == {"args": {}, "attributes": {}}


@pytest.mark.parametrize("callbacks", [{}, state(None), {BusCallback.__name__: []}])
def test_a_checkpoint_without_a_step_of_the_bus_is_refused(callbacks: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=r"resume_from_checkpoint: the checkpoint of step 12 has no step of the bus"
    ):
        step_of(SimpleNamespace(global_step=12, stateful_callbacks=callbacks))


def test_the_newest_checkpoint_that_is_complete_is_found(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "nothing") is None
    assert last_checkpoint(tmp_path) is None
    write(tmp_path, 9, state(9))
    whole = write(tmp_path, 100, state(100))
    write(tmp_path, 110, {})  # of a training without the bus
    write(tmp_path, 120, state(None))  # inside a generation
    write(tmp_path, 130, None)  # its trainer was killed before it was complete
    torn = write(tmp_path, 140, state(140)) / STATE
    torn.write_text(torn.read_text()[:-9])
    (tmp_path / "checkpoint-best").mkdir()
    assert last_checkpoint(tmp_path) == str(whole)


@pytest.mark.parametrize(("strategy", "saves"), [("no", False), ("steps", True)])
def test_the_broker_gets_the_checkpoint_that_it_asks_for_unless_there_are_none(
    strategy: str, *, saves: bool
) -> None:
    bus, control = Told(), SimpleNamespace(should_save=False)
    bus.running = SimpleNamespace(stepped=lambda: True)
    BusCallback(bus).on_step_end(SimpleNamespace(save_strategy=strategy), None, control)
    assert control.should_save is saves
