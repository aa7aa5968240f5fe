"""The teacher, as a worker sees it: a finished group goes in, the same group with what the teacher said comes out.

It is asked once the rollout is over, so that its pace is nobody's deadline. A teacher that is away costs a pause and no
group: the group stays in hand, is asked for again with growing pauses for as long as the worker lives, and the worker
tells what it waits for. What no pause can heal ends the worker (another tokenizer) or costs the group: a refusal at
once, and a teacher that took the question and failed, after `teacher.attempts` of them.

    no address, no connection, 408, 425, 429, 502, 503, 504    away: asked again, for as long as it takes
    silent for `SILENT_S`, and its `/health` too               the same
    500 and all other 5xx, an answer cut off or none of HTTP,
      silent for `SILENT_S` while `/health` is fine            it failed: asked again, `teacher.attempts` times in all
    409                                                        another tokenizer or vocabulary: the worker ends
    all else                                                   refused: the group is given up

A group that has the columns already, because its environment asked a teacher itself, is left as it is; whether that
teacher's tokenizer is the student's, the trainer looks.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.tokenizer import (
    fingerprint,
    student_directory,
    student_files,
    student_model,
    vocabulary,
)
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.envelope import Dtype
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.mask import trained_tokens
from rolloutmq.schemas.records import InferenceAddress
from rolloutmq.schemas.teaching import (
    AWAY,
    HEALTH_PATH,
    IDS_COLUMN,
    LOGPROBS_COLUMN,
    TEACH_PATH,
    TOKENIZER_COLUMN,
    DistillationConfig,
    TeacherFailedError,
    TeacherRefusedError,
    TeachReply,
    TeachRequest,
    TokenizerMismatchError,
    VocabularyMismatchError,
)
from rolloutmq.schemas.trajectory import Column, Group
from rolloutmq.services.worker import dialect

logger = logging.getLogger(__name__)

BACKOFF_S: Final = 0.05
"""First pause before another attempt; doubles, up to `teacher.retry_s`."""
CONNECT_S: Final = 5.0
"""A connection attempt into silence ends after this, and so does the question whether the teacher is well."""
SILENT_S: Final = 600.0
"""A teacher that says nothing for so long is gone, and what was asked is asked again: that costs nothing but time."""
SLOW_S: Final = 2.0
"""An answer that takes longer is told as a wait, so that a teacher that hangs or is too slow is seen as well."""
LOG_EVERY_S: Final = 5.0
"""How often it is said that the teacher is away."""
REQUEST_TOKENS: Final = 400_000
"""Most tokens of one request, unless one sequence alone has more: 2 MB, half of what the teacher takes."""
NOT_FOUND: Final = 404
MISMATCH: Final = 409
FAILED: Final = 500
"""From here on, all others are those of a teacher that took the question and failed: it may be the group's doing."""

_encode: Final = msgspec.msgpack.Encoder().encode
_reply: Final = msgspec.msgpack.Decoder(TeachReply)


@dataclass(frozen=True, slots=True)
class Missed:
    """An attempt that brought no answer. `failed`: the teacher had the question, so that it counts."""

    why: str
    failed: bool = False


class Teacher:
    """Asks the teacher of a run. Made by `opened`; for one event loop, any number of groups at once.

    Attributes:
        retries: Attempts that failed and were made again.
    """

    def __init__(self, session: aiohttp.ClientSession, run: RunConfig, layout: RunLayout) -> None:
        self._session = session
        self._config = run.teacher
        self._asked: DistillationConfig = run.trainer.distillation
        self._layout = layout
        self._student = student_directory(run, layout)
        self._model = student_model(run, layout)
        self._files = student_files(run, layout)
        self._fingerprint = ""
        self._vocabulary = 0
        self._waiting: dict[int, float] = {}
        """When each question that is under way was first asked."""
        self._why = ""
        self._said_at = -LOG_EVERY_S
        self.retries = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, run: RunConfig, layout: RunLayout) -> AsyncIterator["Teacher"]:
        """Open a client for as long as the block lasts."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield cls(session, run, layout)

    def wait(self, now: float) -> str:
        """Say what groups wait for here, and how many for how long; empty if all are answered soon."""
        late = [now - at for at in self._waiting.values() if now - at > SLOW_S]
        if not late:
            return ""
        why = self._why or "it has not answered yet"
        return f"{len(late)} groups for the teacher, the longest for {max(late):.0f} s: {why}"

    async def teach(self, group: Group) -> Group:
        """Return the group with what the teacher says of its trained tokens. Waits as long as it takes.

        Raises:
            TokenizerMismatchError: The teacher is of another tokenizer than the student.
            VocabularyMismatchError: It knows another number of token ids, and all are to be compared.
            TeacherRefusedError: It does not accept the sequences, for example since they are too long for it.
            TeacherFailedError: It was there, and failed on them `teacher.attempts` times.
        """
        if IDS_COLUMN in group:
            return group
        (lengths,) = group.columns["tokens"].lengths
        tokens = group.columns["tokens"].values.astype("<i4")
        wanted = trained_tokens(group)
        ends = np.cumsum(lengths, dtype=np.int64)
        ids, logprobs, k = [], [], 1
        for rows in self._parts(lengths):
            there = slice(int(ends[rows.start] - lengths[rows.start]), int(ends[rows.stop - 1]))
            reply = await self._answered(tokens[there], lengths[rows], wanted[there])
            k = reply.k
            ids.append(np.frombuffer(reply.token_ids, "<i4"))
            logprobs.append(np.frombuffer(reply.logprobs, "<f4"))
        cells = np.where(wanted, k, 0).astype(np.uint32)
        told = {
            IDS_COLUMN: Column(Dtype.I32, np.concatenate(ids), (lengths, cells)),
            LOGPROBS_COLUMN: Column(Dtype.F32, np.concatenate(logprobs), (lengths, cells)),
            TOKENIZER_COLUMN: Column.opaque([self._fingerprint] * len(lengths)),  # it took it for its own
        }
        taught = replace(group, columns={**group.columns, **told})
        taught.check()
        return taught

    def _parts(self, lengths: NDArray[np.uint32]) -> Iterator[slice]:
        """Yield the sequences of each request: as many as the teacher takes at once."""
        start, held = 0, 0
        for row, length in enumerate(lengths.tolist()):
            if row > start and (row - start >= self._config.max_batch or held + length > REQUEST_TOKENS):
                yield slice(start, row)
                start, held = row, 0
            held += length
        yield slice(start, len(lengths))

    async def _answered(
        self, tokens: NDArray[np.int32], lengths: NDArray[np.uint32], wanted: NDArray[np.bool_]
    ) -> TeachReply:
        """Ask until there is an answer, and check that it is one."""
        number = max(self._waiting, default=0) + 1
        self._waiting[number] = time.monotonic()
        longest_s, failures = BACKOFF_S, 0
        try:
            while True:
                reply = await self._attempt(tokens, lengths, wanted)
                if not isinstance(reply, Missed):
                    self._why = ""
                    return _checked(reply, int(wanted.sum()))
                failures += reply.failed
                if failures >= self._config.attempts:
                    raise TeacherFailedError(failures, reply.why)
                self._complain(reply.why)
                await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))
                longest_s = min(2 * longest_s, self._config.retry_s)
        finally:
            del self._waiting[number]

    async def _attempt(
        self, tokens: NDArray[np.int32], lengths: NDArray[np.uint32], wanted: NDArray[np.bool_]
    ) -> TeachReply | Missed:
        """Ask once; return the answer, or why it is to be asked again."""
        url = self._url()
        if not url:
            return Missed("it has not said yet where it is")
        if not self._fingerprint:
            for path in self._files:
                if not path.is_file():
                    return Missed(f"there is no {path} yet")
            self._fingerprint, self._vocabulary = fingerprint(self._student), vocabulary(self._model)
        request = TeachRequest(
            tokenizer=self._fingerprint,
            vocabulary=self._vocabulary,
            lore=self._asked.lore,
            top_k=self._asked.top_k,
            tokens=tokens.tobytes(),
            lengths=tuple(lengths.tolist()),
            wanted=wanted.tobytes(),
        )
        try:
            async with self._session.post(url + TEACH_PATH, data=_encode(request)) as response:
                return _answer(url, response.status, await response.read())
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise ConfigError("teacher.url", f"{url} is no address of a teacher") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return _missed(url, error)
        except TimeoutError as error:
            return _missed(url, error, failed=await self._is_well(url))
        except aiohttp.ClientError as error:
            return _missed(url, error, failed=True)

    async def _is_well(self, url: str) -> bool:
        """Tell whether it says of itself that it is: then its silence is about what it was asked."""
        try:
            async with asyncio.timeout(CONNECT_S), self._session.get(url + HEALTH_PATH) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _url(self) -> str:
        if self._config.url:
            return self._config.url.rstrip("/").removesuffix("/v1")
        found = read_json(self._layout.teacher, InferenceAddress)
        return found.url if found is not None else ""

    def _complain(self, why: str) -> None:
        """Note why the teacher does not answer, and say it once in a while."""
        self._why = " ".join(why.split())[:300]
        self.retries += 1
        now = time.monotonic()
        if now - self._said_at >= LOG_EVERY_S:
            self._said_at = now
            logger.warning("teacher away groups=%d why=%s", len(self._waiting), self._why)


def _missed(url: str, error: Exception, *, failed: bool = False) -> Missed:
    return Missed(f"{url}: {type(error).__name__} {error}", failed)


def _answer(url: str, status: int, body: bytes) -> TeachReply | Missed:
    """Return what a teacher says by a status and a body, or why it is to be asked again."""
    if status == 200:
        return _decoded(body)
    said = dialect.error_text(body)
    if status in AWAY or status >= FAILED:
        return Missed(f"{url}: status {status}, {said}", status not in AWAY)
    if status == MISMATCH and dialect.error_code(body) == VocabularyMismatchError.CODE:
        raise VocabularyMismatchError(said)
    if status == MISMATCH:
        raise TokenizerMismatchError(said)
    if status == NOT_FOUND:
        said = f"{said}; {url} is no teacher of RolloutMQ (for a vLLM see teacher.vllm_url)"
    raise TeacherRefusedError(status, said)


def _decoded(body: bytes) -> TeachReply:
    try:
        return _reply.decode(body)
    except msgspec.MsgspecError as error:
        raise TeacherRefusedError(200, f"its answer is not of the protocol: {error}") from None


def _checked(reply: TeachReply, wanted: int) -> TeachReply:
    if reply.k < 1 or not len(reply.token_ids) == len(reply.logprobs) == 4 * wanted * reply.k:
        raise TeacherRefusedError(200, f"its answer has not {reply.k} entries for each of {wanted} tokens")
    return reply
