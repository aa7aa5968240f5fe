"""Default names of the producers of a process."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.bus.consumer.test_round_trip import config

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.producer.open_producers import OpenProducers
from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import Name
from rolloutmq.services.broker.server import running_broker


def test_names_differ_and_are_used_again() -> None:
    producers = OpenProducers()
    first, second, other = producers.claim("e"), producers.claim("e"), producers.claim("other")
    assert first.endswith(f"-{os.getpid()}")
    assert second == f"{first}-2"
    assert other.startswith("other-")
    producers.release(first)
    assert producers.claim("e") == first
    assert producers.claim("e") == f"{first}-3"


@pytest.mark.parametrize("host", ["h" * 300, "my host/é.domain", "gpu-1.cluster"])
def test_a_name_is_one_whatever_the_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    producers = OpenProducers()
    names = [producers.claim("e" * 64) for _ in range(12)]
    assert msgspec.convert(names, list[Name]) == names
    assert len(set(names)) == 12


async def test_two_unnamed_producers_of_one_process_do_not_fence_each_other(
    run_dir: Path, group: Callable[..., Group]
) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        async with (
            Producer.open(run_dir, env="e", group_size=2) as one,
            Producer.open(run_dir, env="e", group_size=2) as two,
        ):
            for number in range(5):
                await one.send(group(f"one-{number}"))
                await two.send(group(f"two-{number}"))
            assert await one.flush(30)
            assert await two.flush(30)
            assert (one.accepted, two.accepted) == (5, 5)
            assert two.name == f"{one.name}-2"
        async with Producer.open(run_dir, env="e", group_size=2) as again:
            assert again.name == one.name


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("env", "lone \ud800"),
        ("env", "a/b"),
        ("env", 3),
        ("producer", "p" * 65),
        ("run", "\udfff"),
        ("slots", 0),
        ("group_size", -1),
        ("weight", float("nan")),
        ("weight", float("inf")),
        ("min_share", 1.5),
        ("max_tokens", -1),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("drain_s", "long"),
    ],
)
async def test_an_argument_out_of_range_is_named_before_a_broker_is_looked_for(
    run_dir: Path, name: str, wrong: object
) -> None:
    with pytest.raises(UsageError, match=f"{name}: "):
        async with Producer.open(run_dir, **({"env": "e"} | {name: wrong})):  # type: ignore[arg-type]
            raise AssertionError("there is no broker")
