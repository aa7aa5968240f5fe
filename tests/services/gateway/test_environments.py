"""Environments of the gateway over HTTP, on a real broker: more of them than fit, one after the other and at once."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.services.gateway.site import ENVIRONMENT, TRAINER, Opened, Site, scored

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.schemas.wire.requests import Request
from rolloutmq.services.broker.requests import vacancies
from rolloutmq.services.gateway import producers, registry, service
from rolloutmq.services.gateway.broker_status import BrokerStatus

LIMIT = 6
KEPT = 2
MANY = 24
SLOW_S = 0.1
"""Answer of a broker with much to do."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits of broker and gateway."""
    monkeypatch.setattr(vacancies, "LANES_LIMIT", LIMIT)
    monkeypatch.setattr(vacancies, "VACANT_KEPT", KEPT)
    monkeypatch.setattr(registry, "GONE_KEPT", KEPT)
    monkeypatch.setattr(service, "SWEEP_S", 0.05)


async def trained(one: Site, *tags: int) -> None:
    """Be a trainer that takes a batch with these groups."""
    async with asyncio.timeout(20):
        while (taken := await one.tags()) is None:  # noqa: ASYNC110 - the batch is another process's
            await asyncio.sleep(0.02)
    assert sorted(taken) == sorted(tags)


async def visit(one: Site, tag: int) -> int:
    """Be an environment that registers, posts two groups for a batch, and leaves."""
    env = await one.enrol(desired_name=f"visitor {tag}")
    await one.post("/scored_data_list", [scored(tag, env_id=env), scored(tag + 1, env_id=env)])
    await trained(one, tag, tag + 1)
    await one.post("/disconnect-env", {"env_id": env})
    return env


@pytest.mark.usefixtures("small")
async def test_any_number_of_environments_may_come_one_after_the_other(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        numbers = [await visit(one, 10 * visitor) for visitor in range(3 * LIMIT)]
        assert numbers == list(range(3 * LIMIT))
        book = json.loads(RunLayout(one.layout.root).registrations.read_bytes())
        assert len(book["environments"]) <= KEPT + 1
        assert await one.post("/status-env", {"env_id": 0}, status=404)
        assert (await one.standing(numbers[-1]))["queue_size"] == 0


@pytest.mark.usefixtures("small")
async def test_one_too_many_is_refused_when_it_registers(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        present = [await one.enrol(desired_name=f"e{number}") for number in range(LIMIT)]
        async with one.session.post("/register-env", json=ENVIRONMENT) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "2")
            assert "environments: no room for another one" in (await answer.json())["detail"]
        for env in present:
            await one.post("/scored_data", scored(env, env_id=env))
        await one.post("/register-env", ENVIRONMENT, status=503)
        await trained(one, 0, 1)
        await one.post("/disconnect-env", {"env_id": present[0]})
        async with asyncio.timeout(20):
            while not (await registered(one)):  # noqa: ASYNC110 - the broker tells it a moment later
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("on_the_bus", [False, True])
async def test_many_that_register_at_once_do_not_wait_for_one_another(
    site: Opened, monkeypatch: pytest.MonkeyPatch, on_the_bus: bool
) -> None:
    ask, request, asked, under_way = BrokerStatus._ask, BrokerStatus.request, 0, 0
    most = 0

    async def slow_ask(self: BrokerStatus, client: BrokerClient) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(SLOW_S)
        await ask(self, client)

    async def slow_request(self: BrokerStatus, message: Request, timeout_s: float) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(SLOW_S)
        under_way -= 1
        return await request(self, message, timeout_s)

    async with site() as one, AsyncExitStack() as stack:
        if on_the_bus:
            await stack.enter_async_context(Consumer.open(one.layout.root, sequences=4))
        else:
            await one.begin()
        monkeypatch.setattr(BrokerStatus, "_ask", slow_ask)
        monkeypatch.setattr(BrokerStatus, "request", slow_request)
        numbers = await asyncio.gather(*(one.enrol() for _ in range(MANY)))
    assert sorted(numbers) == list(range(MANY))
    assert asked < MANY / 2  # one answer is for all that wait for it
    assert most > MANY / 2 if on_the_bus else not most


async def registered(one: Site) -> bool:
    async with one.session.post("/register-env", json=ENVIRONMENT) as answer:
        return answer.status == 200


@pytest.mark.usefixtures("small")
async def test_a_group_that_finds_no_lane_is_answered_as_one_without_room(
    site: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        monkeypatch.setattr(vacancies, "LANES_LIMIT", 0)
        async with one.session.post("/scored_data", json=scored(1, env_id=env)) as answer:
            assert answer.status == 503
            assert "the limit" in (await answer.json())["detail"]
        monkeypatch.setattr(vacancies, "LANES_LIMIT", LIMIT)
        await one.post("/scored_data", scored(1, env_id=env))


async def test_idle_producers_close_where_descriptors_are_few(
    site: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    make_room = producers.EnvProducers._make_room

    async def counted(self: producers.EnvProducers) -> None:
        await make_room(self)
        counts.append(sum(producer.is_open for producer in self))

    monkeypatch.setattr(producers.EnvProducers, "_make_room", counted)
    monkeypatch.setattr(service, "most_open", lambda: 3)
    async with site() as one:
        await one.begin(batch_size=40)
        present = [await one.enrol(desired_name=f"e{number}") for number in range(10)]
        for _ in range(2):
            for env in present:
                await one.post("/scored_data", scored(env, env_id=env))
        assert max(counts) == 2
        assert len(counts) == 20
        await trained(one, *present, *present)


async def test_a_post_is_refused_while_every_producer_is_in_use(
    site: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "most_open", lambda: 1)
    async with site({"high_groups": 1}) as one:
        await one.begin()
        first, second = await one.enrol(), await one.enrol()
        await one.post("/scored_data", scored(1, env_id=first))
        held: asyncio.Task[Any] = asyncio.create_task(one.post("/scored_data", scored(2, env_id=first)))
        async with asyncio.timeout(20):
            while (await one.get("/status"))["queue_size"] < 2:  # noqa: ASYNC110 - see ON_ITS_WAY_S
                await asyncio.sleep(0.02)
        answer = await one.post("/scored_data", scored(3, env_id=second), status=503)
        assert "producers that the descriptors allow" in answer["detail"]
        held.cancel()


@pytest.mark.parametrize(
    "claims",
    [
        {"min_batch_allocation": 1e308},
        {"min_batch_allocation": -0.5},
        {"min_batch_allocation": 1.5},
        {"desired_name": "x" * 1000},
        {"weight": 1e308},
    ],
)
async def test_claims_beyond_their_bounds_are_refused_and_others_are_served(
    site: Opened, claims: dict[str, Any]
) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        answer = await one.post("/register-env", {**ENVIRONMENT, **claims}, status=422)
        assert [problem["loc"] for problem in answer["detail"]] == [["body", *claims]]
        assert (await one.standing(env))["unallocated_fraction"] == 1.0
        assert one.layout.registrations.stat().st_size < 4096


@pytest.mark.parametrize("settings", [{"starting_step": -5}, {"batch_size": 1 << 62}, {"batch_size": 0}])
async def test_a_trainer_beyond_the_bounds_of_the_bus_is_refused_when_it_registers(
    site: Opened, settings: dict[str, Any]
) -> None:
    async with site() as one:
        answer = await one.post("/register", {**TRAINER, **settings}, status=422)
        assert [problem["loc"] for problem in answer["detail"]] == [["body", *settings]]
        await one.begin()


async def test_a_group_nested_too_deeply_is_refused_and_the_next_batch_comes(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        for levels in (65, 900, 20_000):
            images = "[" * levels + "]" * levels
            body = json.dumps(scored(1)).removesuffix("}") + f', "images": {images}}}'
            async with one.session.post("/scored_data", data=body) as answer:
                assert answer.status == 422, await answer.text()
        deep = json.loads("[" * 64 + "]" * 64)
        await one.post("/scored_data_list", [scored(1, images=deep), scored(2)])
        batch = (await one.get("/batch"))["batch"]
        assert batch[0]["images"] == deep
