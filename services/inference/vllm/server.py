"""The engine that samples with vLLM: it starts vLLM, sees to it that it has the weights, and speaks for it.

    trainer --(shared memory)--> extension in vLLM <--(unix socket)-- VllmServer <-- HTTP handlers <-- workers
            or --(unix socket)-> vLLM's own transfer

To workers it is an engine like any other: the same dialect, the same address file, the same drain (see `front`). vLLM
itself listens where only this user reaches it. What workers send is checked here first, so that vLLM is only asked what
can be answered with exact log-probabilities; what comes back is checked too: one log-probability for each token, and a
version for each, else the answer is refused and asked for again.

How the trainer's weights get there is the run's `weights.backend`: vLLM maps them, or the trainer sends them to the
socket that `vllm.json` names, and the engine serves once they were sent whole (see `policy`).

While the weights are half-written by a trainer that died, or kept by one that was stopped, requests are answered 503,
those in vLLM included. So they are while vLLM takes no step for `inference.vllm.stalled_s` (see `progress`), which
`/health` calls `stalled`; once it takes steps again it is asked again. Another segment of the trainer is followed once
vLLM has proven it; one that vLLM does not take ends this process with the reason. A vLLM that ends by itself ends it
too, with the end of its log; whoever keeps it starts it again.
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

from rolloutmq.bus.engines import FIRST, engine_number
from rolloutmq.bus.rundir import FILE_POLL_S, load_run, write_json
from rolloutmq.schemas.config import InferenceConfig, RunConfig
from rolloutmq.schemas.errors import ConfigError, RetryableError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import VllmAddress
from rolloutmq.schemas.sharing import WeightsTornError
from rolloutmq.services.inference.front import WATCH_S, Front, Leaving, first, serve_http
from rolloutmq.services.inference.generate import Continuation, Job
from rolloutmq.services.inference.protocol import ApiError
from rolloutmq.services.inference.vllm.client import EngineFailedError, EngineStalledError, VllmClient
from rolloutmq.services.inference.vllm.installed import require_vllm
from rolloutmq.services.inference.vllm.policy import LentPolicy, SentPolicy, VllmPolicy
from rolloutmq.services.inference.vllm.process import Vllm, running
from rolloutmq.services.inference.vllm.progress import Progress
from rolloutmq.services.runner import Stop, run_service
from rolloutmq.trainer.weights.address import owner_lives

logger = logging.getLogger(__name__)

READY_POLL_S: Final = 0.25
"""How often vLLM is asked whether it is up; it takes half a minute."""
LOOK_S: Final = 1.0
"""How often vLLM is asked how many steps it took, while it has something to do."""

_T = TypeVar("_T")


class VllmServer(Front):
    """The HTTP side of one vLLM."""

    def __init__(self, policy: VllmPolicy, client: VllmClient, config: InferenceConfig) -> None:
        super().__init__()
        self._policy = policy
        self._client = client
        self._max_waiting = config.max_waiting
        self._progress = Progress(config.vllm.stalled_s, time.monotonic())
        self._limits: set[asyncio.Timeout] = set()
        """Of the requests that it has: without an end until it stalls, or its weights are nobody's."""
        self._is_stalled = False
        self._asked = 0
        self._worked_s = 0.0
        self._working_since = 0.0

    @property
    def policy(self) -> VllmPolicy:
        """See `Front.policy`."""
        return self._policy

    @property
    def busy_s(self) -> float:
        """See `Front.busy_s`: vLLM has something to do as long as it was asked and has not answered."""
        return self._worked_s + (time.monotonic() - self._working_since if self._asked else 0.0)

    def trouble(self) -> str:
        """See `Front.trouble`."""
        busy = "busy" if self._policy.kept(time.monotonic()) else ""
        return super().trouble() or busy or ("stalled" if self._is_stalled else "")

    async def sample(self, job: Job) -> None:
        """Let vLLM sample all continuations of a job.

        Raises:
            ApiError: Too many wait already, or vLLM refuses it.
            WeightsTornError: The weights are half-written.
            WeightsBusyError: A writer that lives keeps them.
            EngineFailedError: vLLM ended the request, or is gone.
            EngineStalledError: It stands still.
        """
        if refusal := self._refusal(time.monotonic()):
            raise refusal
        if self._asked >= self._max_waiting:
            raise ApiError(503, f"{self._asked} requests wait already", "overloaded")
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
        """Say why nothing can be sampled now, if nothing can."""
        if self._policy.is_torn():
            return WeightsTornError(self._policy.version)
        if kept := self._policy.kept(now):
            return kept
        return EngineStalledError(self._progress.still_s(now)) if self._is_stalled else None

    async def _generated(self, job: Job) -> list[list[Continuation]]:
        """Let vLLM sample, for as long as it gets on and its weights are whole."""
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
        """See whether vLLM gets on with what it has; end its requests where it does not; until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._progress.left_s(time.monotonic()) or LOOK_S))
            if not self._asked and not self._is_stalled:
                self._progress.moved(time.monotonic())
                continue
            steps = await self._steps()
            now = time.monotonic()
            if steps is not None:
                self._progress.counted(steps, now)
                if not self._asked:  # it has nothing to do, and says so
                    self._progress.moved(now)
            self._judge(now)

    async def _steps(self) -> int | None:
        """Ask vLLM for its steps; None if it does not say, before it must have."""
        left_s = self._progress.left_s(time.monotonic()) or LOOK_S
        with suppress(EngineFailedError, TimeoutError):
            async with asyncio.timeout(left_s):
                return await self._client.steps()
        return None

    def _judge(self, now: float) -> None:
        """Note whether it stands still, and end what it has if it does."""
        stalled = not self._progress.left_s(now)
        if stalled != self._is_stalled:
            told = "stalled" if stalled else "gets on"
            logger.warning("vllm %s in_hand=%d still_s=%.1f", told, self._asked, self._progress.still_s(now))
        self._is_stalled = stalled
        if stalled:
            self._end_all()

    def _end_all(self) -> None:
        """End all that vLLM has; `_refusal` says why."""
        for limit in (one for one in self._limits if not one.expired()):
            limit.reschedule(asyncio.get_running_loop().time())

    async def follow(self) -> None:
        """Watch the weights, and serve the policy that they are of; until cancelled.

        Raises:
            WeightsMismatchError: The trainer shares some that vLLM does not take; names the tensor.
            EngineFailedError: vLLM does not say.
        """
        while True:
            # They are memory or matter of another process: there is no event to wait for.
            await asyncio.sleep(WATCH_S)
            self._policy = await self._policy.followed(self._client, time.monotonic())
            if self._policy.is_torn():  # a vLLM that is paused would keep them until it stalls
                self._end_all()


async def _together(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Wait for all of them; where one fails the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def serve(run_dir: Path, stop: Stop, name: str = FIRST, draining: asyncio.Event | None = None) -> None:
    """Serve the policy of a run by a vLLM of its own until asked to stop, or to drain.

    Args:
        run_dir: The run.
        stop: Ends it at once; requests in hand are refused.
        name: Of the engine.
        draining: Set from outside to let it drain.

    Raises:
        ConfigError: This run uses another server, the name is none of an engine, or there is no vLLM.
        AddressInUseError: Somebody else has the configured port.
        WeightsMismatchError: vLLM's model is not of the trainer's weights; names the tensor.
        VllmEndedError: vLLM did not come up, or ended by itself.
    """
    run, layout = load_run(run_dir)
    if run.inference.kind != "vllm":
        raise ConfigError("inference.kind", "this run uses another server")
    if engine_number(name) < 0:
        raise ConfigError("engine", f"{name!r} is no engine; they are called {FIRST}, {FIRST}-1, ...")
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
    policy = await _ready(run, layout, vllm, client, leaving)
    if policy is None:
        return
    server = VllmServer(policy, client, run.inference)
    try:
        await first(
            server.follow(),
            server.watch(),
            serve_http(server, layout.engine(name), name, run.inference, leaving),
        )
    finally:
        server.policy.close()


async def _ready(
    run: RunConfig, layout: RunLayout, vllm: Vllm, client: VllmClient, leaving: Leaving
) -> VllmPolicy | None:
    """Wait until vLLM is up and has the weights of the trainer; None if asked to go before."""
    found: list[VllmPolicy] = []
    sent = run.weights.backend == "vllm_http"
    begun = SentPolicy.begun if sent else LentPolicy.begun

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
        raise vllm.failure(f"was not up within {run.inference.vllm.start_s:g} s") from None
    return found[0] if found else None


def _seed(run: RunConfig, name: str) -> int:
    """Return the seed of an engine's noise: two that drew the same would sample every answer twice."""
    return run.run.seed if name == FIRST else random.Random(f"{run.run.seed}/{name}").getrandbits(31)


def main(run_dir: Path, name: str = FIRST) -> int:
    """Run the engine of that name as a process; return its exit code."""
    draining = asyncio.Event()
    return run_service(name, lambda stop: serve(run_dir, stop, name, draining), on_drain=draining.set)
