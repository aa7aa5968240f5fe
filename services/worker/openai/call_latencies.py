"""Latencies of the calls of a worker to its inference servers, by server, path and class of the status.

Each attempt counts, those of a call that is repeated too. An attempt without an answer has no class: its connection
failed, or the rollout was cancelled. Calls of an environment's own client go past the worker; the servers measure them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.services.http_server.request_latencies import status_class
from rolloutmq.services.process.latency_recorder import LatencyKey, LatencyRecorder


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0


class _Sampled(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Sampled)


class Attempt:
    """One call under way."""

    def __init__(self) -> None:
        self.status = ""
        self.tokens = self.prompt_tokens = 0

    def answered(self, status: int, body: bytes) -> None:
        """Note the answer, and what it sampled."""
        self.status = status_class(status)
        if status == 200:
            self.tokens, self.prompt_tokens = _counted(body)


class CallLatencies:
    """Measures the calls of one environment; without a recorder it measures nothing."""

    def __init__(
        self, recorder: LatencyRecorder | None = None, env: str = "", split: Split = Split.TRAIN
    ) -> None:
        self._recorder = recorder
        self._env = env
        self._split = split

    @contextmanager
    def attempt(self, engine: str, path: str) -> Iterator[Attempt]:
        """Measure the block, a call to a path of an engine."""
        attempt, begun = Attempt(), time.perf_counter()
        try:
            yield attempt
        finally:
            if self._recorder is not None:
                key = LatencyKey(Hop.CALL, self._env, self._split, path, attempt.status, engine)
                self._recorder.add(key, time.perf_counter() - begun, tokens=attempt.tokens)


def _counted(body: bytes) -> tuple[int, int]:
    """Return the numbers of sampled tokens and of those of the prompt that a response counts; 0 without them."""
    try:
        usage = _decoder.decode(body).usage
    except msgspec.MsgspecError:
        return 0, 0
    return (max(0, usage.completion_tokens), max(0, usage.prompt_tokens)) if usage is not None else (0, 0)
