"""Spools of names that have no next life are brought home, each under its own session."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rolloutmq.bus.producer import Producer
from rolloutmq.bus.resend import resend_spools
from rolloutmq.schemas.delivery import RegisterProducer
from rolloutmq.schemas.trajectory import Group

if TYPE_CHECKING:
    from tests.bus.fake import FakeBroker

MakeGroup = Callable[..., Group]


async def leave(fake: "FakeBroker", group: MakeGroup, spool: Path, name: str, count: int) -> None:
    """Live as producer `p`, and leave `count` groups that did not arrive."""
    fake.lose = set(range(1, count + 1))
    async with Producer.open(
        fake.layout.root, env="e", producer="p", save_to=spool, drain_s=0.0, weight=3.0, group_size=2
    ) as p:
        for index in range(count):
            await p.send(group(f"{name}-{index}"))
        await fake.until(lambda: not fake.lose)


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
    assert "saved groups cannot be read" in caplog.text
    registered = fake.asked_for(RegisterProducer)
    assert [r.resume_session for r in registered] == [0, 0, 1, 0, 2, 0]
    assert {(r.weight, r.group_size) for r in registered} == {(3.0, 2)}
