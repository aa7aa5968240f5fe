"""Teacher client of a worker: adds the teacher's columns to a finished group.

The worker asks after the rollout, so no rollout deadline covers the teacher. An unavailable teacher costs time and no
group: the worker keeps the group, retries with growing pauses for as long as it lives, and reports what it waits for.
Permanent errors end the worker (another tokenizer) or cost the group: a refusal at once, a failing teacher after
`teacher.attempts` failures.

    no address, no connection, 408, 425, 429, 502, 503, 504    unavailable: retry without limit
    silent for `SILENT_S`, and `/health` fails too             the same
    500 and other 5xx, a truncated or non-HTTP response,
      silent for `SILENT_S` while `/health` is fine            failed: retry, `teacher.attempts` times in all
    409                                                        another tokenizer or vocabulary: end the worker
    anything else                                              refused: the group is abandoned

A group that already has the columns, because its environment asked a teacher itself, stays as it is; the trainer checks
that teacher's tokenizer.
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
from rolloutmq.bus.tokenizer_fingerprint import (
    fingerprint,
    student_directory,
    student_files,
    student_model,
    vocabulary,
)
from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    ConfigError,
    TeacherFailedError,
    TeacherRefusedError,
    TokenizerMismatchError,
    VocabularyMismatchError,
)
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.distillation import (
    AWAY,
    HEALTH_PATH,
    IDS_COLUMN,
    LOGPROBS_COLUMN,
    TEACH_PATH,
    TOKENIZER_COLUMN,
    TeachReply,
    TeachRequest,
)
from rolloutmq.schemas.wire.envelope import Dtype
from rolloutmq.services.http_server.access import authorization
from rolloutmq.services.http_server.run_token import http_token
from rolloutmq.services.http_server.tls import client_tls
from rolloutmq.services.worker.openai import wire

logger = logging.getLogger(__name__)

BACKOFF_S: Final = 0.05
"""First pause between attempts, in seconds; doubles up to `teacher.retry_s`."""
CONNECT_S: Final = 5.0
"""Timeout of a connection attempt and of a health check, in seconds."""
SILENT_S: Final = 600.0
"""Seconds without a byte after which a request is repeated."""
SLOW_S: Final = 2.0
"""Seconds after which an unanswered request is reported as a wait."""
LOG_EVERY_S: Final = 5.0
"""Seconds between two warnings about an unavailable teacher."""
REQUEST_TOKENS: Final = 400_000
"""Most tokens of one request, unless one sequence has more: 2 MB, half the limit of the teacher."""
NOT_FOUND: Final = 404
MISMATCH: Final = 409
FAILED: Final = 500
"""Lowest status of a teacher that failed on a request; the group may be the cause."""

_encode: Final = msgspec.msgpack.Encoder().encode
_reply: Final = msgspec.msgpack.Decoder(TeachReply)


@dataclass(frozen=True, slots=True)
class MissedColumns:
    """A failed attempt. `failed`: the teacher had received the request, so the attempt counts."""

    why: str
    failed: bool = False


class TeacherClient:
    """Asks the teacher of a run. Made by `opened`; for one event loop, any number of groups at once.

    Attributes:
        retries: Failed attempts that were repeated.
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
        """Time of the first attempt of each unanswered request."""
        self._why = ""
        self._logged_at = -LOG_EVERY_S
        self.retries = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, run: RunConfig, layout: RunLayout) -> AsyncIterator["TeacherClient"]:
        """Open a client for the duration of the block."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        connector = aiohttp.TCPConnector(limit=0, ssl=(None if run.teacher.url else client_tls(run)) or True)
        # A teacher of another run has another token, which belongs into `teacher.url`.
        headers = authorization("" if run.teacher.url else http_token(run))
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield cls(session, run, layout)

    def wait(self, now: float) -> str:
        """Describe groups that wait longer than `SLOW_S`: number, longest wait, reason. Empty if there are none."""
        late = [now - at for at in self._waiting.values() if now - at > SLOW_S]
        if not late:
            return ""
        why = self._why or "no answer yet"
        return f"{len(late)} groups for the teacher, the longest for {max(late):.0f} s: {why}"

    async def teach(self, group: Group) -> Group:
        """Return the group with the log-probabilities of the teacher. Waits as long as the teacher takes.

        Raises:
            TokenizerMismatchError: The teacher has another tokenizer than the student.
            VocabularyMismatchError: The vocabularies differ in size, and full distributions are compared.
            TeacherRefusedError: The teacher does not accept the sequences, for example because they are too
                long.
            TeacherFailedError: The teacher failed on them `teacher.attempts` times.
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
        columns = {
            IDS_COLUMN: Column(Dtype.I32, np.concatenate(ids), (lengths, cells)),
            LOGPROBS_COLUMN: Column(Dtype.F32, np.concatenate(logprobs), (lengths, cells)),
            TOKENIZER_COLUMN: Column.opaque([self._fingerprint] * len(lengths)),  # the teacher accepted it
        }
        taught = replace(group, columns={**group.columns, **columns})
        taught.check()
        return taught

    def _parts(self, lengths: NDArray[np.uint32]) -> Iterator[slice]:
        """Yield the rows of each request: as many sequences as the teacher accepts at once."""
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
        """Ask until there is a valid response."""
        number = max(self._waiting, default=0) + 1
        self._waiting[number] = time.monotonic()
        longest_s, failures = BACKOFF_S, 0
        try:
            while True:
                reply = await self._attempt(tokens, lengths, wanted)
                if not isinstance(reply, MissedColumns):
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
    ) -> TeachReply | MissedColumns:
        """Ask once; return the response, or the reason to retry."""
        url = self._url()
        if not url:
            return MissedColumns("the teacher has not published its address yet")
        if not self._fingerprint:
            for path in self._files:
                if not path.is_file():
                    return MissedColumns(f"{path} does not exist yet; the trainer writes it")
            self._fingerprint, self._vocabulary = fingerprint(self._student), vocabulary(self._model)
        request = TeachRequest(
            tokenizer=self._fingerprint,
            vocabulary=self._vocabulary,
            teacher_logprobs=self._asked.teacher_logprobs,
            top_k=self._asked.top_k,
            tokens=tokens.tobytes(),
            lengths=tuple(lengths.tolist()),
            wanted=wanted.tobytes(),
        )
        try:
            async with self._session.post(url + TEACH_PATH, data=_encode(request)) as response:
                return _answer(url, response.status, await response.read())
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise ConfigError(
                "teacher.url", f"{url} is not the address of a teacher; give http://HOST:PORT"
            ) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return _missed(url, error)
        except TimeoutError as error:
            return _missed(url, error, failed=await self._is_well(url))
        except aiohttp.ClientError as error:
            return _missed(url, error, failed=True)

    async def _is_well(self, url: str) -> bool:
        """Return whether the health check passes; if so, the request itself is what hangs."""
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
        """Record the reason of a failed attempt, and log it once in a while."""
        self._why = " ".join(why.split())[:300]
        self.retries += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("teacher unavailable groups=%d error=%s", len(self._waiting), self._why)


def _missed(url: str, error: Exception, *, failed: bool = False) -> MissedColumns:
    return MissedColumns(f"{url}: {type(error).__name__} {error}", failed)


def _answer(url: str, status: int, body: bytes) -> TeachReply | MissedColumns:
    """Return the response of a status and a body, or the reason to retry."""
    if status == 200:
        return _decoded(body)
    detail = wire.error_text(body)
    if status in AWAY or status >= FAILED:
        return MissedColumns(f"{url}: status {status}, {detail}", status not in AWAY)
    if status == MISMATCH and wire.error_code(body) == VocabularyMismatchError.CODE:
        raise VocabularyMismatchError(detail)
    if status == MISMATCH:
        raise TokenizerMismatchError(detail)
    if status == NOT_FOUND:
        detail = f"{detail}; {url} is not a RolloutMQ teacher (for a vLLM see teacher.vllm_url)"
    raise TeacherRefusedError(status, detail)


def _decoded(body: bytes) -> TeachReply:
    try:
        return _reply.decode(body)
    except msgspec.MsgspecError as error:
        raise TeacherRefusedError(200, f"malformed response: {error}") from None


def _checked(reply: TeachReply, wanted: int) -> TeachReply:
    if reply.k < 1 or not len(reply.token_ids) == len(reply.logprobs) == 4 * wanted * reply.k:
        raise TeacherRefusedError(
            200, f"the response must have {reply.k} entries for each of {wanted} tokens"
        )
    return reply
