"""A run that was given a part of a host keeps to it."""

import pytest
from tests.services.orchestrator.gpus.traces import sample

from rolloutmq.services.orchestrator.gpus.visible import allowing, uuids_of, value_of


@pytest.mark.parametrize(
    ("use", "visible", "allowed"),
    [
        ((), None, True),
        (("GPU-12",), None, True),
        (("GPU-9", "GPU-1"), None, True),
        (("GPU-9",), None, False),
        ((), "GPU-12", True),
        ((), "GPU-9,GPU-1", True),
        ((), "GPU-9", False),
        ((), "0, 3", True),
        ((), "0,1", False),
        ((), "", False),
        ((), "-1,3", False),
        ((), "MIG-1,GPU-1", False),
        (("GPU-9",), "3", False),
    ],
)
def test_gpus_that_may_be_used(use: tuple[str, ...], visible: str | None, allowed: bool) -> None:
    assert allowing(use, visible)(sample("GPU-123", index=3)) is allowed


def test_what_a_process_was_given_is_read_back_and_what_others_wrote_is_not() -> None:
    assert uuids_of(value_of(("GPU-1", "GPU-2"))) == ("GPU-1", "GPU-2")
    for other in (None, "", "0,1", "-1", "GPU-1,0"):
        assert uuids_of(other) == ()
