"""The teacher of a run: a model from a local directory, asked by the workers what it says of the students' tokens.

    [teacher] path      --> Scorer <--(thread)-- Batcher <-- POST /v1/token_logprobs <-- workers
              vllm_url  --> a vLLM that has the model of `path` <-- VllmScorer <-- the same

It is a process of its own with an address file of its own, `teacher.json`, and its weights never change. It serves only
students of its own tokenizer: its own run's is compared before it listens, and each request says whose it is. It goes
back to the port that it had before; where it is away, workers keep what they rolled out and wait.
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

from rolloutmq.bus.endpoint import http_url
from rolloutmq.bus.rundir import FILE_POLL_S, load_run
from rolloutmq.bus.tokenizer import (
    fingerprint,
    student_directory,
    student_files,
    student_model,
    vocabulary,
)
from rolloutmq.schemas.config import ModelConfig, RunConfig
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.teaching import (
    TEACH_PATH,
    TeacherConfig,
    TeachReply,
    TeachRequest,
    TokenizerMismatchError,
    VocabularyMismatchError,
)
from rolloutmq.services.inference import answers
from rolloutmq.services.inference.batcher import Batcher
from rolloutmq.services.inference.front import first
from rolloutmq.services.inference.listener import Handler, application, listening, port_before, replied
from rolloutmq.services.inference.presence import Presence
from rolloutmq.services.inference.protocol import ApiError
from rolloutmq.services.inference.scoring import Question, Reach, Scorer, question_of
from rolloutmq.services.inference.vllm.scorer import VllmScorer
from rolloutmq.services.runner import Stop, run_service
from rolloutmq.trainer.model import build_policy, policy_positions, policy_vocabulary

logger = logging.getLogger(__name__)

MSGPACK: Final = "application/msgpack"
_decoder: Final = msgspec.msgpack.Decoder(TeachRequest)
_encode: Final = msgspec.msgpack.Encoder().encode


class Answers(Protocol):
    """Who answers the questions: a model of this process, or a vLLM."""

    @property
    def busy_s(self) -> float: ...
    async def sample(self, question: Question, /) -> None: ...
    async def run(self) -> None: ...


class TeacherServer:
    """The HTTP side of one teacher."""

    def __init__(self, source: Answers, reach: Reach, config: TeacherConfig) -> None:
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

    def app(self) -> web.Application:
        """Make the application."""
        return application(self._routes)

    async def _teach(self, request: web.Request) -> web.Response:
        try:
            asked = _decoder.decode(await request.read())
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the request is not valid: {error}") from None
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
        return replied(answers.models(self._name, self._created, self.reach.positions))

    async def _health(self, _request: web.Request) -> web.Response:
        away = isinstance(self.source, VllmScorer) and not self.source.is_well
        return replied(answers.health("away" if away else "ok", PolicyVersion()), 503 if away else 200)


@asynccontextmanager
async def _opened(run: RunConfig, stop: Stop) -> AsyncIterator[TeacherServer | None]:
    """Have the teacher of a run for as long as the block lasts; None if asked to stop before.

    Raises:
        ConfigError: There is no model, or no tokenizer beside it, or the vLLM is no teacher for this run.
    """
    config = run.teacher
    if not config.vllm_url:
        scorer, reach = load(config)
        async with Batcher[Question](
            scorer.answer, max_rows=config.max_batch, max_waiting=config.max_waiting
        ) as batcher:
            yield TeacherServer(batcher, reach, config)
        return
    async with VllmScorer.opened(config) as vllm:
        proven: list[Reach] = []

        async def prove() -> None:
            proven.append(await vllm.reach(run.trainer.distillation))

        await first(prove(), stop.event.wait())
        yield TeacherServer(vllm, proven[0], config) if proven else None


def load(config: TeacherConfig) -> tuple[Scorer, Reach]:
    """Load the teacher from its directory. Blocks.

    Raises:
        ConfigError: There is no model that transformers can load, or no tokenizer beside it.
    """
    told = fingerprint(Path(config.tokenizer or config.path))
    try:
        model = build_policy(ModelConfig(path=config.path, dtype=config.dtype), seed=0)
    except ConfigError as error:
        raise ConfigError("teacher.path", error.problem) from error
    reach = Reach(told, policy_vocabulary(model), policy_positions(model), config.max_batch)
    logger.info("loaded name=%s path=%s tokenizer=%s", config.name, config.path, told[:16])
    return Scorer(model, config.pass_tokens), reach


async def serve(run_dir: Path, stop: Stop) -> None:
    """Serve the teacher of a run until asked to stop.

    Raises:
        ConfigError: This run has no teacher of its own, or there is no model in its directory, or its vLLM is none.
        TokenizerMismatchError: Its tokenizer is not the student's.
        VocabularyMismatchError: It knows another number of token ids, and all are to be compared.
        AddressInUseError: Somebody else has the configured port.
    """
    run, layout = load_run(run_dir)
    config = run.teacher
    if not config.path:
        raise ConfigError("teacher.path", "this run has no teacher of its own")
    async with _opened(run, stop) as server:
        if server is None or not await _has_student(run, layout, stop):
            return
        mine, student = server.reach, student_directory(run, layout)
        if (theirs := fingerprint(student)) != mine.tokenizer:
            raise TokenizerMismatchError.of(mine.tokenizer, theirs)
        known = vocabulary(student_model(run, layout))
        VocabularyMismatchError.check(run.trainer.distillation.lore, mine.vocabulary, known)
        await _serve(server, config, layout, stop)


async def _serve(server: TeacherServer, config: TeacherConfig, layout: RunLayout, stop: Stop) -> None:
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(server.source.run())
        async with listening(server.app(), config.host, config.port, port_before(layout.teacher)) as port:
            url = http_url(config.host, port)
            presence = Presence(
                layout.teacher,
                Role.TEACHER.value,
                url,
                lambda: server.source.busy_s,
                lambda: server.in_hand,
            )
            telling = tasks.create_task(presence.run(), name="presence")
            logger.info("serving name=%s url=%s", config.name, url)
            await stop.event.wait()
            telling.cancel()
        work.cancel()


async def _has_student(run: RunConfig, layout: RunLayout, stop: Stop) -> bool:
    """Wait until the trainer has written what the student is; return whether it has, and not been asked to stop."""
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
