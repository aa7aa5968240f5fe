"""The user's path and its rival both carry groups."""

import pytest

from benchmarks.broker import throughput
from benchmarks.sdk import user_path
from rolloutmq.schemas.wire.replies import Durability


@pytest.mark.parametrize("kind", user_path.KINDS)
def test_groups_of_a_user_s_program_come_through(kind: str) -> None:
    assert user_path.rate(kind, throughput.SMALL, Durability.MEMORY, lasts_s=0.01, warm_up_s=0.01) > 0


def test_groups_of_the_rival_come_through() -> None:
    assert user_path.rival_rate(throughput.SMALL, lasts_s=0.01, warm_up_s=0.01) > 0
