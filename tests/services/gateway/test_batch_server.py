"""What a trainer of Atropos says of its run, on its way to the broker and back."""

import pytest

from rolloutmq.services.gateway.atropos_wire import Registration
from rolloutmq.services.gateway.batch_server import info_of, registration_of


@pytest.mark.parametrize(
    "said",
    [
        Registration("group", "project", 16, 64, "checkpoints", 5, 3, 10),
        Registration("", "", -1, -1, "", -1, 0, -1),
    ],
)
def test_what_a_trainer_said_comes_back_and_what_it_left_out_is_left_out(said: Registration) -> None:
    assert registration_of(info_of(said, said.starting_step)) == said
