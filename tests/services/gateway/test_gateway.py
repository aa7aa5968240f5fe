"""The gateway over HTTP, on a real broker: what Atropos' server does not do, or does otherwise."""

import asyncio
import gzip
import io
import json
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.services.gateway.site import ENVIRONMENT, TRAINER, Opened, configured, listening, scored

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.run import RunSection
from rolloutmq.schemas.errors import BrokerUnavailableError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.gateway import app, batch_server, broker_status, service
from rolloutmq.services.gateway.broker_status import BrokerStatus
from rolloutmq.services.gateway.web import http_io


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110 - what is asked for is another process's
            await asyncio.sleep(0.02)


async def test_batches_come_first_in_first_out_and_the_step_counts_them(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        for tag in range(6):
            assert await one.post("/scored_data", scored(tag, env_id=env)) == {"status": "received"}
        assert await one.get("/status") == {"current_step": 0, "queue_size": 6}
        assert await one.tags() == [0, 1]
        assert await one.get("/status") == {"current_step": 1, "queue_size": 4}
        assert await one.tags() == [2, 3]
        assert await one.tags() == [4, 5]
        assert await one.tags() is None
        assert await one.get("/status") == {"current_step": 3, "queue_size": 0}


async def test_what_others_did_keeps_nobody_waiting_and_is_counted(
    site: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FRESH_S", 60.0)
    monkeypatch.setattr(broker_status, "FRESH_S", 120.0)
    asks, answered, encodes = asyncio.Event(), asyncio.Event(), threading.Event()
    asks.set()
    ask, encoded = BrokerStatus._ask, app._encoded

    async def held(self: BrokerStatus, client: BrokerClient) -> None:
        await asks.wait()
        await ask(self, client)
        answered.set()

    def slow(group: Group, before: bytes) -> bytes:
        assert encodes.wait(10)
        return encoded(group, before)

    monkeypatch.setattr(BrokerStatus, "_ask", held)
    monkeypatch.setattr(app, "_encoded", slow)
    monkeypatch.setattr(http_io, "SMALL_BYTES", 0)  # all of it in threads
    monkeypatch.setattr(http_io, "LARGE_BYTES", 0)
    async with site() as one:
        await one.begin()
        env, other = await one.enrol(), await one.enrol()
        assert (await one.standing(env))["queue_size"] == 0
        asks.clear()
        await one.post("/scored_data_list", [scored(tag, env_id=other) for tag in range(3)])
        async with asyncio.timeout(30):
            assert (await one.standing(env))["queue_size"] == 3
        asks.set()
        answered.clear()
        batch = asyncio.create_task(one.tags())
        await answered.wait()
        asks.clear()
        encodes.set()
        assert await batch == [0, 1]
        async with asyncio.timeout(30):
            now = await one.standing(env)
        assert (now["queue_size"], now["current_step"]) == (1, 1)
        asks.set()


async def test_the_step_begins_where_the_trainer_begins(site: Opened) -> None:
    async with site() as one:
        await one.begin(starting_step=40)
        env = await one.enrol()
        assert (await one.standing(env))["current_step"] == 40
        await one.post("/scored_data_list", [scored(tag, env_id=env) for tag in range(2)])
        assert await one.tags() == [0, 1]
        assert (await one.standing(env))["current_step"] == 41


async def test_groups_of_any_size_make_batches(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol(group_size=3)
        for tag, size in enumerate([3, 3, 1, 2, 3]):
            answer = await one.post("/scored_data", scored(tag, size, env_id=env))
            assert answer == {"status": "received"}
        taken: list[int] = []

        async def came() -> bool:
            taken.extend(await one.tags() or [])
            return len(taken) == 4

        await until(came)
        assert sorted(taken) == [0, 1, 2, 4], (
            "three and one make four, three are a short batch, two wait for more"
        )


async def test_no_environment_starves_another(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        loud, quiet = await one.enrol(), await one.enrol(desired_name="quiet")
        await one.post("/scored_data_list", [scored(tag, env_id=loud) for tag in range(40)])
        await one.post("/scored_data_list", [scored(100 + tag, env_id=quiet) for tag in range(4)])
        first = [tag for _ in range(4) for tag in await one.tags() or []]
        assert sum(tag >= 100 for tag in first) >= 3


async def test_an_environment_that_vanished_loses_its_claim(site: Opened) -> None:
    async with site({"silent_env_s": 600.0}, absent_s=0.6) as one:
        await one.begin()
        env, gone = await one.enrol(min_batch_allocation=0.5), await one.enrol(min_batch_allocation=0.5)
        await one.post("/scored_data_list", [scored(tag, env_id=gone) for tag in range(1)])
        assert (await one.standing(env))["unallocated_fraction"] == 0.0

        async def given_up() -> bool:
            return bool((await one.standing(env))["unallocated_fraction"] == 0.5)

        await until(given_up)
        await one.post("/scored_data_list", [scored(10 + tag, env_id=env) for tag in range(3)])
        assert await one.tags() == [10, 11], "its half of the batch is not waited for"
        assert sorted(await one.tags() or []) == [0, 12], "and what it left fills up"
        assert (await one.standing(gone))["unallocated_fraction"] == 0.0, "it is back when it is heard"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"tokens":[[1]],"masks":[[1]],"scores":[NaN]}', ["body"]),
        (b'{"tokens":[[1]],"masks":[[1]],"scores":[-Infinity]}', ["body"]),
        (b'{"tokens":[[1]],"masks":[[1, 2]],"scores":[1]}', ["body", "masks"]),
        (b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"env_id":77}', ["body", "env_id"]),
        (b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"env_id":-1}', ["body", "env_id"]),
        (b'{"tokens":[[1]]', ["body"]),
    ],
)
async def test_what_cannot_be_is_refused_and_nothing_else_is_harmed(
    site: Opened, body: bytes, place: list[str]
) -> None:
    async with site() as one:
        await one.begin()
        await one.post("/scored_data", scored(1))
        async with one.session.post("/scored_data", data=body) as answer:
            assert answer.status == 422
            (detail,) = (await answer.json())["detail"]
            assert detail["loc"] == place
            assert detail["msg"]
        await one.post("/scored_data", scored(2))
        assert await one.tags() == [1, 2]


async def test_of_a_list_all_groups_are_taken_or_none(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        await one.post("/scored_data_list", [scored(1), scored(2, scores=[1.0])], 422)
        assert (await one.get("/status"))["queue_size"] == 0
        assert await one.post("/scored_data_list", []) == {"status": "received", "groups_processed": 0}


async def test_data_before_a_trainer_are_kept_for_it(site: Opened) -> None:
    async with site() as one:
        await one.post("/scored_data_list", [scored(1), scored(2)])
        await one.post("/register", TRAINER)
        assert await one.tags() == [1, 2]


async def test_a_second_registration_attaches_or_begins_another_run(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        await one.post("/scored_data_list", [scored(tag, env_id=env) for tag in range(4)])
        assert await one.tags() == [0, 1]
        first, second = await one.post("/register", TRAINER), await one.post("/register", TRAINER)
        assert first["uuid"] != second["uuid"]
        assert await one.get("/status") == {"current_step": 1, "queue_size": 2}
        await one.begin(batch_size=8)
        told = await one.get("/global-status")
        assert told["ledger"]["reasons"]["discarded(reset)"] == 2
        assert (await one.standing(env))["current_step"] == 0, "it goes on under its number"
        assert await one.enrol() == env + 1
        await one.post("/scored_data_list", [scored(tag, env_id=env) for tag in range(10, 14)])
        assert await one.tags() == [10, 11, 12, 13]


async def test_a_reset_forgets_and_nothing_breaks(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        await one.post("/scored_data", scored(1, env_id=env))
        async with one.session.get("/reset_data") as answer:
            assert (answer.status, await answer.text()) == (200, "Reset successful")
        assert (await one.get("/batch"))["status"] == "error"
        assert await one.get("/info") == {"batch_size": -1, "max_token_len": -1}
        assert await one.get("/status") == {"current_step": 0, "queue_size": 0}
        await one.begin()
        assert await one.enrol() == env + 1, "numbers are not given twice"
        await one.post("/scored_data_list", [scored(2, env_id=env), scored(3, env_id=env + 1)])
        assert sorted(await one.tags() or []) == [2, 3], "an old environment goes on"


async def test_a_status_is_asked_for_in_either_way(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        by_query = await one.get(f"/status-env?env_id={env}")
        assert by_query == await one.standing(env)
        assert set(by_query) == {
            *("current_step", "queue_size", "unallocated_fraction"),
            *("self_queue_size", "max_group_size", "env_weight"),
        }
        for asked, status in (("?env_id=5", 404), ("?env_id=x", 422), ("", 422)):
            async with one.session.get(f"/status-env{asked}") as answer:
                assert answer.status == status, asked


async def test_a_batch_that_was_not_taken_whole_comes_again(site: Opened) -> None:
    async with site() as one:
        await one.begin(batch_size=8)
        env = await one.enrol(group_size=8)
        wide = scored(1, 8, env_id=env) | {"images": "x" * (24 << 20)}
        async with one.session.post("/scored_data", data=io.BytesIO(json.dumps(wide).encode())) as posted:
            assert posted.status == 200
        session = aiohttp.ClientSession(one.session._base_url)
        answer = await session.get("/batch", headers={"Accept-Encoding": "identity"})
        assert await answer.content.read(1000)
        answer.close()
        await session.close()
        assert await one.tags() == [1]
        assert (await one.get("/status"))["current_step"] == 1
        ledger = (await one.get("/global-status"))["ledger"]
        assert (ledger["accepted"], ledger["leased"]) == (1, 0)


async def test_a_post_waits_for_room_and_is_refused_only_at_last(site: Opened) -> None:
    async with site({"high_bytes": 4 << 20, "max_group_bytes": 1 << 20}, post_wait_s=0.5) as one:
        await one.begin()
        env = await one.enrol()
        big: dict[str, Any] = {"images": "x" * 500_000, "env_id": env}
        tag = 0
        while True:
            async with one.session.post("/scored_data", json=scored(tag, **big)) as answer:
                if answer.status == 503:
                    assert answer.headers["Retry-After"]
                    break
                assert answer.status == 200
            tag += 1
        assert tag >= 4
        assert (await one.standing(env))["self_queue_size"] == tag
        refused, taken = tag, list[int]()
        while (more := await one.tags()) is not None:
            taken += more
            async with one.session.post("/scored_data", json=scored(tag, **big)) as answer:
                tag += answer.status == 200
        assert tag > refused, "there is room again when there are fewer"
        assert len(taken) >= refused - 1
        assert taken == list(range(len(taken)))


async def test_a_client_that_goes_while_it_waits_has_sent_nothing(site: Opened) -> None:
    async with site({"high_bytes": 4 << 20, "max_group_bytes": 1 << 20}, post_wait_s=600.0) as one:
        await one.begin()
        big: dict[str, Any] = {"images": "x" * 500_000}
        tag = 0
        while True:
            try:
                async with (
                    asyncio.timeout(1.0),
                    one.session.post("/scored_data", json=scored(tag, **big)) as answer,
                ):
                    assert answer.status == 200
            except TimeoutError:
                break
            tag += 1

        async def noticed() -> bool:
            return bool((await one.get("/status"))["queue_size"] == tag)

        await until(noticed)
        assert (await one.get("/global-status"))["ledger"]["accepted"] == tag
        taken = []
        while (more := await one.tags()) is not None:
            taken += more
        assert taken == list(range(tag - tag % 2))


async def test_the_latest_example_and_what_is_told_of_everything(site: Opened) -> None:
    async with site() as one:
        assert (await one.get("/latest_example"))["tokens"] == []
        await one.begin()
        env = await one.enrol()
        await one.post("/scored_data", scored(7, env_id=env, ref_logprobs=[]))
        latest = await one.get("/latest_example")
        assert latest["tokens"][0][0] == 7
        assert latest["ref_logprobs"] == []
        told = await one.get("/global-status")
        assert (told["queued_sequences"], told["num_connected_envs"]) == (2, 1)
        assert told["environments"][0]["queued_sequences"] == 2
        assert (await one.get("/health"))["status"] == "ok"
        async with one.session.get("/metrics") as answer:
            page = await answer.text()
        assert 'rolloutmq_queued_sequences{env="maths-0",split="train"} 2' in page
        assert "rolloutmq_gateway_groups_total 1" in page


async def test_groups_of_the_sdk_reach_its_trainer_too(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        async with Producer.open(one.layout.root, env="native", group_size=2) as producer:
            for number in range(2):
                await producer.send(
                    Group.build(
                        f"n{number}", tokens=[[number, 5], [number, 6]], mask=[[0, 1]] * 2, scores=[0.0, 1.0]
                    )
                )
            await producer.flush()
            batch = (await one.get("/batch"))["batch"]
        assert [group["masks"] for group in batch] == [[[-100, 5], [-100, 6]]] * 2


async def test_bodies_and_answers_are_compressed_as_clients_of_atropos_do(site: Opened) -> None:
    async with site() as one:
        await one.begin()
        body = gzip.compress(json.dumps([scored(tag) for tag in range(40)]).encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with one.session.post("/scored_data_list", data=body, headers=headers) as answer:
            assert (await answer.json())["groups_processed"] == 40
        async with one.session.post("/scored_data", data=b"junk", headers=headers) as answer:
            assert (answer.status, await answer.text()) == (400, "Invalid gzip payload")
        async with one.session.get("/openapi.json") as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            await answer.json()


async def test_bodies_without_end_are_refused(site: Opened) -> None:
    async with site(max_body_bytes=1000, max_inflated_bytes=2000) as one:
        async with one.session.post("/scored_data", data=b"x" * 1001) as answer:
            assert answer.status == 413
        headers = {"Content-Encoding": "gzip"}
        async with one.session.post(
            "/scored_data", data=gzip.compress(bytes(100_000)), headers=headers
        ) as answer:
            assert answer.status == 413
        await one.begin()  # it goes on working


async def test_a_restart_of_the_gateway_forgets_nothing(site: Opened, run_dir: Path) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        await one.post("/scored_data_list", [scored(tag, env_id=env) for tag in range(4)])
        assert await one.tags() == [0, 1]
    layout: RunLayout = one.layout
    with running_broker(configured(), layout):
        async with listening(run_dir) as again:
            assert (await again.standing(env))["current_step"] == 1
            assert (await again.get("/info"))["batch_size"] == 4
            await again.post("/scored_data", scored(4, env_id=env))
            assert await again.tags() == [2, 3]
            assert await again.enrol() == env + 1
            assert (await again.get("/latest_example"))["tokens"][0][0] == 4


async def test_while_the_broker_is_away_nobody_gets_an_error(site: Opened, run_dir: Path) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        await one.post("/scored_data", scored(0, env_id=env))
    with running_broker(configured(), one.layout):
        pass
    async with listening(run_dir) as away:
        held = [asyncio.create_task(away.standing(env)), asyncio.create_task(away.get("/status"))]
        held.append(asyncio.create_task(away.post("/register-env", ENVIRONMENT)))
        posting = asyncio.create_task(away.post("/scored_data", scored(1, env_id=env)))
        assert (await away.get("/batch"))["batch"] is None
        told = await away.get("/global-status")
        assert (told["broker"], told["environments"][0]["queued_sequences"]) == ("no broker", None)
        assert not any(one.done() for one in held), "an answer now would be made up"
        async with away.session.get("/health") as answer:
            assert (answer.status, (await answer.json())["status"]) == (503, "no broker")
        assert not posting.done()
        with running_broker(configured(), away.layout):
            standing, status, enrolled = [await one for one in held]
            assert status["queue_size"] >= 1
            assert standing["self_queue_size"] >= 1
            assert enrolled["status"] == "success"
            assert await posting == {"status": "received"}

            async def both() -> bool:
                return bool((await away.standing(env))["self_queue_size"] == 2)

            await until(both)
            tags: list[int] = []

            async def came() -> bool:
                tags.extend(await away.tags() or [])
                return tags == [0, 1]

            await until(came)


async def test_what_is_unknown_for_too_long_is_refused_and_never_made_up(site: Opened, run_dir: Path) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
        await one.post("/scored_data_list", [scored(tag, env_id=env) for tag in range(3)])
    async with listening(run_dir, post_wait_s=0.5) as away:
        for path in (f"/status-env?env_id={env}", "/status"):
            async with away.session.get(path) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
                assert "no answer" in (await answer.json())["detail"]
        async with away.session.post("/register-env", json=ENVIRONMENT) as answer:
            assert answer.status == 503


async def test_a_gateway_that_ends_answers_what_it_holds(site: Opened, run_dir: Path) -> None:
    async with site() as one:
        await one.begin()
        env = await one.enrol()
    async with aiohttp.ClientSession() as session:
        async with listening(run_dir) as away:
            url = f"{str(away.session._base_url).rstrip('/')}/status-env?env_id={env}"
            held = asyncio.create_task(session.get(url))
            assert (await away.get("/batch"))["batch"] is None
            assert not held.done()
        assert (await held).status == 503


async def test_the_sizes_of_a_trainer_on_the_bus_are_waited_for(site: Opened, run_dir: Path) -> None:
    async with site() as one, Consumer.open(one.layout.root, tokens=1000):
        await one.enrol()
        assert (await one.get("/info"))["batch_size"] >= 1, "an environment ends at -1"
    async with listening(run_dir) as away:
        asking = asyncio.create_task(away.get("/info"))
        assert (await away.get("/wandb_info"))["project"] is None, "environments ask again"
        assert not asking.done()
        with running_broker(configured(), away.layout):
            assert (await asking)["batch_size"] >= 1


async def test_while_the_broker_restarts_the_queue_is_as_long_as_it_was(run_dir: Path) -> None:
    layout, sizes = RunLayout(run_dir), set[int]()
    write_json(layout.config, configured())
    with ExitStack() as broker:
        broker.enter_context(running_broker(configured(), layout))
        async with listening(run_dir) as one:
            await one.begin(batch_size=100)
            env = await one.enrol()
            await one.post("/scored_data_list", [scored(tag, env_id=env) for tag in range(10)])
            assert (await one.standing(env))["queue_size"] == 10

            async def ask_on() -> None:
                while True:
                    sizes.add((await one.standing(env))["queue_size"])
                    sizes.add((await one.get("/status"))["queue_size"])

            asking = asyncio.create_task(ask_on())
            for _ in range(2):
                await asyncio.to_thread(broker.close)

                async def away() -> bool:
                    async with one.session.get("/health") as answer:
                        return answer.status == 503

                await until(away)
                broker.enter_context(running_broker(configured(), layout))

                async def back() -> bool:
                    return not await away()

                await until(back)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
    assert sizes == {10}


async def test_a_web_page_of_another_origin_gets_no_leave_unless_it_is_asked_for(site: Opened) -> None:
    async with site(cors_origins=("http://board",)) as one:
        for origin, allowed in (("http://board", True), ("http://evil", False)):
            async with one.session.get("/status", headers={"Origin": origin}) as answer:
                assert ("Access-Control-Allow-Origin" in answer.headers) == allowed
            async with one.session.options("/register", headers={"Origin": origin}) as answer:
                assert ("Access-Control-Allow-Origin" in answer.headers) == allowed


async def test_what_is_not_there_is_said_as_there(site: Opened) -> None:
    async with site() as one:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/register", 405),
            ("POST", "/batch", 405),
        ):
            async with one.session.request(method, path) as answer:
                assert answer.status == status
                assert (await answer.json())["detail"] in {"Not Found", "Method Not Allowed"}


async def test_a_group_that_is_too_large_is_said_to_be(site: Opened) -> None:
    async with site({"max_group_bytes": 1 << 16}) as one:
        answer = await one.post("/scored_data", scored(1, images="x" * 100_000), 413)
        assert "bytes" in answer["detail"]


async def test_of_a_list_with_a_group_that_is_too_large_none_is_taken(site: Opened) -> None:
    async with site({"max_group_bytes": 1 << 16}) as one:
        await one.begin()
        env = await one.enrol()
        several = [scored(1, env_id=env), scored(2), scored(3, images="x" * 100_000)]
        await one.post("/scored_data_list", several, 413)
        assert (await one.get("/status"))["queue_size"] == 0
        await one.post("/scored_data_list", several[:2])
        assert sorted(await one.tags() or ()) == [1, 2]


async def test_numbers_beyond_all_bounds_stand_for_none_and_no_restart_falls_over_them(
    site: Opened, run_dir: Path
) -> None:
    endless = int(1e30)
    async with site() as one:
        await one.begin(max_token_len=endless, num_steps=endless, batch_size=4)
        env = await one.enrol(max_token_length=endless, group_size=endless)
        await one.post("/scored_data", scored(1, env_id=env))
        for field in ("weight", "min_batch_allocation"):
            await one.post("/register-env", {**ENVIRONMENT, field: "inf"}, 422)
        assert (await one.get("/info"))["max_token_len"] >= 1 << 50
    with running_broker(configured(), one.layout):
        async with listening(run_dir) as later:
            await later.post("/scored_data", scored(2, env_id=env))
            assert await later.tags() == [1, 2]


async def test_what_went_never_comes_again_though_it_is_leased_with_others(
    site: Opened, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def died(*_: object) -> None:
        """What a gateway does that is killed before the broker hears of its batch."""

    async with site() as one:
        await one.begin()
        envs = [await one.enrol() for _ in range(3)]
        for tag in range(9):
            await one.post("/scored_data", scored(tag, env_id=envs[tag % 3]))
        with monkeypatch.context() as killed:
            killed.setattr(batch_server.BatchServer, "_settle", died)
            taken = await one.tags() or []
            assert len(taken) == 2
    with running_broker(configured(), one.layout):
        async with listening(run_dir) as later:
            filler = 100
            while not {*taken} >= {*range(9)}:
                await later.post("/scored_data", scored(filler, env_id=envs[0]))
                filler += 1
                taken += await later.tags() or []
            ledger = (await later.get("/global-status"))["ledger"]
    assert len(taken) == len({*taken})
    assert ledger["discarded"] == ledger["expired"] == ledger["dead"] == 0


async def test_a_reset_that_fails_changes_nothing(site: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as one:
        await one.begin()
        await one.post("/scored_data_list", [scored(1), scored(2)])

        async def away(*_: object) -> None:
            raise BrokerUnavailableError("serve", 10.0)

        with monkeypatch.context() as broken:
            broken.setattr(BrokerStatus, "request", away)
            async with one.session.get("/reset_data") as answer:
                assert answer.status == 503
        taken: list[int] | None = None

        async def came() -> bool:
            nonlocal taken
            taken = await one.tags()
            return taken is not None

        await until(came)
        assert taken == [1, 2]


async def test_a_post_that_waits_keeps_its_environment_and_survives_its_leaving(site: Opened) -> None:
    async with site(
        {"high_bytes": 4 << 20, "max_group_bytes": 1 << 20}, absent_s=0.5, post_wait_s=600.0
    ) as one:
        await one.begin()
        env = await one.enrol()
        posts = [
            asyncio.create_task(one.post("/scored_data", scored(tag, env_id=env, images="x" * 500_000)))
            for tag in range(12)
        ]

        async def full() -> bool:
            return bool((await one.get("/status"))["queue_size"] == len(posts))

        await until(full)
        await asyncio.sleep(1.0)  # twice as long as one who says nothing is there
        assert (await one.get("/global-status"))["num_connected_envs"] == 1
        assert not all(post.done() for post in posts)
        await one.post("/disconnect-env", {"env_id": env})
        taken = list[int]()
        while len(taken) < len(posts):
            taken += await one.tags() or ()
        assert sorted(taken) == list(range(len(posts)))
        assert [(await post)["status"] for post in posts] == ["received"] * len(posts)


async def test_who_asks_while_another_reads_hears_in_good_time_that_there_is_nothing(
    site: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_server, "PULL_S", 0.2)
    async with site({"high_bytes": 1 << 30}) as one:
        await one.begin(batch_size=8)
        env = await one.enrol(group_size=8)
        wide = scored(1, 8, env_id=env) | {"images": "x" * (24 << 20)}
        async with one.session.post("/scored_data", data=io.BytesIO(json.dumps(wide).encode())) as posted:
            assert posted.status == 200
        async with one.session.get("/batch", headers={"Accept-Encoding": "identity"}) as slow:
            assert await slow.content.read(1000)
            assert await one.tags() is None
            assert (await one.get("/status"))["queue_size"] == 1, "it is not handed out yet"
            rest = await slow.content.read()
        assert len(rest) + 1000 > 24 << 20
        assert (await one.get("/status"))["queue_size"] == 0


async def test_a_very_large_batch_begins_to_come_at_once_and_the_others_go_on(site: Opened) -> None:
    async with site({"high_bytes": 1 << 30}) as one:
        await one.begin(batch_size=128)
        env = await one.enrol(group_size=16)
        row = list(range(32_000, 40_192))
        wide = {"tokens": [row] * 16, "masks": [row] * 16, "inference_logprobs": [[-0.123456789] * 8192] * 16}
        body = json.dumps(scored(1, 16, env_id=env) | wide).encode()
        for _ in range(8):
            async with one.session.post("/scored_data", data=io.BytesIO(body)) as posted:
                assert posted.status == 200
        begun = time.monotonic()
        async with one.session.get("/batch", headers={"Accept-Encoding": "identity"}) as answer:
            assert answer.headers["Transfer-Encoding"] == "chunked"
            size = first = len(await answer.content.readany())
            assert time.monotonic() - begun < 10.0, "as Atropos' trainers wait"
            async for part in answer.content.iter_any():
                size += len(part)
        assert size > 8 * 0.7 * len(body), "about 40 MB, all of it"
        assert first < size / 8, "its length does not grow with the batch"


async def test_environments_may_be_theirs_while_the_trainer_pulls_from_the_bus(site: Opened) -> None:
    async with site() as one:
        assert await one.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
        info = RunInfo(total_steps=9, max_tokens=64)
        assert await one.get("/wandb_info") == {"group": None, "project": None}
        async with Consumer.open(one.layout.root, sequences=4, info=info) as trainer:
            assert await one.get("/wandb_info") == {"group": None, "project": "run"}, (
                "W&B takes no empty name"
            )
            assert await one.get("/info") == {"batch_size": 4, "max_token_len": 64}
            env = await one.enrol()
            await one.post("/scored_data_list", [scored(tag, env_id=env) for tag in range(2)])
            batch = await anext(trainer)
            assert sorted(int(group["tokens"][0][0]) for group in batch.groups) == [0, 1]
            assert batch.groups[0]["mask"][0].tolist() == [-100, 5]
            await batch.ack()
            assert (await one.standing(env))["current_step"] == 1


async def test_the_project_is_that_of_whoever_names_one(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    named = configured()
    named = named.model_copy(update={"run": RunSection(tracking_project="P", tracking_group="G")})
    write_json(layout.config, named)
    with running_broker(named, layout):
        async with listening(run_dir) as one:
            assert await one.get("/wandb_info") == {"group": "G", "project": "P"}, "no trainer is needed"
            info = RunInfo(tracking_project="of the trainer")
            async with Consumer.open(layout.root, sequences=4, info=info):
                assert (await one.get("/wandb_info"))["project"] == "of the trainer"
            await one.begin()
            assert await one.get("/wandb_info") == {"group": "g", "project": "p"}
            async with one.session.get("/reset_data") as answer:
                assert answer.status == 200
            assert (await one.get("/wandb_info"))["project"] == "P"


async def test_a_batch_that_fails_is_an_error_or_is_cut_off_and_comes_again(
    site: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site() as one:
        await one.begin()
        await one.post("/scored_data_list", [scored(1), scored(2)])
        with monkeypatch.context() as broken:
            broken.setattr(app, "from_group", lambda _: 1 / 0)
            with pytest.raises(aiohttp.ClientPayloadError):
                await one.get("/batch")
        with monkeypatch.context() as broken:
            broken.setattr(app, "_parts", lambda _: 1 / 0)
            async with one.session.get("/batch") as answer:
                assert answer.status == 500
                assert "internal error; see the gateway's log" in (await answer.json())["detail"]
        assert await one.tags() == [1, 2]
