"""The vLLM engine: starts a vLLM, gives it the weights, and serves it to the workers.

    trainer --(shared memory)--> extension in vLLM <--(unix socket)-- VllmServer <-- HTTP handlers <-- workers
            or --(unix socket)-> vLLM's own transfer

To workers it is an engine like any other: same interface, same address file, same drain (see `app`). vLLM listens on a
socket that only this user can open. The engine checks every request first, so that vLLM gets only requests with exact
log-probabilities. It checks every response too: one log-probability and one version per token, or the response is
refused and the client retries.

The run's `weights.backend` decides how the weights arrive: vLLM maps them, or the trainer transfers them to the socket
in `vllm.json`, and the engine serves once a transfer is complete (see `policy`).

Requests get status 503 while the weights are half-written by a dead trainer or held by a stopped one; requests inside
vLLM are aborted. The same holds while vLLM takes no step for `inference.vllm.stalled_s` (see `stall_detector`);
`/health` then reports `stalled`. Polling continues, and once vLLM takes steps again it gets requests again. The engine
follows a new segment of the trainer once vLLM has verified it; a segment that does not match ends this process with the
reason. If vLLM exits, this process ends too, with the end of vLLM's log, and the orchestrator restarts it.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from rolloutmq.bus.engine_registry import FIRST, is_engine
from rolloutmq.bus.rundir import FILE_POLL_S, load_run, write_json
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, RetryableError, WeightsTornError
from rolloutmq.schemas.files import RunLayout, VllmAddress
from rolloutmq.services.inference.app import WATCH_S, InferenceApp, Leaving, first, serve_http
from rolloutmq.services.inference.jobs import Continuation, Job
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.vllm.client import EngineFailedError, EngineStalledError, VllmClient
from rolloutmq.services.inference.vllm.installed import require_vllm
from rolloutmq.services.inference.vllm.policy import SentWeightsPolicy, SharedWeightsPolicy, VllmPolicy
from rolloutmq.services.inference.vllm.process import Vllm, running
from rolloutmq.services.inference.vllm.stall_detector import StallDetector
from rolloutmq.services.process.runner import Stop, run_service
from rolloutmq.trainer.weights.address import owner_lives

logger = logging.getLogger(__name__)

READY_POLL_S: Final = 0.25
"""Seconds between two checks whether vLLM is up; starting takes half a minute."""
LOOK_S: Final = 1.0
"""Seconds between two reads of the step counter while vLLM has requests."""

_T = TypeVar("_T")


class VllmServer(InferenceApp):
    """The HTTP side of one vLLM."""

    def __init__(self, policy: VllmPolicy, client: VllmClient, config: InferenceConfig) -> None:
        super().__init__()
        self._policy = policy
        self._client = client
        self._max_waiting = config.max_waiting
        self._progress = StallDetector(config.vllm.stalled_s, time.monotonic())
        self._limits: set[asyncio.Timeout] = set()
        """Timeouts of the requests inside vLLM; rescheduled to end them when vLLM stalls or the weights are
        torn.
        """
        self._is_stalled = False
        self._asked = 0
        self._worked_s = 0.0
        self._working_since = 0.0

    @property
    def policy(self) -> VllmPolicy:
        """See `InferenceApp.policy`."""
        return self._policy

    @property
    def busy_s(self) -> float:
        """See `InferenceApp.busy_s`: seconds with at least one unanswered request."""
        return self._worked_s + (time.monotonic() - self._working_since if self._asked else 0.0)

    def trouble(self) -> str:
        """See `InferenceApp.trouble`."""
        busy = "busy" if self._policy.kept(time.monotonic()) else ""
        return super().trouble() or busy or ("stalled" if self._is_stalled else "")

    async def sample(self, job: Job) -> None:
        """Let vLLM sample all continuations of a job.

        Raises:
            ApiError: The queue is full, or vLLM refuses the request.
            WeightsTornError: The weights are half-written.
            WeightsBusyError: A live writer holds them.
            EngineFailedError: vLLM aborted the request, or is gone.
            EngineStalledError: vLLM is stalled.
        """
        if refusal := self._refusal(time.monotonic()):
            raise refusal
        if self._asked >= self._max_waiting:
            raise ApiError(503, f"the queue is full ({self._asked} requests); try again later", "overloaded")
        if not self._asked:
            self._working_since = time.monotonic()
            self._progress.moved(self._working_since)
        self._asked += 1
        try:
            found = await self._generated(job)
        finally:
            self._asked -= 1
            if not self._asked:
                self._worked_s += time.monotonic() - self._working_since
        job.results = [one for of_prompt in found for one in of_prompt]

    def _refusal(self, now: float) -> RetryableError | None:
        """Return the reason why nothing can be sampled now, or None."""
        if self._policy.is_torn():
            return WeightsTornError(self._policy.version)
        if kept := self._policy.kept(now):
            return kept
        return EngineStalledError(self._progress.still_s(now)) if self._is_stalled else None

    async def _generated(self, job: Job) -> list[list[Continuation]]:
        """Let vLLM sample while it makes progress and its weights are whole."""
        asked = [self._client.generate(prompt, job.sampling, self._policy.end_ids) for prompt in job.prompts]
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                found = await _together(asked)
        except TimeoutError:
            now = time.monotonic()
            raise self._refusal(now) or EngineStalledError(self._progress.still_s(now)) from None
        finally:
            self._limits.discard(limit)
        self._progress.moved(time.monotonic())
        return found

    async def watch(self) -> None:
        """Detect a stalled vLLM and end its requests; until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._progress.left_s(time.monotonic()) or LOOK_S))
            if not self._asked and not self._is_stalled:
                self._progress.moved(time.monotonic())
                continue
            steps = await self._steps()
            now = time.monotonic()
            if steps is not None:
                self._progress.counted(steps, now)
                if not self._asked:  # idle, and it answers
                    self._progress.moved(now)
            self._judge(now)

    async def _steps(self) -> int | None:
        """Return the step counter of vLLM; None if it does not answer before the stall limit."""
        left_s = self._progress.left_s(time.monotonic()) or LOOK_S
        with suppress(EngineFailedError, TimeoutError):
            async with asyncio.timeout(left_s):
                return await self._client.steps()
        return None

    def _judge(self, now: float) -> None:
        """Update the stalled flag, and end all requests if it is set."""
        stalled = not self._progress.left_s(now)
        if stalled != self._is_stalled:
            event = "stalled" if stalled else "recovered"
            logger.warning("vllm %s in_hand=%d still_s=%.1f", event, self._asked, self._progress.still_s(now))
        self._is_stalled = stalled
        if stalled:
            self._end_all()

    def _end_all(self) -> None:
        """End all requests inside vLLM; `_refusal` gives the reason."""
        for limit in (one for one in self._limits if not one.expired()):
            limit.reschedule(asyncio.get_running_loop().time())

    async def follow(self) -> None:
        """Watch the weights, and serve the policy they belong to; until cancelled.

        Raises:
            WeightsMismatchError: The trainer shares weights that do not match vLLM's model; names the tensor.
            EngineFailedError: vLLM does not answer.
        """
        while True:
            # Another process changes them: there is no event to wait for.
            await asyncio.sleep(WATCH_S)
            self._policy = await self._policy.followed(self._client, time.monotonic())
            if self._policy.is_torn():  # a paused vLLM would hold them until it counts as stalled
                self._end_all()


async def _together(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Wait for all coroutines; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def serve(run_dir: Path, stop: Stop, name: str = FIRST, draining: asyncio.Event | None = None) -> None:
    """Serve the policy of a run by its own vLLM until asked to stop or drain.

    Args:
        run_dir: The run.
        stop: Ends the engine at once; requests in flight are refused.
        name: Name of the engine.
        draining: Set from outside to drain.

    Raises:
        ConfigError: `inference.kind` is not "vllm", the name is not that of an engine, or vLLM is not
            installed.
        AddressInUseError: Another process uses the configured port.
        WeightsMismatchError: The trainer's weights do not match vLLM's model; names the tensor.
        VllmEndedError: vLLM did not start, or exited.
    """
    run, layout = load_run(run_dir)
    if run.inference.kind != "vllm":
        raise ConfigError("inference.kind", f'must be "vllm" (got "{run.inference.kind}")')
    if not is_engine(name):
        raise ConfigError("engine", f"{name!r} is not an engine; the names are {FIRST}, {FIRST}-1, ...")
    require_vllm(run.inference.vllm.python)
    leaving = Leaving(stop, draining or asyncio.Event())
    logger.info("waiting for=%s", layout.weights)
    while not leaving.is_asked() and not owner_lives(layout.weights):
        with suppress(TimeoutError):
            await asyncio.wait_for(leaving.asked(), FILE_POLL_S)
    if leaving.is_asked():
        return
    async with running(run, layout, name, _seed(run, name)) as vllm, VllmClient.opened(vllm.socket) as client:
        await first(vllm.ended(), _serve(run, layout, name, vllm, client, leaving))


async def _serve(
    run: RunConfig, layout: RunLayout, name: str, vllm: Vllm, client: VllmClient, leaving: Leaving
) -> None:
    run_id = run_id_of(layout)
    policy = await _ready(run, layout, vllm, client, leaving)
    if policy is None:
        return
    server = VllmServer(policy, client, run.inference)
    try:
        await first(
            server.follow(),
            server.watch(),
            serve_http(server, layout, name, run, leaving, run_id),
        )
    finally:
        server.policy.close()


async def _ready(
    run: RunConfig, layout: RunLayout, vllm: Vllm, client: VllmClient, leaving: Leaving
) -> VllmPolicy | None:
    """Wait until vLLM is up and has the weights; None if asked to end first."""
    found: list[VllmPolicy] = []
    sent = run.weights.backend == "vllm_http"
    begun = SentWeightsPolicy.begun if sent else SharedWeightsPolicy.begun

    async def ready() -> None:
        while not await client.answers():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(READY_POLL_S)
        if sent:
            address = VllmAddress(url=f"unix:{vllm.socket}", nonce=secrets.token_hex(8))
            write_json(layout.vllm, address)
        while (policy := await begun(layout, client, run.inference.max_batch)) is None:  # noqa: ASYNC110 - as above
            await asyncio.sleep(READY_POLL_S)
        found.append(policy)

    try:
        async with asyncio.timeout(run.inference.vllm.start_s):
            await first(ready(), leaving.asked())
    except TimeoutError:
        raise vllm.failure(
            f"did not start within {run.inference.vllm.start_s:g} s (inference.vllm.start_s)"
        ) from None
    return found[0] if found else None


def _seed(run: RunConfig, name: str) -> int:
    """Return the seed of an engine: two engines with the same seed would sample every answer twice."""
    return run.run.seed if name == FIRST else random.Random(f"{run.run.seed}/{name}").getrandbits(31)


def main(run_dir: Path, name: str = FIRST) -> int:
    """Run the engine of that name as a process; return its exit code."""
    draining = asyncio.Event()
    return run_service(name, lambda stop: serve(run_dir, stop, name, draining), on_drain=draining.set)
