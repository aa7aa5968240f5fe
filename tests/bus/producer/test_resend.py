"""Spool files of ended producers are sent, each in its own session."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.bus.producer.test_spool_file import as_version

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.producer.resend import resend_set_aside, resend_spools
from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.requests import RegisterProducer

if TYPE_CHECKING:
    from tests.bus.transport.fake_broker import FakeBroker

MakeGroup = Callable[..., Group]


async def leave(fake: "FakeBroker", group: MakeGroup, spool: Path, name: str, count: int) -> None:
    """Live as producer `p`, and leave `count` groups that did not arrive."""
    fake.lose, fake.syncs = set(range(1, count + 1)), False
    async with Producer.open(
        fake.layout.root, env="e", producer="p", save_to=spool, drain_s=0.0, weight=3.0, group_size=2
    ) as p:
        for index in range(count):
            await p.send(group(f"{name}-{index}"))
        await fake.until(lambda: not fake.lose)
    fake.syncs = True


async def test_every_spool_of_a_directory_is_sent_and_removed(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spools, acks = tmp_path / "spools", tmp_path / "acks"
    async with fake.running():
        await leave(fake, group, spools / "one", "a", 2)
        await leave(fake, group, spools / "two", "b", 3)
        (spools / "damaged").write_bytes(b"nothing of the kind")
        (spools / "one.77.tmp").write_bytes(b"half")
        assert await resend_spools(fake.layout.root, spools, ack_logs=acks) == {"p": 5}
        assert await resend_spools(fake.layout.root, spools) == {}
    assert fake.taken == dict.fromkeys(["a-0", "a-1", "b-0", "b-1", "b-2"], 1)
    assert len((acks / "p.jsonl").read_bytes().splitlines()) == 5
    left = sorted(path.name for path in spools.iterdir())
    assert left[0].startswith("damaged.damaged-")
    assert left[1:] == ["one.77.tmp"]
    assert "spool file unreadable" in caplog.text
    registered = fake.asked_for(RegisterProducer)
    assert [r.resume_session for r in registered] == [0, 0, 1, 0, 2, 0]
    assert {(r.weight, r.group_size) for r in registered} == {(3.0, 2)}


async def test_a_spool_of_another_version_stays_and_the_others_are_sent(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    spools = tmp_path / "spools"
    async with fake.running():
        await leave(fake, group, spools / "one", "a", 1)
        await leave(fake, group, spools / "two", "b", 1)
        as_version(spools / "one", 1)
        before = (spools / "one").read_bytes()
        with pytest.raises(RecordVersionError, match="got version 1"):
            await resend_spools(fake.layout.root, spools)
    assert fake.taken == {"b-0": 1}
    assert [path.name for path in spools.iterdir()] == ["one"]
    assert (spools / "one").read_bytes() == before


async def test_a_producer_sends_what_its_fenced_processes_set_aside_and_nothing_else(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    spools = tmp_path / "spools"
    async with fake.running():
        await leave(fake, group, spools / "p.session-7", "a", 2)
        await leave(fake, group, spools / "other", "b", 1)
        await leave(fake, group, spools / "q.session-8", "c", 1)
        assert await resend_set_aside(fake.layout.root, spools / "p", "p") == 2
        assert await resend_set_aside(fake.layout.root, spools / "p", "p") == 0
        assert await resend_set_aside(fake.layout.root, spools / "q", "q") == 0, "it is of producer p"
    assert fake.taken == {"a-0": 1, "a-1": 1}
    assert sorted(path.name for path in spools.iterdir()) == ["other", "q.session-8"]
