"""The teacher of a run: a frozen model that scores the students' tokens for the workers.

    [teacher] path      --> TeacherScorer <--(thread)-- Batcher <-- POST /v1/token_logprobs <-- workers
              vllm_url  --> a vLLM with the model of `path` <-- VllmScorer <-- the same

It is a process with its own address file, `teacher.json`. It serves students of its own tokenizer only: it compares the
tokenizer of its run before it listens, and each request carries a fingerprint. After a restart it takes the same port;
while it is away, workers keep their groups and wait.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch
from aiohttp import web

from rolloutmq.bus.rundir import FILE_POLL_S, load_run
from rolloutmq.bus.tokenizer_fingerprint import (
    fingerprint,
    student_directory,
    student_files,
    student_model,
    vocabulary,
)
from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.schemas.config.distillation import TeacherConfig
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.errors import ConfigError, TokenizerMismatchError, VocabularyMismatchError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.distillation import TEACH_PATH, TeachReply, TeachRequest
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.http_server.access import HttpAccess, access_of
from rolloutmq.services.http_server.listening import listening
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.tls import server_tls
from rolloutmq.services.inference.app import first
from rolloutmq.services.inference.batcher import Batcher
from rolloutmq.services.inference.heartbeat import EngineHeartbeat
from rolloutmq.services.inference.openai import responses
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.server import Handler, application, port_before, replied
from rolloutmq.services.inference.teacher.scoring import (
    ScoreRequest,
    TeacherLimits,
    TeacherScorer,
    question_of,
)
from rolloutmq.services.inference.teacher.vllm_scorer import VllmScorer
from rolloutmq.services.process.descriptors import raise_descriptor_limit
from rolloutmq.services.process.latency_publisher import publishing, recorder_of
from rolloutmq.services.process.latency_recorder import LatencyRecorder
from rolloutmq.services.process.runner import Stop, run_service
from rolloutmq.trainer.policy.model import build_policy, policy_positions, policy_vocabulary

logger = logging.getLogger(__name__)

MSGPACK: Final = "application/msgpack"
_decoder: Final = msgspec.msgpack.Decoder(TeachRequest)
_encode: Final = msgspec.msgpack.Encoder().encode


class Answers(Protocol):
    """Backend of the teacher: a model of this process, or a vLLM."""

    @property
    def busy_s(self) -> float: ...
    async def sample(self, question: ScoreRequest, /) -> None: ...
    async def run(self) -> None: ...


class TeacherServer:
    """The HTTP side of one teacher."""

    def __init__(self, source: Answers, reach: TeacherLimits, config: TeacherConfig) -> None:
        self.source = source
        self.in_hand = 0
        self.reach = reach
        self._name = config.name
        self._created = int(time.time())
        self._routes: dict[str, tuple[str, Handler]] = {
            TEACH_PATH: ("POST", self._teach),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
        }

    def app(self, access: HttpAccess, latencies: LatencyRecorder | None = None) -> web.Application:
        return application(self._routes, access, latencies)

    async def _teach(self, request: web.Request) -> web.Response:
        try:
            asked = _decoder.decode(await request.read())
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"invalid request: {error}") from None
        question = question_of(asked, self.reach)
        self.in_hand += 1
        try:
            await self.source.sample(question)
        finally:
            self.in_hand -= 1
        reply = TeachReply(
            model=self._name,
            k=question.k,
            token_ids=question.token_ids.astype("<i4").tobytes(),
            logprobs=question.logprobs.astype("<f4").tobytes(),
        )
        return replied(_encode(reply), kind=MSGPACK)

    async def _models(self, _request: web.Request) -> web.Response:
        return replied(responses.models(self._name, self._created, self.reach.positions))

    async def _health(self, _request: web.Request) -> web.Response:
        away = isinstance(self.source, VllmScorer) and not self.source.is_well
        return replied(responses.health("away" if away else "ok", PolicyVersion()), 503 if away else 200)


@asynccontextmanager
async def _opened(run: RunConfig, stop: Stop) -> AsyncIterator[TeacherServer | None]:
    """Yield the teacher of a run; None if asked to stop first.

    Raises:
        ConfigError: The model or its tokenizer is missing, or the vLLM cannot be the teacher of this run.
    """
    config = run.teacher
    if not config.vllm_url:
        scorer, reach = load(config)
        async with Batcher[ScoreRequest](
            scorer.answer, max_rows=config.max_batch, max_waiting=config.max_waiting
        ) as batcher:
            yield TeacherServer(batcher, reach, config)
        return
    async with VllmScorer.opened(config) as vllm:
        proven: list[TeacherLimits] = []

        async def prove() -> None:
            proven.append(await vllm.reach(run.trainer.distillation))

        await first(prove(), stop.event.wait())
        yield TeacherServer(vllm, proven[0], config) if proven else None


def load(config: TeacherConfig) -> tuple[TeacherScorer, TeacherLimits]:
    """Load the teacher from its directory. Blocks.

    Raises:
        ConfigError: The directory has no model for transformers, or no tokenizer.
    """
    tokenizer = fingerprint(Path(config.tokenizer or config.path))
    try:
        model = build_policy(ModelConfig(path=config.path, dtype=config.dtype), seed=0)
    except ConfigError as error:
        raise ConfigError("teacher.path", error.problem) from error
    reach = TeacherLimits(tokenizer, policy_vocabulary(model), policy_positions(model), config.max_batch)
    logger.info("loaded name=%s path=%s tokenizer=%s", config.name, config.path, tokenizer[:16])
    return TeacherScorer(model, config.pass_tokens), reach


async def serve(run_dir: Path, stop: Stop) -> None:
    """Serve the teacher of a run until asked to stop.

    Raises:
        ConfigError: The run has no teacher, its directory has no model, or its vLLM has another one.
        TokenizerMismatchError: Its tokenizer is not the student's.
        VocabularyMismatchError: The vocabularies differ in size, and full distributions are compared.
        AddressInUseError: Another process uses the configured port.
    """
    run, layout = load_run(run_dir)
    config = run.teacher
    if not config.path:
        raise ConfigError("teacher.path", "is not set: this run has no teacher of its own")
    async with _opened(run, stop) as server:
        if server is None or not await _has_student(run, layout, stop):
            return
        mine, student = server.reach, student_directory(run, layout)
        if (theirs := fingerprint(student)) != mine.tokenizer:
            raise TokenizerMismatchError.of(mine.tokenizer, theirs)
        known = vocabulary(student_model(run, layout))
        VocabularyMismatchError.check(run.trainer.distillation.teacher_logprobs, mine.vocabulary, known)
        await _serve(server, run, layout, stop)


async def _serve(server: TeacherServer, run: RunConfig, layout: RunLayout, stop: Stop) -> None:
    config = run.teacher
    raise_descriptor_limit()
    latencies = recorder_of(Role.TEACHER.value, run.telemetry)
    app = server.app(access_of(run, Server.TEACHER, config.host), latencies)
    async with publishing(latencies, layout, run.telemetry.interval_s), asyncio.TaskGroup() as tasks:
        work = tasks.create_task(server.source.run())
        tls = server_tls(run)
        async with listening(app, config.host, config.port, port_before(layout.teacher), tls) as port:
            url = http_url(config.host, port, run.run.scheme)
            heartbeat = EngineHeartbeat(
                layout.teacher,
                Role.TEACHER.value,
                url,
                lambda: server.source.busy_s,
                lambda: server.in_hand,
            )
            beating = tasks.create_task(heartbeat.run(), name="heartbeat")
            logger.info("serving name=%s url=%s", config.name, url)
            await stop.event.wait()
            beating.cancel()
        work.cancel()


async def _has_student(run: RunConfig, layout: RunLayout, stop: Stop) -> bool:
    """Wait until the trainer has written the model; return False if asked to stop first."""
    while not all(path.is_file() for path in student_files(run, layout)):
        if stop.event.is_set():
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.event.wait(), FILE_POLL_S)
    return True


def main(run_dir: Path) -> int:
    """Run the teacher as a process; return its exit code."""
    run, _ = load_run(run_dir)
    torch.set_num_threads(run.teacher.threads)
    return run_service(Role.TEACHER.value, lambda stop: serve(run_dir, stop))
