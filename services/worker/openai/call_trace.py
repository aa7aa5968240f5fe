"""Calls of the rollouts that are traced, told once their rollout is over; see `telemetry.trace_ratio`.

What is traced is decided by the id of the group before its rollout, so the others cost one look at a variable a call.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.transport.pubsub import RunPublisher
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.tracing import CALLS_LIMIT, Call, RolloutTrace, is_sampled

_calls: ContextVar["list[Call] | None"] = ContextVar("calls", default=None)
"""Calls of the rollout of this context and of the tasks that it started; None if it is not traced."""
_TEXT_LIMIT = 256


class TracedCall:
    """One call under way."""

    def __init__(self) -> None:
        self.status = 0
        """Status of the answer; 0 if none came."""
        self.tokens = self.prompt_tokens = 0
        """Tokens that the answer says it sampled, and those of the prompt."""


@contextmanager
def traced_call(engine: str, path: str) -> Iterator[TracedCall]:
    """Trace the block, a call to a path of an engine, if its rollout is traced."""
    call, calls = TracedCall(), _calls.get()
    if calls is None:
        yield call
        return
    began_at, begun = time.time(), time.perf_counter()
    try:
        yield call
    finally:
        calls.append(
            Call(
                engine=engine[:_TEXT_LIMIT],
                path=path[:_TEXT_LIMIT],
                began_at=began_at,
                seconds=time.perf_counter() - begun,
                status=call.status,
                tokens=call.tokens,
                prompt_tokens=call.prompt_tokens,
            )
        )


class RolloutTracer:
    """Tells the calls of the traced rollouts of one worker. For one event loop.

    It connects to the broker at the first traced rollout. What is told before a connection stands is lost.

    Args:
        layout: The run directory.
        worker: Name of the worker.
        env: Its environment.
        ratio: Part of the groups that is traced, 0 to 1.
    """

    def __init__(self, layout: RunLayout, worker: str, env: str, ratio: float) -> None:
        self._worker = worker
        self._env = env
        self._ratio = ratio
        self._publisher = RunPublisher(layout)
        if ratio:
            self._publisher.follow()

    @contextmanager
    def rollout(self, group_id: str) -> Iterator[None]:
        """Trace the block, the rollout of a group, if that is sampled."""
        if not self._ratio or not is_sampled(group_id, self._ratio):
            yield
            return
        calls: list[Call] = []
        token = _calls.set(calls)
        try:
            yield
        finally:
            _calls.reset(token)
            self._tell(group_id, calls)

    def close(self) -> None:
        """Close the connection; the last traces have half a second to leave."""
        self._publisher.close()

    def _tell(self, group_id: str, calls: list[Call]) -> None:
        if not calls:
            return
        trace = RolloutTrace(
            group_id=group_id,
            env=self._env,
            worker=self._worker,
            at=time.time(),
            calls=tuple(calls[:CALLS_LIMIT]),
            dropped_calls=max(0, len(calls) - CALLS_LIMIT),
        )
        self._publisher.publish(topics.telemetry("trace", self._worker), trace)
