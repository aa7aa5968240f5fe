"""Batching of jobs and their cancellation, with a generator under the control of the test."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from rolloutmq.schemas.errors import ClosedError, WeightsTornError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.batcher import Batcher
from rolloutmq.services.inference.jobs import Job
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.sampling import Sampling


class Puppet:
    """Stands in for the generator; blocks in the thread until the test says how a batch ends."""

    def __init__(self) -> None:
        self.batches: queue.Queue[list[Job]] = queue.Queue()
        self.ends: queue.Queue[Exception | None] = queue.Queue()

    def generate(self, jobs: Sequence[Job], on_done: Callable[[list[Job]], None]) -> None:
        self.batches.put(list(jobs))
        end = self.ends.get(timeout=10)
        if end is not None:
            raise end
        on_done([job for job in jobs if not job.cancelled])

    async def begun(self) -> list[Job]:
        return await asyncio.to_thread(self.batches.get, timeout=10)


def job(n: int = 1) -> Job:
    return Job([[1]], Sampling(n=n))


@asynccontextmanager
async def running(puppet: Puppet, max_rows: int = 8, max_waiting: int = 3) -> AsyncIterator[Batcher[Job]]:
    async with Batcher(puppet.generate, max_rows=max_rows, max_waiting=max_waiting) as batcher:
        task = asyncio.create_task(batcher.run())
        try:
            yield batcher
        finally:
            task.cancel()
            puppet.ends.put(None)


def ask(batcher: Batcher[Job], *jobs: Job) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(batcher.sample(one)) for one in jobs]


async def test_what_arrives_meanwhile_is_the_next_batch_in_its_order() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        first = ask(batcher, one := job())
        assert await puppet.begun() == [one]
        rest = ask(batcher, two := job(4), three := job(4), four := job(1))
        await asyncio.sleep(0)
        puppet.ends.put(None)
        await asyncio.gather(*first)
        assert await puppet.begun() == [two, three]  # four would be the ninth sequence
        puppet.ends.put(None)
        await asyncio.gather(*rest[:2])
        assert await puppet.begun() == [four]
        puppet.ends.put(None)
        await asyncio.gather(*rest)


async def test_too_many_that_wait_are_refused() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        asked = ask(batcher, job())
        await puppet.begun()
        asked += ask(batcher, job(), job(), job())
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=r"the queue is full \(3 requests\)") as caught:
            await batcher.sample(job())
        assert caught.value.status == 503
        puppet.ends.put(None)
        puppet.ends.put(None)
        await asyncio.gather(*asked)


async def test_who_goes_while_waiting_is_never_begun() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        first = ask(batcher, one := job())
        await puppet.begun()
        gone, stays = ask(batcher, job(), two := job())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled()
        puppet.ends.put(None)
        assert await puppet.begun() == [two]
        puppet.ends.put(None)
        await asyncio.gather(*first, stays)
        assert not one.cancelled


async def test_who_goes_while_being_generated_is_marked() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        gone, stays = ask(batcher, one := job(), two := job())
        assert await puppet.begun() == [one, two]
        gone.cancel()
        await asyncio.wait([gone])
        assert one.cancelled
        assert not two.cancelled
        puppet.ends.put(None)
        await stays


async def test_a_batch_that_fails_fails_for_all_and_the_next_goes_on() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        asked = ask(batcher, job(), job())
        await puppet.begun()
        puppet.ends.put(WeightsTornError(PolicyVersion(0, 3)))
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, WeightsTornError)
        asked = ask(batcher, job())
        await puppet.begun()
        puppet.ends.put(ZeroDivisionError("a defect"))
        (result,) = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(result, ApiError)
        assert result.status == 500
        asked = ask(batcher, job())
        await puppet.begun()
        puppet.ends.put(None)
        await asyncio.gather(*asked)


async def test_one_that_cannot_be_done_costs_no_other() -> None:
    puppet = Puppet()
    async with running(puppet, max_waiting=4) as batcher:
        fine, bad, gone, last = ask(batcher, one := job(), two := job(), job(), three := job())
        await puppet.begun()
        gone.cancel()
        await asyncio.wait([gone])
        puppet.ends.put(MemoryError("no room for the logits"))
        assert await puppet.begun() == [one]
        puppet.ends.put(None)
        await fine
        assert await puppet.begun() == [two]
        puppet.ends.put(MemoryError("no room for the logits"))
        with pytest.raises(ApiError, match="generation failed"):
            await bad
        assert await puppet.begun() == [three]
        puppet.ends.put(None)
        await last


async def test_what_fails_for_the_weights_is_not_tried_one_by_one() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        asked = ask(batcher, job(), job())
        await puppet.begun()
        puppet.ends.put(FloatingPointError("the logits of the policy are not finite"))
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, ApiError)
        assert puppet.batches.empty()


async def test_the_end_refuses_everybody_and_waits_for_the_thread() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        asked = ask(batcher, one := job(), job(8))
        await puppet.begun()
    for result in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(result, ClosedError)
    assert one.cancelled
    with pytest.raises(ClosedError):
        await batcher.sample(job())


async def test_work_between_batches_shares_the_thread() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        asked = ask(batcher, job())
        await puppet.begun()
        called = asyncio.create_task(batcher.call(lambda: 5))
        done, _ = await asyncio.wait([called], timeout=0.05)
        assert not done
        puppet.ends.put(None)
        assert await called == 5
        await asyncio.gather(*asked)


async def test_the_time_that_it_generates_is_counted_and_no_other() -> None:
    puppet = Puppet()
    async with running(puppet) as batcher:
        await asyncio.sleep(0)
        assert batcher.busy_s == 0.0
        for end in (None, WeightsTornError(PolicyVersion(0, 3))):
            before = batcher.busy_s
            (asked,) = ask(batcher, job())
            await puppet.begun()
            under_way = batcher.busy_s
            assert under_way >= before
            puppet.ends.put(end)
            await asyncio.wait([asked])
            asked.exception()
            while batcher._working_since is not None:  # noqa: ASYNC110 - the thread sets no event
                await asyncio.sleep(0)
            assert batcher.busy_s == batcher.busy_s >= under_way > 0.0
