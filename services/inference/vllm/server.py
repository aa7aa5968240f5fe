"""The engine that samples with vLLM: it starts vLLM, lends it the trainer's weights, and speaks for it.

    trainer --(shared memory)--> extension in vLLM <--(unix socket)-- VllmServer <-- HTTP handlers <-- workers

To workers it is an engine like any other: the same dialect, the same address file, the same drain (see `front`). vLLM
itself listens where only this user reaches it. What workers send is checked here first, so that vLLM is only asked what
can be answered with exact log-probabilities; what comes back is checked too: one log-probability for each token, and a
version for each, else the answer is refused and asked for again.

While the weights are half-written by a trainer that died, or kept by one that was stopped, requests are answered 503,
those in vLLM included. Another segment of the trainer is followed once vLLM has proven it; one that vLLM does not take
ends this process with the reason. A vLLM that ends by itself ends it too, with the end of its log; whoever keeps it
starts it again.
"""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from transformers import AutoConfig

from rolloutmq.bus import segments
from rolloutmq.bus.engines import FIRST, engine_number
from rolloutmq.bus.rundir import FILE_POLL_S, load_run
from rolloutmq.schemas.config import InferenceConfig, RunConfig
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.sharing import (
    SegmentGoneError,
    WeightsBusyError,
    WeightsMismatchError,
    WeightsTornError,
)
from rolloutmq.services.inference.front import WATCH_S, Front, Leaving, first, serve_http
from rolloutmq.services.inference.generate import Job
from rolloutmq.services.inference.protocol import ApiError, Limits
from rolloutmq.services.inference.served import end_ids
from rolloutmq.services.inference.text import Text
from rolloutmq.services.inference.vllm.client import VllmClient
from rolloutmq.services.inference.vllm.installed import require_vllm
from rolloutmq.services.inference.vllm.process import Vllm, running
from rolloutmq.services.runner import Stop, run_service
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.tokenizer import directory_fingerprint

logger = logging.getLogger(__name__)

READY_POLL_S: Final = 0.25
"""How often vLLM is asked whether it is up; it takes half a minute."""
KEPT_S: Final = READ_PATIENCE_S
"""How long one write may last before requests are refused, as vLLM refuses those that it has by then."""

_T = TypeVar("_T")


class LentPolicy:
    """The policy as vLLM has it: what it is, and the state of its weights, which this process only looks at."""

    def __init__(self, layout: RunLayout, share: WeightShare, max_rows: int) -> None:
        config = AutoConfig.from_pretrained(layout.model, local_files_only=True)
        sizes = config.get_text_config()
        self.text = Text(layout.model)
        run, _ = load_run(layout.root)
        self.limits = Limits(
            run.model.name, int(sizes.max_position_embeddings), int(sizes.vocab_size), max_rows
        )
        self.end_ids: Sequence[int] = end_ids(layout, config)
        self.share = share
        self._write: tuple[int, int] | None = None
        self._write_since = 0.0

    @property
    def version(self) -> PolicyVersion:
        """Version of the last whole write."""
        return self.share.version

    def is_torn(self) -> bool:
        """Tell whether the weights are half-written and nobody is at work on them."""
        return self.share.is_torn()

    def look(self, now: float) -> None:
        """Note which write is under way; for `kept`, to be called again and again."""
        write = self.share.write_at_hand()
        if write != self._write:
            self._write, self._write_since = write, now

    def kept(self, now: float) -> WeightsBusyError | None:
        """Say who keeps the weights for longer than any write takes, if somebody does."""
        if self._write is None or now - self._write_since < KEPT_S:
            return None
        if self.share.write_at_hand() != self._write:  # it has just ended
            return None
        return WeightsBusyError(self._write[0], now - self._write_since)


class VllmServer(Front):
    """The HTTP side of one vLLM."""

    def __init__(self, policy: LentPolicy, client: VllmClient, config: InferenceConfig) -> None:
        super().__init__()
        self._policy = policy
        self._client = client
        self._max_waiting = config.max_waiting
        self._asked = 0
        self._worked_s = 0.0
        self._working_since = 0.0

    @property
    def policy(self) -> LentPolicy:
        """See `Front.policy`."""
        return self._policy

    @property
    def busy_s(self) -> float:
        """See `Front.busy_s`: vLLM has something to do as long as it was asked and has not answered."""
        return self._worked_s + (time.monotonic() - self._working_since if self._asked else 0.0)

    def trouble(self) -> str:
        """See `Front.trouble`."""
        return super().trouble() or ("busy" if self._policy.kept(time.monotonic()) else "")

    async def sample(self, job: Job) -> None:
        """Let vLLM sample all continuations of a job.

        Raises:
            ApiError: Too many wait already, or vLLM refuses it.
            WeightsTornError: The weights are half-written.
            WeightsBusyError: A writer that lives keeps them.
            EngineFailedError: vLLM ended the request, or is gone.
        """
        if self._policy.is_torn():
            raise WeightsTornError(self._policy.version)
        if kept := self._policy.kept(time.monotonic()):
            raise kept
        if self._asked >= self._max_waiting:
            raise ApiError(503, f"{self._asked} requests wait already", "overloaded")
        if not self._asked:
            self._working_since = time.monotonic()
        self._asked += 1
        try:
            asked = [
                self._client.generate(prompt, job.sampling, self._policy.end_ids) for prompt in job.prompts
            ]
            found = await _together(asked)
        finally:
            self._asked -= 1
            if not self._asked:
                self._worked_s += time.monotonic() - self._working_since
        job.results = [one for of_prompt in found for one in of_prompt]

    async def follow(self, layout: RunLayout, tokenizer: str) -> None:
        """Watch the weights, and look at another segment once vLLM has it; until cancelled.

        Raises:
            WeightsMismatchError: The trainer shares one that vLLM does not take; names the tensor.
            EngineFailedError: vLLM does not say.
        """
        while True:
            # Both are memory and files of another process: there is no event to wait for.
            await asyncio.sleep(WATCH_S)
            self._policy.look(time.monotonic())
            if self._policy.share.is_replaced():
                fresh = await _attach(layout, self._client, tokenizer)
                if fresh is not None:
                    # What was read of the model's directory is of the trainer that was there before.
                    old, self._policy = self._policy, LentPolicy(layout, fresh, self._policy.limits.max_rows)
                    old.share.close()


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
    while not leaving.is_asked() and not _is_shared(layout):
        with suppress(TimeoutError):
            await asyncio.wait_for(leaving.asked(), FILE_POLL_S)
    if leaving.is_asked():
        return
    async with running(run, layout, name, _seed(run, name)) as vllm, VllmClient.opened(vllm.socket) as client:
        await first(vllm.ended(), _serve(run, layout, name, vllm, client, leaving))


async def _serve(
    run: RunConfig, layout: RunLayout, name: str, vllm: Vllm, client: VllmClient, leaving: Leaving
) -> None:
    tokenizer = directory_fingerprint(layout.model)
    share = await _attached(run, layout, vllm, client, leaving, tokenizer)
    if share is None:
        return
    server = VllmServer(LentPolicy(layout, share, run.inference.max_batch), client, run.inference)
    try:
        await first(
            server.follow(layout, tokenizer),
            serve_http(server, layout.engine(name), name, run.inference, leaving),
        )
    finally:
        server.policy.share.close()


async def _attached(
    run: RunConfig, layout: RunLayout, vllm: Vllm, client: VllmClient, leaving: Leaving, tokenizer: str
) -> WeightShare | None:
    """Wait until vLLM is up and has the weights of the trainer; None if asked to go before."""
    found: list[WeightShare] = []

    async def ready() -> None:
        while not found:
            if await client.answers() and (share := await _attach(layout, client, tokenizer)) is not None:
                found.append(share)
            else:
                await asyncio.sleep(READY_POLL_S)

    try:
        async with asyncio.timeout(run.inference.vllm.start_s):
            await first(ready(), leaving.asked())
    except TimeoutError:
        raise vllm.failure(f"was not up within {run.inference.vllm.start_s:g} s") from None
    return found[0] if found else None


async def _attach(layout: RunLayout, client: VllmClient, tokenizer: str) -> WeightShare | None:
    """Let vLLM attach; None if the trainer is about to share others."""
    said = await client.call("attach_weights", str(layout.weights.absolute()), tokenizer)
    if "error" in said:
        if said.get("again"):
            logger.warning("not attached why=%s", said["error"])
            return None
        raise WeightsMismatchError("vLLM", said["error"])
    try:
        share = WeightShare.open(layout.weights)
    except SegmentGoneError:
        return None
    if share.path.name != said["segment"]:  # there is another by now, which vLLM has not proven
        share.close()
        return None
    logger.info("vllm attached segment=%s version=%s", said["segment"], said["version"])
    return share


def _is_shared(layout: RunLayout) -> bool:
    """Tell whether a living trainer shares its weights, and so has written `model/`."""
    address = segments.read_address(layout.weights)
    owner = segments.owner_of(address) if address else None
    return owner is not None and owner.alive()


def _seed(run: RunConfig, name: str) -> int:
    """Return the seed of an engine's noise: two that drew the same would sample every answer twice."""
    return run.run.seed if name == FIRST else random.Random(f"{run.run.seed}/{name}").getrandbits(31)


def main(run_dir: Path, name: str = FIRST) -> int:
    """Run the engine of that name as a process; return its exit code."""
    draining = asyncio.Event()
    return run_service(name, lambda stop: serve(run_dir, stop, name, draining), on_drain=draining.set)
