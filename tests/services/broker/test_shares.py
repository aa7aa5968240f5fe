"""What is worth an ack, by how many producers share the mark."""

import pytest

from rolloutmq.bus.session import PACK_GROUPS
from rolloutmq.schemas.config import BrokerConfig, EnvironmentConfig
from rolloutmq.schemas.envelope import Split
from rolloutmq.services.broker.lanes import Lane
from rolloutmq.services.broker.shares import WORTH_PART, Shares

GROUP = 16_000


def shares(producers: int, high_bytes: int) -> tuple[Shares, Lane]:
    lane = Lane("e", Split.TRAIN, EnvironmentConfig(entry="a:B"), 0.0)
    lane.largest_bytes = GROUP
    live = range(producers)
    return Shares(BrokerConfig(high_bytes=high_bytes), live, {lane: live}), lane


@pytest.mark.parametrize(("high_mib", "groups"), [(256, 4), (512, 6), (1024, 15), (2048, 16)])
def test_an_ack_is_for_a_message_or_half_a_window_but_four_groups_go_at_once(
    high_mib: int, groups: int
) -> None:
    made, lane = shares(1000, high_mib << 20)
    assert made.window(lane) >= groups * GROUP
    assert round(made.worth(lane) / GROUP) == groups


def test_a_large_window_is_topped_up_by_quarters() -> None:
    made, lane = shares(1, 1 << 30)
    assert made.worth(lane) == made.window(lane) // WORTH_PART > PACK_GROUPS * GROUP
