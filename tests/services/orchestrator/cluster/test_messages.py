"""Frames of the private socket: split anywhere, refused if they are not of this protocol."""

import pytest

from rolloutmq.schemas.errors import MalformedError
from rolloutmq.services.orchestrator.cluster.messages import (
    FRAME_LIMIT_BYTES,
    Frames,
    LifeState,
    Lives,
    Order,
    Release,
    Report,
    Send,
    Start,
    cut,
    framed,
)

ORDERS: list[Order] = [
    Start(life="a", name="e-0", env="e", words=("worker", "--worker", "e-0")),
    Send(life="a", number=15, group=True),
    Release(life="a"),
]
REPORTS: list[Report] = [
    Lives(lives=(LifeState(life="a", name="e-0", waits_for="a host"),)),
    LifeState(life="a", name="e-0", over=True, code=-9),
]


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("orders", [True, False])
def test_messages_arrive_whole_however_the_stream_is_cut(step: int, orders: bool) -> None:
    sent: list[Order] | list[Report] = ORDERS if orders else REPORTS
    stream = b"".join(framed(one) for one in sent)
    frames = Frames(orders=orders)
    parts = [stream[at : at + step] for at in range(0, len(stream), step)]
    assert [one for part in parts for one in frames.take(part)] == sent


@pytest.mark.parametrize(
    "data",
    [
        (FRAME_LIMIT_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc1",
        framed(REPORTS[1]),
        b"GET / HTTP/1.1\r\n",
    ],
    ids=["too large", "no MessagePack", "of the other side", "another protocol"],
)
def test_another_stream_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match="cluster service"):
        Frames(orders=True).take(data)


def test_of_a_long_text_the_end_stays() -> None:
    assert cut("x" * 5000 + "the reason").endswith("x" * 100 + "the reason")
    assert len(cut("x" * 5000)) < 2100
    assert cut("short") == "short"
