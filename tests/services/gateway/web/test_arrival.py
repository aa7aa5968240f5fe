import asyncio
from collections.abc import Sequence

import pytest

from rolloutmq.services.gateway.web.arrival import STEP_BYTES, Progress, SilentError, body_of
from rolloutmq.services.gateway.web.http_io import Message, Request, TooLargeError
from rolloutmq.services.gateway.web.in_hand import InHand

MOST = 1000


def request(**headers: bytes) -> Request:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return Request("POST", "/", {}, named)


async def read(parts: Sequence[bytes], one: Request, in_hand: InHand | None = None) -> bytes:
    messages = [
        {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
        for number, part in enumerate(parts)
    ]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return await body_of(one, receive, in_hand or InHand(MOST), most=MOST, silent_s=60.0)


async def test_a_body_is_put_together() -> None:
    assert await read([b"ab", b"", b"c"], request()) == b"abc"
    assert await read([b""], request()) == b""


async def test_bodies_beyond_a_bound_are_refused_before_they_are_read() -> None:
    with pytest.raises(TooLargeError, match="1000 bytes"):
        await read([b""], request(content_length=b"1001"))
    with pytest.raises(TooLargeError, match="1000 bytes"):
        await read([b"x" * 600, b"x" * 600], request())


async def test_a_client_that_goes_while_it_sends_is_gone() -> None:
    one = request()
    assert await read([], one) == b""
    assert one.gone.is_set()


async def test_a_body_counts_for_what_came_and_not_for_what_it_announces() -> None:
    in_hand, one = InHand(MOST), request(content_length=b"900", content_encoding=b"gzip")
    came, goes_on = asyncio.Event(), asyncio.Event()
    parts = [b"x" * 10, b"x" * 5]

    async def receive() -> Message:
        if len(parts) == 1:
            came.set()
            await goes_on.wait()
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    reading = asyncio.create_task(body_of(one, receive, in_hand, most=MOST, silent_s=60.0))
    await came.wait()
    assert in_hand.nbytes == 10
    goes_on.set()
    assert len(await reading) == 15
    assert in_hand.nbytes == 15
    assert one.held.arrived


async def test_a_client_that_stops_in_the_middle_is_not_waited_for() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(SilentError, match="body in 0"):
        await body_of(request(), receive, InHand(MOST), most=MOST, silent_s=0.01)


def test_each_step_has_its_own_time() -> None:
    progress = Progress(10.0)
    progress.took(4.0, STEP_BYTES - 1)
    assert progress.left_s == 6.0
    progress.took(1.0, 1)
    assert progress.left_s == 10.0
    progress.took(3.0, STEP_BYTES, renews=False)
    assert progress.left_s == 7.0
