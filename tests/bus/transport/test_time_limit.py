"""Time limits: every call that waits may be bounded, and says what it waited for and where it looked."""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.bus.transport.fake_broker import V0, answers, leased

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.tasks.client import TaskClient
from rolloutmq.bus.transport import endpoint
from rolloutmq.bus.transport.time_limit import time_limit, within
from rolloutmq.schemas.errors import MissingError, RetryableError, UsageError, WaitTimeoutError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import Commit, Pull, Settle

if TYPE_CHECKING:
    from tests.bus.transport.fake_broker import FakeBroker

MakeGroup = Callable[..., Group]
OPENINGS: dict[str, Callable[..., AbstractAsyncContextManager[Any]]] = {
    "producer": lambda where, **limit: Producer.open(where, env="e", producer="p", **limit),
    "consumer": lambda where, **limit: Consumer.open(where, sequences=2, consumer="p", **limit),
    "tasks": TaskClient.open,
}
BLOCKING: dict[str, Callable[..., AbstractContextManager[Any]]] = {
    "producer": lambda where, **limit: Producer.blocking(where, env="e", producer="p", **limit),
    "consumer": lambda where, **limit: Consumer.blocking(where, sequences=2, consumer="p", **limit),
    "tasks": TaskClient.blocking,
}


def test_a_limit_is_seconds_or_none() -> None:
    assert (time_limit("t", None), time_limit("t", math.inf), time_limit("t", 0)) == (None, None, 0.0)
    for wrong in (-1, math.nan, "1", True and [1]):
        with pytest.raises(UsageError, match="t: must be seconds"):
            time_limit("t", wrong)  # type: ignore[arg-type]


async def test_a_late_call_is_a_time_out_and_may_be_repeated() -> None:
    with pytest.raises(WaitTimeoutError, match=r"send: not done within timeout_s of 0\.0 s: why") as late:
        await within(0.01, "send", asyncio.Event().wait(), lambda: "why")
    assert isinstance(late.value, TimeoutError)
    assert isinstance(late.value, RetryableError)

    async def own() -> None:
        raise TimeoutError("of the work itself")

    with pytest.raises(TimeoutError, match="of the work itself"):
        await within(60, "send", own(), lambda: "why")


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
async def test_opening_names_the_file_it_looked_for(run_dir: Path, opening: Callable[..., Any]) -> None:
    with pytest.raises(WaitTimeoutError, match="opening of ") as late:
        async with opening(run_dir / "typo", timeout_s=0.2):
            raise AssertionError("there is no broker")
    assert f"{run_dir / 'typo' / 'endpoints.json'} does not exist" in str(late.value)
    assert f"rolloutmq broker --run-dir {run_dir / 'typo'}" in str(late.value)


@pytest.mark.parametrize("opening", BLOCKING.values(), ids=BLOCKING)
def test_blocking_opening_names_the_address_it_asked(run_dir: Path, opening: Callable[..., Any]) -> None:
    opened = opening(f"ipc://{run_dir}/nobody", timeout_s=0.2)
    with pytest.raises(WaitTimeoutError, match=f"no answer from ipc://{run_dir}/nobody"):
        opened.__enter__()


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
async def test_a_file_is_no_run_directory(tmp_path: Path, opening: Callable[..., Any]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file: must be a run directory"):
        async with opening(tmp_path / "file", timeout_s=60):
            raise AssertionError("there is no broker")


async def test_a_run_directory_of_another_user_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(endpoint, "read_regular", read)
    with pytest.raises(MissingError, match=r"endpoints.json cannot be read \(Permission denied\)"):
        async with Producer.open(run_dir, env="e", timeout_s=60):
            raise AssertionError("it cannot be read")


async def test_a_permit_and_a_send_that_are_late_leave_nothing(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.start_limit = 1
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        held = await p.acquire(timeout_s=30)
        for call in (p.acquire(timeout_s=0.05), p.send(group("late"), timeout_s=0.05)):
            with pytest.raises(WaitTimeoutError, match="no credit or no ack: none") as late:
                await call
            assert late.value.waited_s == pytest.approx(0.05)
        with pytest.raises(WaitTimeoutError, match=r"^send: "):
            await p.send_acked(group("acked late"), timeout_s=0)
        assert p.handed_over("acked late") is None
        await p.send(group("g"), held, timeout_s=30)
        fake.start_limit = 2
        fake.publish()
        await (await p.send_acked(group("next"), timeout_s=30))
    assert list(fake.taken) == ["g", "next"]


async def test_a_send_names_the_broker_that_is_away(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.start_limit = 0
    async with fake.running():
        opened = Producer.open(fake.layout.root, env="e", producer="p", drain_s=0)
        p = await opened.__aenter__()
    p._connection._session.epoch = 0
    async with asyncio.timeout(60):
        while "does not exist" not in p._connection.problem:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    with pytest.raises(WaitTimeoutError, match=r"endpoints\.json does not exist"):
        await p.send(group("g"), timeout_s=0.01)
    await opened.__aexit__(None, None, None)


async def test_calls_of_a_consumer_are_bounded(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, timeout_s=30) as c:
        batch = await c.pull(11, V0, timeout_s=30)
        for kind in (Settle, Commit):
            fake.answers[kind] = lambda _: None
        with pytest.raises(WaitTimeoutError, match=f"^settle: .*no answer from {fake.places.serve}"):
            await batch.ack(timeout_s=0.1)
        with pytest.raises(WaitTimeoutError, match=r"^commit: "):
            await c.commit(V0, timeout_s=0.1)
        fake.answers.clear()
        await batch.ack(timeout_s=30)
        await c.commit(V0, timeout_s=30)
        with pytest.raises(WaitTimeoutError, match=f"^pull: .*last reason is {Wait.NO_BATCH.value}"):
            await c.pull(12, V0, timeout_s=0.3)
        for wrong in (c.pull(12, V0, math.nan), c.pull(12, V0, timeout_s=-1)):
            with pytest.raises(UsageError, match="must be seconds"):
                await wrong
