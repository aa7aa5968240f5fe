"""Least grant worth an ack, by the number of producers that share the mark."""

import pytest

from rolloutmq.bus.producer.session import PACK_GROUPS
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.flow.credit_windows import WORTH_PART, CreditWindows
from rolloutmq.services.broker.state.queues import Lane

GROUP = 16_000


def shares(producers: int, high_bytes: int) -> tuple[CreditWindows, Lane]:
    lane = Lane("e", Split.TRAIN, EnvironmentConfig(entry="a:B"), 0.0)
    lane.largest_bytes = GROUP
    live = range(producers)
    return CreditWindows(BrokerConfig(high_bytes=high_bytes), live, {lane: live}), lane


@pytest.mark.parametrize(("high_mib", "groups"), [(256, 4), (512, 6), (1024, 15), (2048, 31), (3072, 32)])
def test_an_ack_is_for_a_message_or_half_a_window_but_four_groups_go_at_once(
    high_mib: int, groups: int
) -> None:
    made, lane = shares(1000, high_mib << 20)
    assert made.window(lane) >= groups * GROUP
    assert round(made.worth(lane) / GROUP) == groups


def test_a_large_window_is_topped_up_by_quarters() -> None:
    made, lane = shares(1, 1 << 30)
    assert made.worth(lane) == made.window(lane) // WORTH_PART > PACK_GROUPS * GROUP
