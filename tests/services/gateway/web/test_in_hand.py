"""Memory of unanswered requests: who may go on, and who waits."""

import asyncio

from rolloutmq.services.gateway.web.in_hand import Held, InHand


async def turns() -> None:
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_at_the_limit_bodies_wait_for_the_end_of_whole_ones() -> None:
    in_hand, whole, one = InHand(100), Held(), Held()
    in_hand.hold(whole, 150)
    in_hand.arrived(whole)
    waiting = [asyncio.create_task(in_hand.room(held)) for held in (one, Held())]
    await turns()
    in_hand.hold(whole, 100)
    await turns()
    assert not any(task.done() for task in waiting)
    assert not one.ahead
    in_hand.release(whole)
    await asyncio.gather(*waiting)
    assert in_hand.nbytes == 0


async def test_unfinished_bodies_that_fill_the_memory_end_one_after_the_other() -> None:
    """None of them could ever be answered if each waited for the others."""
    in_hand, ended = InHand(100), list[int]()
    bodies = [Held() for _ in range(4)]
    for held in bodies:
        in_hand.hold(held, 40)

    async def go_on(number: int) -> None:
        held = bodies[number]
        while held.nbytes < 80:
            await in_hand.room(held)
            assert in_hand.nbytes < 100 or held.ahead
            in_hand.hold(held, held.nbytes + 20)
            assert sum(one.ahead for one in bodies) <= 1
        in_hand.arrived(held)
        in_hand.release(held)
        ended.append(number)

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(go_on(number))
    assert sorted(ended) == [0, 1, 2, 3]
    assert in_hand.nbytes == 0


async def test_who_goes_while_ahead_leaves_the_place_to_the_next() -> None:
    in_hand, full = InHand(100), Held()
    in_hand.hold(full, 200)
    first, second = Held(), Held()
    await in_hand.room(first)
    assert first.ahead
    waiting = asyncio.create_task(in_hand.room(second))
    await turns()
    assert not waiting.done()
    in_hand.release(first)
    await waiting
    assert second.ahead


async def test_who_gives_up_waiting_takes_no_place() -> None:
    in_hand, whole = InHand(100), Held()
    in_hand.hold(whole, 100)
    in_hand.arrived(whole)
    given_up, patient = Held(), Held()
    waiting = [asyncio.create_task(in_hand.room(held)) for held in (given_up, patient)]
    await turns()
    waiting[0].cancel()
    await turns()
    in_hand.release(whole)
    await waiting[1]
    assert not patient.ahead
