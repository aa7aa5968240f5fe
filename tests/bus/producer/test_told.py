"""What a producer refuses or tells at the call, instead of losing groups later."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rolloutmq.bus import log_throttle
from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.schemas.errors import InvalidGroupError, RolloutMQError, UnusablePathError, UsageError
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.wire.envelope import Split

if TYPE_CHECKING:
    from tests.bus.transport.fake_broker import FakeBroker

MakeGroup = Callable[..., Group]


async def test_a_group_that_cannot_be_sent_is_refused_and_harms_no_other(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p", group_size=2) as p:
        await p.send(group("before"))
        with pytest.raises(InvalidGroupError, match=r"column group_id: .*surrogates"):
            await p.send(replace(group("g"), group_id="lone \ud800"))
        with pytest.raises(InvalidGroupError, match=r"column task: .*surrogates"):
            await p.send(replace(group("g"), task="lone \udfff"))
        opaque = group("g")
        with pytest.raises(InvalidGroupError, match="column messages: "):
            await p.send(replace(opaque, columns={**opaque.columns, **_messages("lone \ud800")}))
        await p.send(group("behind"))
        assert await p.flush(30)
    assert list(fake.taken) == ["before", "behind"]


def _messages(value: object) -> dict[str, Column]:
    rows = [[1]]
    built = Group.build("g", tokens=rows, mask=rows, scores=[0.0], messages=value)
    return {"messages": built.columns["messages"]}


async def test_groups_of_another_size_are_told_once(
    fake: "FakeBroker", group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p", group_size=2) as p:
        await p.send(group("usual"))
        assert "another size" not in caplog.text
        for number in range(5):
            await p.send(group(f"odd-{number}", n=3))
        assert await p.flush(30)
    told = [record.getMessage() for record in caplog.records if "another size" in record.getMessage()]
    assert len(told) == 1
    assert "producer=p group=odd-0 sequences=3 group_size=2" in told[0]


async def test_the_evaluation_asks_for_sizes_and_is_not_warned(
    fake: "FakeBroker", group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Producer.open(fake.layout.root, env="e", producer="p.eval", group_size=2, split=Split.EVAL)
    async with fake.running(), opening as p:
        await p.send(replace(group("greedy", n=1), task="point/e/0/greedy"))
        assert await p.flush(30)
    assert "another size" not in caplog.text


async def test_a_wait_for_acks_is_told(
    fake: "FakeBroker", group: MakeGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_throttle.WaitLog.__init__, "__defaults__", (0.1, 30.0))
    fake.reading.clear()
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p", group_size=2) as p:
        await p.send(group("g"))
        flushing = asyncio.create_task(p.flush())
        async with asyncio.timeout(60):
            while "waiting for acks" not in caplog.text:  # noqa: ASYNC110 - a log line has no event
                await asyncio.sleep(0.02)
        fake.reading.set()
        assert await flushing
    assert "waiting for acks producer=p unacked=1 reason=none" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"spool_bytes": -1}, "spool_bytes: must be a positive number of bytes (got -1)"),
        ({"spool_bytes": "1"}, "spool_bytes: must be a positive number of bytes (got '1')"),
        ({"timeout_s": 10**400}, "timeout_s: must be seconds, at least 0"),
    ],
)
async def test_a_producer_of_odd_arguments_is_refused(
    run_dir: Path, given: dict[str, Any], says: str
) -> None:
    await _refused(Producer.open(run_dir, env="e", **given), UsageError, says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sequences": "64"}, "sequences, tokens: must be one positive number and one 0 (got sequences='64'"),
        ({"sequences": 64, "split": "train"}, "split: must be Split.TRAIN or Split.EVAL (got 'train')"),
    ],
)
async def test_a_consumer_of_odd_arguments_is_refused(
    run_dir: Path, given: dict[str, Any], says: str
) -> None:
    await _refused(Consumer.open(run_dir, **given), UsageError, says)


@pytest.mark.parametrize("option", ["save_to", "ack_log"])
async def test_a_path_may_be_text_and_one_that_cannot_be_used_is_told(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path, option: str
) -> None:
    given: dict[str, Any] = {option: str(tmp_path / "file")}
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p", **given) as p:
        await p.send(group("g"))
        assert await p.flush(30)
    given = {option: tmp_path}
    async with fake.running():
        await _refused(
            Producer.open(fake.layout.root, env="e", **given), UnusablePathError, f"{option} {tmp_path}: "
        )


async def test_a_time_limit_in_the_place_of_a_permit_is_told(fake: "FakeBroker", group: MakeGroup) -> None:
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        with pytest.raises(
            UsageError, match=r"permit: must come from acquire \(got int\); timeout_s is given by its name"
        ):
            await p.send(group("g"), 5)  # type: ignore[arg-type]


async def _refused(
    opened: AbstractAsyncContextManager[object], kind: type[RolloutMQError], says: str
) -> None:
    with pytest.raises(kind) as refused:
        async with opened:
            raise AssertionError("it is open")
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["tokens", "mask", "scores"])
def test_a_group_without_a_required_column_is_refused(name: str) -> None:
    given: dict[str, Any] = {"tokens": [[1]], "mask": [[1]], "scores": [0.0], name: None}
    with pytest.raises(InvalidGroupError, match=f"column {name}: is required"):
        Group.build("g", **given)
