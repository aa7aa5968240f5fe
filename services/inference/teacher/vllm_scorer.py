"""Teacher backend on a vLLM, local or remote, through its OpenAI interface.

    ScoreRequest --> POST /v1/completions {prompt: [token ids, ...], prompt_logprobs: k, max_tokens: 1}
                 <-- per position its likeliest tokens and the actual one, at temperature 1, over all tokens

vLLM batches by itself, so each request is forwarded as it comes. `teacher.path` describes the model. The vLLM is
verified as far as possible: its tokenizer must turn every token id into the same text, and a probe request must
succeed. Its weights cannot be verified.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import msgspec
import numpy as np
from tokenizers import Tokenizer

from rolloutmq.bus.rundir import FILE_POLL_S
from rolloutmq.bus.tokenizer_fingerprint import FILE, fingerprint, vocabulary
from rolloutmq.schemas.config.distillation import DistillationConfig, TeacherConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.wire.distillation import AWAY, TeacherLogprobs
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.teacher.scoring import ScoreRequest, TeacherLimits
from rolloutmq.services.inference.vllm.client import EngineFailedError

logger = logging.getLogger(__name__)

CONNECT_S: Final = 5.0
HEALTH_S: Final = 5.0
LOOK_S: Final = 1.0
ABOVE_ONE: Final = 1e-4
"""Rounding tolerance above 0, in nats; a larger value is a logit, not a log-probability."""
FIELD: Final = "teacher.vllm_url"


class _Entry(msgspec.Struct, gc=False):
    logprob: float


_Place = dict[int, _Entry]


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[_Place | None]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Text(msgspec.Struct):
    prompt: str


_encode: Final = msgspec.json.Encoder().encode


class VllmScorer:
    """Scores with a vLLM. Made by `opened`; for one event loop, any number of requests at once.

    Attributes:
        is_well: Result of the last health check.
    """

    def __init__(self, session: aiohttp.ClientSession, config: TeacherConfig) -> None:
        self._session = session
        self._config = config
        self._url = config.vllm_url.rstrip("/").removesuffix("/v1")
        self._model = ""
        self.is_well = False
        self._asked = 0
        self._worked_s = 0.0
        self._working_since = 0.0

    @classmethod
    @asynccontextmanager
    async def opened(cls, config: TeacherConfig) -> AsyncIterator["VllmScorer"]:
        """Open a client for the duration of the block."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            headers={"Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, config)

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request in flight so far."""
        return self._worked_s + (time.monotonic() - self._working_since if self._asked else 0.0)

    async def run(self) -> None:
        """Repeat the health check until cancelled."""
        while True:
            self.is_well = await self._says_well()
            await asyncio.sleep(LOOK_S)

    async def _says_well(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_S), self._session.get(f"{self._url}/health") as response:
                return response.status == 200
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise ConfigError(
                FIELD, f"{self._url} is not the address of a vLLM; give http://HOST:PORT"
            ) from None
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def reach(self, distillation: DistillationConfig) -> TeacherLimits:
        """Wait until vLLM is up, verify that it can be the teacher, and return its limits.

        Raises:
            ConfigError: It has another tokenizer, cannot do what `trainer.distillation` asks, or is not a
                vLLM.
        """
        logger.info("waiting for=%s", self._url)
        while not await self._says_well():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(FILE_POLL_S)
        directory = Path(self._config.path)
        tokenizer = Path(self._config.tokenizer or directory)
        size = vocabulary(directory)
        if not size:
            raise ConfigError("teacher.path", f"config.json in {directory} has no vocab_size")
        try:
            model = _decoded(await self._get("/v1/models"), _Models).data[0]
            self._model = model.id
            await self._require_tokenizer(tokenizer / FILE)
            k = {TeacherLogprobs.FULL: size, TeacherLogprobs.TOP_K: min(distillation.top_k, size)}.get(
                distillation.teacher_logprobs, 1
            )
            probe = np.zeros(2, np.int64), np.ones(1, np.int64)
            await self.sample(ScoreRequest(distillation.teacher_logprobs, k, [probe[0]], [probe[1]]))
        except ApiError as error:
            raise ConfigError(
                FIELD, f"{self._url} cannot be the teacher of this run: {error.message}"
            ) from None
        logger.info("teacher verified url=%s model=%s", self._url, model.id)
        self.is_well = True
        # vLLM needs room for one sampled token.
        return TeacherLimits(fingerprint(tokenizer), size, model.max_model_len - 1, self._config.max_batch)

    async def _require_tokenizer(self, file: Path) -> None:
        """Compare the text of every token, without whitespace, which libraries normalize differently."""
        known = Tokenizer.from_file(str(file))
        ids = sorted(known.get_vocab(with_added_tokens=True).values())
        text = _decoded(await self._post("/detokenize", {"model": self._model, "tokens": ids}), _Text).prompt
        if "".join(text.split()) != "".join(known.decode(ids, skip_special_tokens=False).split()):
            raise ConfigError(FIELD, f"the tokenizer of {self._url} is not that of {file.parent}")

    async def sample(self, question: ScoreRequest) -> None:
        """Wait until the request is scored. May be cancelled.

        Raises:
            ApiError: The queue is full, or vLLM refuses the request or fails on it.
            EngineFailedError: vLLM is unavailable.
        """
        if self._asked >= self._config.max_waiting:
            raise ApiError(503, f"the queue is full ({self._asked} requests); try again later", "overloaded")
        if not self._asked:
            self._working_since = time.monotonic()
        self._asked += 1
        try:
            question.token_ids, question.logprobs = await self._answered(question)
        finally:
            self._asked -= 1
            if not self._asked:
                self._worked_s += time.monotonic() - self._working_since

    async def _answered(self, question: ScoreRequest) -> tuple[Any, Any]:
        asked = [
            (tokens[: places[-1] + 1], places)  # later tokens do not change the scores
            for tokens, places in zip(question.sequences, question.wanted, strict=True)
            if len(places)
        ]
        if not asked:
            return np.empty((0, question.k), np.int32), np.empty((0, question.k), np.float32)
        body = {
            "model": self._model,
            "prompt": [tokens.tolist() for tokens, _ in asked],
            "prompt_logprobs": 0 if question.teacher_logprobs is TeacherLogprobs.SAMPLED else question.k,
            "max_tokens": 1,
            "temperature": 0,
        }
        choices = _decoded(await self._post("/v1/completions", body), _Answer).choices
        choices.sort(key=lambda choice: choice.index)
        if [len(choice.prompt_logprobs) for choice in choices] != [len(tokens) for tokens, _ in asked]:
            raise ApiError(500, "vLLM: the response does not match the requested sequences", "failed")
        entries = [
            _entries(choice.prompt_logprobs[place], int(tokens[place]), question)
            for choice, (tokens, places) in zip(choices, asked, strict=True)
            for place in places
        ]
        logprobs = np.array([[entry.logprob for _, entry in place] for place in entries], np.float32)
        if logprobs.max() > ABOVE_ONE:
            raise ApiError(
                500, "vLLM: values above 0 are not log-probabilities; check --logprobs-mode", "failed"
            )
        return np.array([[token for token, _ in place] for place in entries], np.int32), logprobs

    async def _get(self, path: str) -> bytes:
        return await self._request("GET", path, None)

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._request("POST", path, _encode(body))

    async def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            async with self._session.request(method, self._url + path, data=body) as response:
                status, reply = response.status, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineFailedError(f"vLLM is unavailable: {type(error).__name__} {error}") from None
        except aiohttp.ClientError as error:  # vLLM had received the request, which may be the cause
            raise ApiError(500, f"vLLM: {type(error).__name__} {error}", "failed") from None
        if status == 200:
            return reply
        why = f"vLLM: {path}: status {status}, {' '.join(reply[:500].decode(errors='replace').split())}"
        if status in AWAY:
            raise EngineFailedError(why)
        raise ApiError(400 if status < 500 else 500, why, "refused" if status < 500 else "failed")


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError(500, f"vLLM: malformed response: {error}", "failed") from None


def _entries(place: _Place | None, actual: int, question: ScoreRequest) -> list[tuple[int, _Entry]]:
    """Return the requested entries of a position. vLLM may add one, that of the actual token."""
    entries = list((place or {}).items())
    if question.teacher_logprobs is TeacherLogprobs.SAMPLED:
        entries = [one for one in entries if one[0] == actual]
    elif question.teacher_logprobs is TeacherLogprobs.FULL:
        entries.sort()
    else:
        entries.sort(key=lambda one: -one[1].logprob)
        entries = entries[: question.k]
    if len(entries) != question.k:
        raise ApiError(
            500, f"vLLM: log-probabilities of {len(entries)} tokens, {question.k} were requested", "failed"
        )
    if question.teacher_logprobs is TeacherLogprobs.FULL and entries[-1][0] != question.k - 1:
        raise ApiError(
            500, f"vLLM: its vocabulary exceeds the {question.k} token ids of `teacher.path`", "failed"
        )
    return entries
