"""The connection of an adapter with the real broker: the training, evaluations beside it, its end."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.integrations.verl.support import Stage, config, workers

from rolloutmq.bus.consumer import connection as links
from rolloutmq.bus.transport import discovery
from rolloutmq.schemas.errors import ClosedError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.trainer.integrations.task_feed import connection as connections
from rolloutmq.trainer.integrations.task_feed.answers import Answer, Missing
from rolloutmq.trainer.integrations.task_feed.connection import FeedConnection, find_problem
from rolloutmq.trainer.integrations.task_feed.feed import Feed

LIMIT_S = 60.0
RIGHT: dict[str, Any] = {
    "name": "a-b_1", "environments": {"math": "m"}, "deadline_s": 0.1, "timeout_s": 0,
}  # fmt: skip
"""Settings without a problem."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is gone is missed soon."""
    monkeypatch.setattr(links, "BEAT_S", 0.1)
    monkeypatch.setattr(links, "PATIENCE_S", 0.5)
    monkeypatch.setattr(links, "REPEAT_S", 0.1)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.5)


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    with running_broker(config(), RunLayout(run_dir)) as running:
        yield running


@pytest.fixture
def made(run_dir: Path) -> Iterator[list[FeedConnection]]:
    """Two connections of the same training, as of two processes."""
    found = [
        FeedConnection(run_dir, name="t", batch_sequences=4, deadline_s=LIMIT_S, timeout_s=LIMIT_S)
        for _ in range(2)
    ]
    yield found
    for one in found:
        one.close()


async def evaluate(connection: FeedConnection, row: int = 1) -> Answer:
    feed = await connection.evaluation()
    payload = {"extra_info": {"index": row}}
    answer = await feed.ask("1", f"t/eval/s0/{row}", "mine", payload, 2)
    await connection.evaluated()
    return answer


async def ask(connection: FeedConnection) -> Answer:
    payload = {"extra_info": {"index": 2}}
    return await connection.training.ask("2", "t/train/e0/2", "mine", payload, 2)


@pytest.mark.usefixtures("broker")
async def test_a_process_that_only_evaluates_leaves_a_live_training_alone(
    run_dir: Path, made: list[FeedConnection]
) -> None:
    live, other = made
    async with workers(Stage(run_dir)):
        await asyncio.to_thread(live.join, PolicyVersion(), RunInfo(batch_sequences=4))
        found = await asyncio.wrap_future(other.future(evaluate(other)))
        assert found.group is not None
        assert not other.joined
        answer = await asyncio.wrap_future(live.future(ask(live)))
        assert answer.group is not None
        await asyncio.to_thread(live.run, live.training.settle(["2"], (), PolicyVersion(0, 1)))
        assert live.error is None
        await asyncio.to_thread(live.commit, PolicyVersion(0, 1))


async def test_nothing_is_asked_before_the_training_has_begun_or_once_it_has_ended(
    made: list[FeedConnection],
) -> None:
    live, _ = made
    with pytest.raises(UsageError, match="training t: has not joined"):
        await asyncio.to_thread(live.run, ask(live))
    await asyncio.to_thread(live.close)
    for call in (lambda: live.run(ask(live)), lambda: live.join(None), lambda: live.commit(PolicyVersion())):
        with pytest.raises(ClosedError):
            await asyncio.to_thread(call)


async def test_an_evaluation_ends_while_the_broker_is_away(
    run_dir: Path,
    made: list[FeedConnection],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connections, "COMMIT_S", 0.5)
    live, _ = made
    with running_broker(config(durability="os"), RunLayout(run_dir)):
        async with workers(Stage(run_dir)):

            async def answered() -> Answer:
                feed = await live.evaluation()
                return await feed.ask("1", "t/eval/s0/1", "mine", {"extra_info": {"index": 1}}, 2)

            assert (await asyncio.wrap_future(live.future(answered()))).group is not None
    await asyncio.wait_for(asyncio.wrap_future(live.future(live.evaluated())), LIMIT_S)
    assert "evaluation not reported" in caplog.text
    with running_broker(config(durability="os"), RunLayout(run_dir)):
        async with asyncio.timeout(LIMIT_S):
            while await asyncio.wrap_future(live.future(unsettled(live))):
                await asyncio.wrap_future(live.future(live.evaluated()))


async def unsettled(connection: FeedConnection) -> list[str]:
    return (await connection.evaluation()).keys()


async def test_no_broker_is_an_error(run_dir: Path) -> None:
    alone = FeedConnection(run_dir, name="t", batch_sequences=4, deadline_s=1.0, timeout_s=0.3)
    with pytest.raises(WaitTimeoutError, match=str(run_dir)):
        await asyncio.to_thread(alone.join, PolicyVersion())
    await asyncio.to_thread(alone.close)


@pytest.mark.usefixtures("broker")
async def test_a_second_trainer_of_the_name_is_an_error_of_the_first(made: list[FeedConnection]) -> None:
    first, second = made
    await asyncio.to_thread(first.join, PolicyVersion())
    await asyncio.to_thread(second.join, PolicyVersion(1, 0))
    assert (await asyncio.wrap_future(first.future(ask(first)))).missing is Missing.CLOSED
    assert first.error is not None
    assert second.error is None


@pytest.mark.usefixtures("broker")
async def test_threads_that_join_at_once_join_once(
    run_dir: Path, made: list[FeedConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second feed would take the place of the first, which would end."""
    live, _ = made
    opened = 0
    feed_open = Feed.open

    def counted(*args: Any, **given: Any) -> Any:
        nonlocal opened
        opened += 1
        return feed_open(*args, **given)

    monkeypatch.setattr(Feed, "open", counted)
    async with workers(Stage(run_dir)):
        await asyncio.gather(*(asyncio.to_thread(live.join, PolicyVersion()) for _ in range(4)))
        assert opened == 1
        assert (await asyncio.wrap_future(live.future(ask(live)))).group is not None
        assert live.error is None
        await asyncio.wait_for(asyncio.to_thread(live.close), LIMIT_S)


async def test_a_connection_that_is_closed_while_it_waits_for_the_broker_ends(
    made: list[FeedConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, _ = made
    waits = threading.Event()

    @asynccontextmanager
    async def opening(*_args: Any, **_options: Any) -> AsyncIterator[Any]:
        waits.set()
        await asyncio.Event().wait()
        yield None

    monkeypatch.setattr(Feed, "open", opening)
    joining = asyncio.create_task(asyncio.to_thread(live.join, PolicyVersion()))
    await asyncio.to_thread(waits.wait, LIMIT_S)
    await asyncio.wait_for(asyncio.to_thread(live.close), LIMIT_S)
    with pytest.raises(ClosedError):
        await asyncio.wait_for(joining, LIMIT_S)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *(("name", value) for value in ("", "a b", "n" * 41, "\xe4", 1, None)),
        ("environments", "math"),
        *(("deadline_s", value) for value in (0.0, -1, math.nan, math.inf, 1e10, "5s", None, True)),
        *(("timeout_s", value) for value in (-1, math.nan, "60", None, True)),
    ],
)
def test_a_wrong_setting_is_named(key: str, wrong: Any) -> None:
    problem = find_problem(**RIGHT | {key: wrong})
    assert problem is not None
    assert problem[0] == key
    assert f"(got {wrong!r})" in problem[1]


def test_an_environment_without_a_name_is_named() -> None:
    problem = find_problem(**RIGHT | {"environments": {"math": "m", "code": 1}})
    assert problem == ("environments.code", "must be the name of an environment of the run (got 1)")


@pytest.mark.parametrize("changed", [{}, {"environments": None}, {"timeout_s": math.inf}, {"name": "n" * 40}])
def test_right_settings_have_no_problem(changed: dict[str, Any]) -> None:
    assert find_problem(**RIGHT | changed) is None
