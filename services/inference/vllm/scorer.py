"""A teacher whose model a vLLM has loaded, wherever that is: asked through its OpenAI interface.

    Question --> POST /v1/completions {prompt: [token ids, ...], prompt_logprobs: k, max_tokens: 1}
             <-- of each place its likeliest tokens and the one that stands there: at temperature 1, of all tokens

vLLM batches by itself, so that each question goes there as it comes. The directory in `teacher.path` says what the
model is; that this vLLM has that one is proven as far as it tells: its tokenizer turns every token id into the same
text, and it answers a question like those to come. Whose weights it has it does not tell.
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
from rolloutmq.bus.tokenizer import FILE, fingerprint, vocabulary
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.teaching import AWAY, DistillationConfig, Lore, TeacherConfig
from rolloutmq.services.inference.protocol import ApiError
from rolloutmq.services.inference.scoring import Question, Reach
from rolloutmq.services.inference.vllm.client import EngineFailedError

logger = logging.getLogger(__name__)

CONNECT_S: Final = 5.0
HEALTH_S: Final = 5.0
LOOK_S: Final = 1.0
ABOVE_ONE: Final = 1e-4
"""Nats above 0 that rounding may add to a log-probability; what is above it is a logit."""
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
    """Answers questions by a vLLM. Made by `opened`; for one event loop, any number of questions at once.

    Attributes:
        is_well: Whether vLLM said so when it was last asked.
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
        """Open a client for as long as the block lasts."""
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
        """Seconds in which it had something to answer so far."""
        return self._worked_s + (time.monotonic() - self._working_since if self._asked else 0.0)

    async def run(self) -> None:
        """Look again and again whether vLLM is well; until cancelled."""
        while True:
            self.is_well = await self._says_well()
            await asyncio.sleep(LOOK_S)

    async def _says_well(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_S), self._session.get(f"{self._url}/health") as response:
                return response.status == 200
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise ConfigError(FIELD, f"{self._url} is no address of a vLLM") from None
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def reach(self, told: DistillationConfig) -> Reach:
        """Wait until vLLM is up, prove that it is the teacher, and return what it can read.

        Raises:
            ConfigError: It has another tokenizer, or cannot answer what `trainer.distillation` asks, or it is no vLLM.
        """
        logger.info("waiting for=%s", self._url)
        while not await self._says_well():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(FILE_POLL_S)
        directory = Path(self._config.path)
        tokenizer = Path(self._config.tokenizer or directory)
        size = vocabulary(directory)
        if not size:
            raise ConfigError("teacher.path", f"the config.json in {directory} says no vocab_size")
        try:
            model = _decoded(await self._get("/v1/models"), _Models).data[0]
            self._model = model.id
            await self._require_tokenizer(tokenizer / FILE)
            k = {Lore.FULL: size, Lore.TOP_K: min(told.top_k, size)}.get(told.lore, 1)
            probe = np.zeros(2, np.int64), np.ones(1, np.int64)
            await self.sample(Question(told.lore, k, [probe[0]], [probe[1]]))
        except ApiError as error:
            raise ConfigError(FIELD, f"{self._url} is no teacher for this run: {error.message}") from None
        logger.info("vllm is the teacher url=%s model=%s", self._url, model.id)
        self.is_well = True
        # It wants room for one more token than it is asked about.
        return Reach(fingerprint(tokenizer), size, model.max_model_len - 1, self._config.max_batch)

    async def _require_tokenizer(self, file: Path) -> None:
        """Let vLLM say every token, and compare. Whitespace is left out: libraries tidy it up or not."""
        known = Tokenizer.from_file(str(file))
        ids = sorted(known.get_vocab(with_added_tokens=True).values())
        said = _decoded(await self._post("/detokenize", {"model": self._model, "tokens": ids}), _Text).prompt
        if "".join(said.split()) != "".join(known.decode(ids, skip_special_tokens=False).split()):
            raise ConfigError(FIELD, f"the tokenizer of {self._url} is not that of {file.parent}")

    async def sample(self, question: Question) -> None:
        """Wait until the question is answered. Cancelling it takes it back.

        Raises:
            ApiError: Too many wait already, or vLLM refuses it, or fails on it.
            EngineFailedError: vLLM is away.
        """
        if self._asked >= self._config.max_waiting:
            raise ApiError(503, f"{self._asked} requests wait already", "overloaded")
        if not self._asked:
            self._working_since = time.monotonic()
        self._asked += 1
        try:
            question.token_ids, question.logprobs = await self._answered(question)
        finally:
            self._asked -= 1
            if not self._asked:
                self._worked_s += time.monotonic() - self._working_since

    async def _answered(self, question: Question) -> tuple[Any, Any]:
        asked = [
            (tokens[: places[-1] + 1], places)  # what follows tells nothing of them
            for tokens, places in zip(question.sequences, question.wanted, strict=True)
            if len(places)
        ]
        if not asked:
            return np.empty((0, question.k), np.int32), np.empty((0, question.k), np.float32)
        body = {
            "model": self._model,
            "prompt": [tokens.tolist() for tokens, _ in asked],
            "prompt_logprobs": 0 if question.lore is Lore.SAMPLED else question.k,
            "max_tokens": 1,
            "temperature": 0,
        }
        choices = _decoded(await self._post("/v1/completions", body), _Answer).choices
        choices.sort(key=lambda choice: choice.index)
        if [len(choice.prompt_logprobs) for choice in choices] != [len(tokens) for tokens, _ in asked]:
            raise ApiError(500, "vLLM: its answer is of other sequences", "failed")
        told = [
            _told(choice.prompt_logprobs[place], int(tokens[place]), question)
            for choice, (tokens, places) in zip(choices, asked, strict=True)
            for place in places
        ]
        logprobs = np.array([[entry.logprob for _, entry in place] for place in told], np.float32)
        if logprobs.max() > ABOVE_ONE:
            raise ApiError(500, "vLLM: its values are no log-probabilities (--logprobs-mode)", "failed")
        return np.array([[token for token, _ in place] for place in told], np.int32), logprobs

    async def _get(self, path: str) -> bytes:
        return await self._said("GET", path, None)

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._said("POST", path, _encode(body))

    async def _said(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            async with self._session.request(method, self._url + path, data=body) as response:
                status, said = response.status, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineFailedError(f"vLLM is away: {type(error).__name__} {error}") from None
        except aiohttp.ClientError as error:  # it had the question, which may be why it is gone
            raise ApiError(500, f"vLLM: {type(error).__name__} {error}", "failed") from None
        if status == 200:
            return said
        why = f"vLLM: {path}: status {status}, {' '.join(said[:500].decode(errors='replace').split())}"
        if status in AWAY:
            raise EngineFailedError(why)
        raise ApiError(400 if status < 500 else 500, why, "refused" if status < 500 else "failed")


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError(500, f"vLLM: its answer is not understood: {error}", "failed") from None


def _told(place: _Place | None, stands: int, question: Question) -> list[tuple[int, _Entry]]:
    """Return the entries of a place that were asked for. There may be one more: that of the token that stands there."""
    entries = list((place or {}).items())
    if question.lore is Lore.SAMPLED:
        entries = [one for one in entries if one[0] == stands]
    elif question.lore is Lore.FULL:
        entries.sort()
    else:
        entries.sort(key=lambda one: -one[1].logprob)
        entries = entries[: question.k]
    if len(entries) != question.k:
        raise ApiError(500, f"vLLM: it tells of {len(entries)} tokens, {question.k} were asked for", "failed")
    if question.lore is Lore.FULL and entries[-1][0] != question.k - 1:
        raise ApiError(
            500, f"vLLM: it knows more than the {question.k} token ids of `teacher.path`", "failed"
        )
    return entries
