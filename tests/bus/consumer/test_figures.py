"""A trainer's figures: wrong calls raise at once, values never end a training, and what is logged arrives."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq import Consumer, Group, GroupConsumer, Producer, UsageError
from rolloutmq.bus.consumer import figures as figures_module
from rolloutmq.bus.consumer.connection import ConsumerConnection
from rolloutmq.bus.consumer.figures import FigureQueue, step_figures
from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.launch.settings import load
from rolloutmq.schemas.errors import ClosedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.requests import RegisterConsumer
from rolloutmq.schemas.wire.training import StepFigures
from rolloutmq.services.broker.server import Broker, running_broker

WITHIN_S = 60.0
VERSION = PolicyVersion(2, 7)


def checked(step: Any = 7, **values: Any) -> StepFigures:
    return step_figures("run", VERSION, step, values)


def test_numbers_of_any_library_are_figures() -> None:
    one = checked(loss=1, kl=np.float32(0.5), clipped=np.array(0.25), done=True)
    assert one.figures == {"loss": 1.0, "kl": 0.5, "clipped": 0.25, "done": 1.0}
    assert (one.run, one.incarnation, one.step, one.not_finite) == ("run", 2, 7, ())
    assert checked(**{"kl/token-mean.0": 1.0}).figures == {"kl/token-mean.0": 1.0}


def test_a_loss_with_its_graph_is_a_figure() -> None:
    torch = pytest.importorskip("torch")
    assert checked(loss=torch.ones(1, requires_grad=True).sum() / 4).figures == {"loss": 0.25}


def test_what_is_not_finite_is_named_and_left_out() -> None:
    one = checked(loss=math.nan, norm=-math.inf, huge=10**400, kl=1.0)
    assert (one.figures, one.not_finite) == ({"kl": 1.0}, ("loss", "norm", "huge"))


@pytest.mark.parametrize("value", ["1", b"1", None, [1.0], np.zeros(2), object()])
def test_other_values_are_refused_by_their_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"log\.loss: must be a number \(got "):
        checked(loss=value)


@pytest.mark.parametrize("name", ["", "7up", "a b", "ä", "x" * 65, "a\n", "\x1b[2J\ud800"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"must be a name of at most 64") as refusal:
        checked(**{name: 1.0})
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 1 << 62, None, np.float64(3.0), np.int64(-1), [3]])
def test_other_steps_are_refused(step: Any) -> None:
    with pytest.raises(UsageError, match=r"log\.step: "):
        checked(step)


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), np.array(3)])
def test_a_step_may_be_an_integer_of_numpy(step: Any) -> None:
    assert (checked(step).step, type(checked(step).step)) == (3, int)


def test_too_many_figures_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 64 figures"):
        checked(**{f"x{number}": 1.0 for number in range(65)})


async def test_without_a_broker_the_newest_steps_are_kept(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_module, "QUEUED_LIMIT", 3)
    monkeypatch.setattr(figures_module, "LAST_S", 0.01)
    link = ConsumerConnection(run_dir, RegisterConsumer(consumer="c"))
    queue = FigureQueue(link)
    for step in range(10):
        queue.put(checked(step, loss=1.0))
    assert [one.step for one in queue._queue] == [7, 8, 9]
    await queue.close()
    await link.close()


@pytest.fixture
def broker(run_dir: Path) -> Any:
    with running_broker(load(None, environ={}), RunLayout(run_dir)) as running:
        yield running


def heard(broker: Broker, log: Any) -> list[StepFigures]:
    """Return what arrives of two steps that are logged in a block."""
    topic = topics.telemetry("figures", "")
    found: list[StepFigures] = []
    with BlockingSubscriber(broker.endpoints.events, [topic, topics.PRESSURE]) as feed:
        assert feed.poll(WITHIN_S) is not None  # the subscription is known
        log()
        deadline = time.monotonic() + WITHIN_S
        while len(found) < 2 and time.monotonic() < deadline:
            if (event := feed.poll(1.0)) is not None and event[0].startswith(topic):
                one = codec.decode_event(event[1])
                assert isinstance(one, StepFigures)
                found.append(one)
    return found


@pytest.mark.parametrize("kind", ["steps", "groups"])
def test_figures_of_a_blocking_consumer_arrive_in_order_also_the_last(
    broker: Broker, run_dir: Path, kind: str
) -> None:
    opening = (
        Consumer.blocking(run_dir, sequences=2)
        if kind == "steps"
        else GroupConsumer.blocking(run_dir, batch_sequences=2)
    )

    def log() -> None:
        with opening as consumer:
            consumer.log(1, loss=0.5)
            consumer.log(2, loss=math.nan, kl=0.25)
        with pytest.raises(ClosedError):
            consumer.log(3)

    first, second = heard(broker, log)
    assert (first.run, first.step, first.figures) == ("run", 1, {"loss": 0.5})
    assert (second.step, second.figures, second.not_finite) == (2, {"kl": 0.25}, ("loss",))


@pytest.mark.usefixtures("broker")
async def test_figures_under_way_at_the_end_are_not_sent_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of `log` and the end of the block were two lines of metrics."""
    async with Consumer.open(run_dir, sequences=2) as consumer:
        asked = []
        ask = consumer._link.ask

        async def slow(message: Any, **rest: Any) -> Any:
            asked.append(message)
            reply = await ask(message, **rest)
            await asyncio.sleep(0)  # the reply is on its way while the block ends
            return reply

        monkeypatch.setattr(consumer._link, "ask", slow)
        consumer.log(1, loss=0.5)
        while not asked:  # noqa: ASYNC110 - the request is sent by another task
            await asyncio.sleep(0)
        await consumer._figures.close()
        assert [one.step for message in asked for one in message.logged] == [1]


@pytest.mark.usefixtures("broker")
async def test_figures_of_a_consumer_that_was_taken_over_are_dropped(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Consumer.open(run_dir, sequences=2) as first, Consumer.open(run_dir, sequences=2) as second:
        first.log(1, loss=0.5)
        await first._figures.close()
        second.log(1, loss=0.25)
        await second._figures.close()
    dropped = [one.getMessage() for one in caplog.records if "figures not logged" in one.getMessage()]
    assert len(dropped) == 1
    assert "took over its batches" in dropped[0]


@pytest.mark.usefixtures("broker")
async def test_figures_of_an_event_loop_need_no_await(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Consumer.open(run_dir, sequences=2) as consumer:
        consumer.log(1, loss=0.5)
        with pytest.raises(UsageError):
            consumer.log(1, loss="much")  # type: ignore[arg-type]
        queue = consumer._figures
        with monkeypatch.context() as patient:
            patient.setattr(figures_module, "LAST_S", math.inf)  # it ends by the last answer, not by a wait
            async with asyncio.timeout(WITHIN_S):
                await queue.close()
        assert not queue._queue


@pytest.mark.usefixtures("broker")
async def test_of_several_ranks_the_first_is_heard(run_dir: Path) -> None:
    async with Consumer.open(run_dir, sequences=2, consumer="b", rank=1, world_size=2) as consumer:
        consumer.log(1, loss=0.5)
        assert not consumer._figures._queue


def test_the_loop_ends_after_the_last_step_of_the_run(run_dir: Path) -> None:
    config = load(None, environ={}, assignments=["trainer.enabled=false", "trainer.steps=3"])
    with running_broker(config, RunLayout(run_dir)):
        with Producer.blocking(run_dir, env="mine", producer="p", group_size=2, slots=8) as producer:
            for number in range(8):
                rows = [[1, 2], [1, 3]]
                producer.send(
                    Group.build(f"g{number}", tokens=rows, mask=[[0, 1], [0, 1]], scores=[0.0, 1.0])
                )
        steps = []
        with Consumer.blocking(run_dir, sequences=2) as consumer:
            assert consumer.info.total_steps == 3
            for batch in consumer:
                steps.append(batch.step)
                batch.ack()
        with Consumer.blocking(run_dir, sequences=2) as consumer:
            assert list(consumer) == []
        with GroupConsumer.blocking(run_dir, batch_sequences=2, consumer="other") as groups:
            assert list(groups) == []
    assert steps == [1, 2, 3]
