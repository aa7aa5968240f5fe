"""The error of a step names its groups; an error of the bus stays as it is."""

import logging
from collections.abc import Sequence

import pytest

from rolloutmq.schemas.errors import ClosedError, UsageError
from rolloutmq.trainer.integrations.failed_steps import name_groups_in, naming_groups


class Trainer:
    def step(self, divisor: int) -> float:
        """Divide."""
        return 1 / divisor


def groups() -> tuple[int, Sequence[str]]:
    return 5, ["e-0/1", "e-0/2"]


def test_an_error_names_the_groups_of_its_step(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    name_groups_in(trainer, "step", groups)
    assert trainer.step(2) == 0.5
    with pytest.raises(ZeroDivisionError) as caught, caplog.at_level(logging.ERROR):
        trainer.step(0)
    assert caught.value.__notes__ == [
        "Step 5 failed with the groups e-0/1, e-0/2; `rolloutmq explain` shows each."
    ]
    assert "step failed step=5 groups=e-0/1,e-0/2" in caplog.text


def left() -> tuple[int, Sequence[str]]:
    raise ClosedError("the bus is left")


@pytest.mark.parametrize(
    ("error", "found"),
    [(UsageError("no"), groups), (ValueError("no"), left), (ValueError("no"), lambda: (5, []))],
)
def test_other_errors_pass_as_they_are(error: Exception, found: object) -> None:
    with pytest.raises(type(error)) as caught, naming_groups(found):  # type: ignore[arg-type]
        raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
