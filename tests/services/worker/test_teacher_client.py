"""The teacher client: requests, an unavailable teacher, fatal errors, and reported waits."""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.tokenizer_fingerprint import fingerprint
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    ConfigError,
    EnvironmentFailedError,
    TeacherFailedError,
    TeacherRefusedError,
    TokenizerMismatchError,
    VocabularyMismatchError,
)
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import GetStatus, Pressure, StatusReply, WorkerState
from rolloutmq.schemas.wire.distillation import (
    IDS_COLUMN,
    LOGPROBS_COLUMN,
    TOKENIZER_COLUMN,
    TeacherLogprobs,
    TeachReply,
    TeachRequest,
)
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.monitor.status import waits
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.worker.runtime import Worker
from rolloutmq.services.worker.teacher_client import TeacherClient

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer

DEADLINE_S = 60.0
ENVIRONMENT = """
from rolloutmq import SingleTurn

class Echo(SingleTurn):
    def task(self, rng):
        return "q"

    def prompt(self, task):
        return task

    def score(self, task, completion):
        return float(len(completion.text))
"""


LOST = -1
"""Instead of a status: the connection ends."""


class FakeTeacher:
    """Says of every place that its token and the next one are likely.

    Attributes:
        failures: Statuses that the next requests get instead of an answer; `LOST` is an answer that breaks off.
        silent: It answers no question.
        well: What it says of its health.
        away: Status that every request gets until it is 0.
        asked: The requests so far.
        k: Entries that it claims to give.
        code: What it calls its refusals.
    """

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.away = 0
        self.silent = False
        self.well = True
        self.asked: list[TeachRequest] = []
        self.k = 2
        self.code = "some_error"
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeTeacher"]:
        app = web.Application()
        app.router.add_post("/v1/token_logprobs", self._teach)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.well else 503)

    async def _teach(self, request: web.Request) -> web.Response:
        asked = msgspec.msgpack.decode(await request.read(), type=TeachRequest)
        self.asked.append(asked)
        status = self.away or (self.failures.pop(0) if self.failures else 0)
        if self.silent:
            await asyncio.sleep(3600.0)
        if status == LOST:
            assert request.transport is not None
            request.transport.abort()
        elif status:
            return web.Response(
                status=status,
                body=json.dumps({"error": {"message": f"told {status}", "code": self.code}}).encode(),
            )
        tokens = np.frombuffer(asked.tokens, "<i4")[np.frombuffer(asked.wanted, np.uint8).astype(bool)]
        ids = np.stack([tokens, tokens + 1], -1).astype("<i4")
        reply = TeachReply(
            model="fake",
            k=self.k,
            token_ids=ids.tobytes(),
            logprobs=np.full(ids.shape, -1.0, "<f4").tobytes(),
        )
        return web.Response(body=msgspec.msgpack.encode(reply))


@pytest.fixture
async def fake() -> AsyncIterator[FakeTeacher]:
    async with FakeTeacher().listening() as made:
        yield made


def configured(layout: RunLayout, url: str, **changed: Any) -> RunConfig:
    config = RunConfig.model_validate(
        {
            "environment": {
                "echo": {"entry": "env.py:Echo", "group_size": 4, "concurrency": 2, "pacing": False} | changed
            },
            "teacher": {"url": url, "retry_s": 0.02},
            "trainer": {"distillation": {"kind": "top_k", "top_k": 2}},
            "orchestrator": {"drain_deadline_s": 5.0},
            "base_dir": str(layout.root),
        }
    )
    write_json(layout.config, config)
    (layout.root / "env.py").write_text(ENVIRONMENT)
    layout.model.mkdir()
    (layout.model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    return config


def with_teacher(config: RunConfig, **changed: Any) -> RunConfig:
    return config.model_copy(update={"teacher": config.teacher.model_copy(update=changed)})


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def some_group() -> Group:
    return Group.build("g", tokens=[[1, 2, 3], [4, 5]], mask=[[1, 0, 1], [0, 1]], scores=[0.0, 1.0])


async def test_it_asks_for_the_trained_tokens_in_its_students_name(
    layout: RunLayout, fake: FakeTeacher
) -> None:
    config = configured(layout, fake.url + "/v1/")
    async with TeacherClient.opened(config, layout) as teacher:
        group = await teacher.teach(some_group())
    (asked,) = fake.asked
    assert (asked.tokenizer, asked.teacher_logprobs, asked.top_k) == (
        fingerprint(layout.model),
        TeacherLogprobs.TOP_K,
        2,
    )
    assert asked.wanted == b"\0\0\1\0\1"  # nothing predicts a first token
    assert [[cell.tolist() for cell in row] for row in group[IDS_COLUMN]] == [[[], [], [3, 4]], [[], [5, 6]]]
    assert [len(row) for row in group[LOGPROBS_COLUMN]] == [3, 2]
    assert group[TOKENIZER_COLUMN] == [fingerprint(layout.model)] * 2


async def test_labels_are_read_as_the_trainer_reads_them(layout: RunLayout, fake: FakeTeacher) -> None:
    """-100 says that a token is not trained; a token with the id 0 is."""
    group = Group.build("g", tokens=[[1, 2, 0], [4, 5]], mask=[[-100, -100, 0], [-100, 5]], scores=[0.0, 1.0])
    async with TeacherClient.opened(configured(layout, fake.url), layout) as teacher:
        taught = await teacher.teach(group)
    assert fake.asked[0].wanted == b"\0\0\1\0\1"
    assert [len(cell) for row in taught[IDS_COLUMN] for cell in row] == [0, 0, 2, 0, 2]


@pytest.mark.parametrize("status", [429, 500, 502, 503, LOST])
async def test_what_passes_by_itself_is_waited_for(layout: RunLayout, fake: FakeTeacher, status: int) -> None:
    fake.failures = [status] * 3
    async with TeacherClient.opened(configured(layout, fake.url), layout) as teacher:
        assert IDS_COLUMN in await teacher.teach(some_group())
        assert teacher.retries == 3


@pytest.mark.parametrize(("status", "told"), [(500, "told 500"), (507, "status 507"), (LOST, "ServerDisc")])
async def test_a_group_that_a_teacher_fails_on_is_given_up(
    layout: RunLayout, fake: FakeTeacher, status: int, told: str
) -> None:
    fake.failures = [503, status, 429, status, 502, status]  # while it is away nothing is counted
    config = with_teacher(configured(layout, fake.url), attempts=3)
    async with TeacherClient.opened(config, layout) as teacher, asyncio.timeout(DEADLINE_S):
        with pytest.raises(TeacherFailedError, match=f"failed 3 times on a group, the last with: .*{told}"):
            await teacher.teach(some_group())
        assert len(fake.asked) == 6
        assert IDS_COLUMN in await teacher.teach(some_group()), "what else it is asked it answers"


async def test_silence_counts_where_the_teacher_is_well(
    layout: RunLayout, fake: FakeTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.services.worker.teacher_client.SILENT_S", 0.05)
    config = with_teacher(configured(layout, fake.url), attempts=2)
    fake.silent, fake.well = True, False
    async with TeacherClient.opened(config, layout) as teacher, asyncio.timeout(DEADLINE_S):
        asking = asyncio.create_task(teacher.teach(some_group()))
        await until(lambda: len(fake.asked) > 4)
        assert not asking.done(), "it hangs, and the group waits"
        fake.well = True
        with pytest.raises(TeacherFailedError, match="failed 2 times"):
            await asking


async def test_what_speaks_another_protocol_or_has_no_address_is_no_teacher(
    layout: RunLayout, fake: FakeTeacher
) -> None:
    async def gibberish(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(gibberish, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = with_teacher(configured(layout, fake.url), attempts=2, url=url)
        async with TeacherClient.opened(config, layout) as teacher, asyncio.timeout(DEADLINE_S):
            with pytest.raises(TeacherFailedError, match="failed 2 times"):
                await teacher.teach(some_group())
    async with TeacherClient.opened(with_teacher(config, url="127.0.0.1:nothing"), layout) as teacher:
        with pytest.raises(ConfigError, match=r"teacher\.url: 127\.0\.0\.1:nothing is not the address"):
            await teacher.teach(some_group())


async def test_a_teacher_without_an_address_and_a_student_without_a_tokenizer_are_waited_for(
    layout: RunLayout, fake: FakeTeacher
) -> None:
    config = configured(layout, "")
    config = with_teacher(config, path="some")
    tokenizer = layout.model / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.unlink()
    async with TeacherClient.opened(config, layout) as teacher, asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(teacher.teach(some_group()))
        await until(lambda: "not published its address" in teacher.wait(float("inf")))
        write_json(layout.teacher, InferenceAddress(url=fake.url, pid=1))
        await until(lambda: "tokenizer.json does not exist yet" in teacher.wait(float("inf")))
        tokenizer.write_text(text)
        assert IDS_COLUMN in await waiting


async def test_refusals_are_told_from_other_tokenizers(layout: RunLayout, fake: FakeTeacher) -> None:
    fake.failures = [400, 404, 409]
    async with TeacherClient.opened(configured(layout, fake.url), layout) as teacher:
        with pytest.raises(TeacherRefusedError, match="status 400: told 400"):
            await teacher.teach(some_group())
        with pytest.raises(TeacherRefusedError, match=r"for a vLLM see teacher\.vllm_url"):
            await teacher.teach(some_group())
        with pytest.raises(TokenizerMismatchError, match="teacher: told 409"):
            await teacher.teach(some_group())
        fake.k = 3
        with pytest.raises(TeacherRefusedError, match="must have 3 entries for each of 2 tokens"):
            await teacher.teach(some_group())
        assert teacher.wait(float("inf")) == ""


async def test_a_teacher_of_another_vocabulary_is_known_at_the_first_question(
    layout: RunLayout, fake: FakeTeacher
) -> None:
    config = configured(layout, fake.url)
    config.trainer.distillation.__dict__["kind"] = "full"
    fake.code, fake.failures = "vocabulary_mismatch", [409]
    async with TeacherClient.opened(config, layout) as teacher, asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(teacher.teach(some_group()))
        await until(lambda: "config.json does not exist yet" in teacher.wait(float("inf")))
        (layout.model / "config.json").write_text('{"vocab_size": 32}')
        with pytest.raises(VocabularyMismatchError, match="teacher: told 409"):
            await waiting
        assert [asked.vocabulary for asked in fake.asked] == [32]


async def test_a_wait_is_told_once_it_lasts(layout: RunLayout, fake: FakeTeacher) -> None:
    fake.away = 503
    async with (
        TeacherClient.opened(configured(layout, fake.url), layout) as teacher,
        asyncio.timeout(DEADLINE_S),
    ):
        waiting = [asyncio.create_task(teacher.teach(some_group())) for _ in range(3)]
        await until(lambda: teacher.retries > 2)
        now = time.monotonic()
        assert teacher.wait(now - 60) == ""
        told = teacher.wait(now + 60)
        assert told.startswith("3 groups for the teacher, the longest for 60 s: ")
        assert told.endswith(f"{fake.url}: status 503, told 503")
        fake.away = 0
        await asyncio.gather(*waiting)
        assert teacher.wait(now + 60) == ""


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of other tasks
        await asyncio.sleep(0.005)


async def pressure_of(endpoint: str) -> Pressure:
    async with BrokerClient(endpoint) as client:
        reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure


async def test_a_teacher_that_is_away_is_seen_and_costs_no_group(
    layout: RunLayout, fake: FakeTeacher, server: "FakeServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.services.worker.teacher_client.SLOW_S", 0.0)
    fake.away = 503
    config = configured(layout, fake.url, rollout_timeout_s=0.5)  # no deadline of a rollout is the teacher's
    write_json(layout.inference, InferenceAddress(url=server.url, pid=os.getpid()))
    with running_broker(config, layout) as broker:
        worker = Worker(layout.root, "echo-0")
        living = asyncio.create_task(worker.run(Stop()))
        async with asyncio.timeout(2 * DEADLINE_S):
            while True:
                pressure = await pressure_of(broker.endpoints.serve)
                if pressure.workers and "for 1 s" in pressure.workers[0].waits_for:
                    break
            assert "workers wait: teacher_away, worker echo-0: 2 groups for the teacher" in waits.explain(
                pressure
            )
            assert pressure.workers[0].state is WorkerState.READY
            assert pressure.ledger.accepted == 0
            fake.away = 0
            async with Consumer.open(layout.root, sequences=8) as consumer:
                batch = await consumer.pull(1, PolicyVersion())
            for group in batch.groups:
                assert group.columns[IDS_COLUMN].lengths[1].tolist() == [0, 0, 0, 2, 2] * 4
                tokens = group.columns["tokens"].values.reshape(4, 5)[:, 3:]
                np.testing.assert_array_equal(
                    group.columns[IDS_COLUMN].values.reshape(4, 2, 2)[:, :, 0], tokens
                )
            worker.start_draining()
            await living
    assert worker.beat().abandoned == 0
    assert worker.state is WorkerState.GONE


async def test_a_group_that_is_given_up_leaves_the_books_exact(
    layout: RunLayout, fake: FakeTeacher, server: "FakeServer"
) -> None:
    fake.failures = [500, 500, 400]
    config = with_teacher(configured(layout, fake.url, concurrency=1), attempts=2)
    write_json(layout.config, config)
    write_json(layout.inference, InferenceAddress(url=server.url, pid=os.getpid()))
    with running_broker(config, layout) as broker:
        worker = Worker(layout.root, "echo-0")
        living = asyncio.create_task(worker.run(Stop()))
        async with asyncio.timeout(2 * DEADLINE_S):
            async with Consumer.open(layout.root, sequences=8) as consumer:
                await (await consumer.pull(1, PolicyVersion())).ack()
            worker.start_draining()
            await living
            pressure = await pressure_of(broker.endpoints.serve)
    (told,), beat, ledger = pressure.workers, worker.beat(), pressure.ledger
    assert (told.abandoned, told.untaught, beat.untaught) == (2, 2, 2)
    assert beat.error == "teacher: request refused with status 400: told 400"
    assert ledger.accepted == beat.produced == ledger.queued + ledger.trained + ledger.committed
    assert pressure.lanes[0].granted == 0


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (500, EnvironmentFailedError, "teacher: failed 2 times on a group, the last with: .*told 500"),
        (409, TokenizerMismatchError, "told 409"),
        (400, EnvironmentFailedError, "teacher: request refused with status 400: told 400"),
    ],
)
async def test_what_no_pause_can_heal_ends_the_worker_with_the_reason(
    layout: RunLayout,
    fake: FakeTeacher,
    server: "FakeServer",
    status: int,
    error: type[Exception],
    told: str,
) -> None:
    fake.away = status
    config = with_teacher(configured(layout, fake.url, failure_limit=3), attempts=2)
    write_json(layout.config, config)
    write_json(layout.inference, InferenceAddress(url=server.url, pid=os.getpid()))
    with running_broker(config, layout):
        worker = Worker(layout.root, "echo-0")
        with pytest.raises(error, match=told):
            async with asyncio.timeout(DEADLINE_S):
                await worker.run(Stop())
    assert worker.state is WorkerState.FAILED
    assert re.search(told, worker.beat().error)
