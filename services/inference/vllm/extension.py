"""vLLM worker extension: vLLM's weights become views of the trainer's memory, not a copy. Runs inside vLLM.

`--worker-extension-cls` loads it into vLLM's workers, in vLLM's own environment. It imports only modules that need
msgspec and torch, which vLLM has: segment, lock and manifest are the code that the trainer uses.

Weights that are sent are vLLM's own (`weight_transfer`): it may have several workers, in processes of their own, and
take several steps at a time. The rest of this page is about weights that are mapped. Those need scheduler and worker in
one process (the executor is `UniProcExecutor`), and one step at a time.

`attach_weights` maps the segment read-only, or opens the owner's memory on this GPU (`trainer.weights.cuda_ipc`), and
makes each parameter of vLLM a view of it, in the fused layout of the manifest (`trainer.weights.layout`). It fails
closed: on a mismatch it names the tensor and changes nothing.

From then on each engine step is one read of the weights. The step takes the lock before scheduling and releases it
after recording the tokens. So no token comes from half-written weights, and the version read is the version of all
tokens of that step. When the version changes, the step resets the prefix cache and recomputes keys and values of
running requests: every token is drawn as if its version had read the whole sequence. All requests end if the weights
are half-written by a dead writer, held too long by a live one, or replaced by a segment that does not match.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers import utils as layers  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.core import EngineCore  # pyright: ignore[reportMissingImports]
from vllm.v1.request import RequestStatus  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu_worker import Worker  # pyright: ignore[reportMissingImports]

from rolloutmq.schemas.errors import (
    RolloutMQError,
    SegmentGoneError,
    WeightsBusyError,
    WeightsMismatchError,
    WeightsTornError,
)
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.vllm import version_label, weight_matching
from rolloutmq.services.inference.vllm.weight_transfer import SHARED, received
from rolloutmq.trainer.weights.cuda_ipc import share_kind
from rolloutmq.trainer.weights.fingerprint import require_same_tokenizer
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S
from rolloutmq.trainer.weights.manifest import WeightManifest
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.verify import digest

logger = init_logger(f"vllm.{__name__}")

SERVER: Final = "ROLLOUTMQ_VLLM_SERVER"
"""Environment variable with the process id of the API server, the parent of this process."""
PATIENCE_S: Final = 1.0
"""Seconds a step waits for a writer; then the engine serves its queue and tries again."""
GIVE_UP_S: Final = READ_PATIENCE_S
"""Seconds of postponed steps after which all requests are aborted: the writer is stopped."""
WATCH_S: Final = 0.25
"""Seconds between two checks for a new segment of the trainer."""
IN_PARTS: Final = "scheduler and worker must share one process and take one step at a time"
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Die with the API server: a killed one would leave its engine behind, with all its memory.

    A worker in a process of its own dies with the engine, which vLLM ends with the server.
    """
    expected = os.environ.get(SERVER)
    if expected is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if int(expected) not in {os.getppid(), _parent(os.getppid())}:
        os.kill(os.getpid(), signal.SIGKILL)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def keep_the_matrix(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001
    """Multiply by the original matrix.

    Replaces vLLM's packing of each matrix into a copy at load time. With copies, later writes would have no effect, and
    tied embeddings would change in one of their two uses only.
    """
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


class Reader:
    """The attached weights of this engine. One per process."""

    def __init__(self) -> None:
        self.share: WeightShare | None = None
        self._model: Any = None
        self._config: dict[str, Any] = {}
        self._address = Path()
        self._tokenizer = ""
        self.steps = 0
        """Steps begun, including postponed ones: an engine that waits for the weights does not hang. A worker in a
        process of its own counts its forward passes.
        """
        self._seen: tuple[str, PolicyVersion] | None = None
        self._look_at = 0.0
        self._busy_since: float | None = None

    def attach(self, model: Any, config: dict[str, Any], address: Path, tokenizer: str) -> WeightShare:
        """Make the parameters of a model views of the segment that the address file names.

        Args:
            model: vLLM's model.
            config: Its configuration.
            address: The address file.
            tokenizer: Fingerprint of the clients' tokenizer; later segments must have it too.

        Raises:
            SegmentGoneError: There is no segment, or its owner is dead.
            WeightsMismatchError: It belongs to another model or tokenizer; names the tensor or the key.
        """
        share = share_kind(address).open(address)
        try:
            if not share.owner_lives():
                raise SegmentGoneError(str(share.path), "its owner is dead")
            manifest = share.manifest()
            require_same_tokenizer(manifest.tokenizer, tokenizer)
            views = share.physical_views()
            device = next((one.device for one in views.values()), torch.device("cpu"))
            weight_matching.require_match(model, config, manifest, mapped=device)
            received.shared = True
            weight_matching.bind(model, manifest, views)
        except BaseException:
            share.close()
            raise
        old, self.share = self.share, share
        self._model, self._config, self._address, self._tokenizer = model, config, address, tokenizer
        self._look_at = time.monotonic() + WATCH_S
        if old is not None:
            old.close()
        return share

    def follow(self) -> None:
        """Attach again if the trainer shares another segment.

        Raises:
            WeightsMismatchError: The new segment does not match. The next step checks again at once.
        """
        assert self.share is not None
        if (now := time.monotonic()) < self._look_at:
            return
        if self.share.is_replaced():
            # If it is gone, the trainer is about to publish another; until then the old segment stays valid.
            with suppress(SegmentGoneError):
                self.attach(self._model, self._config, self._address, self._tokenizer)
                logger.info("reattached segment=%s", self.share.path.name)
        self._look_at = now + WATCH_S

    def is_new(self, version: PolicyVersion) -> bool:
        """Return whether the weights changed since the last step."""
        assert self.share is not None
        seen = (self.share.nonce, version)
        changed, self._seen = seen != self._seen, seen
        self._busy_since = None
        return changed

    def busy_s(self) -> float:
        """Return the seconds since steps have been postponed; called for a postponed step."""
        now = time.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        return now - self._busy_since


reader: Final = Reader()
engines: Final[list[Any]] = []
"""vLLM's engine cores in this process, once seen."""
_plain_step: Final = EngineCore.step
_plain_batched_step: Final = EngineCore.step_with_batch_queue
_plain_execute: Final = Worker.execute_model
_plain_call: Final = EngineCore.collective_rpc


def called(
    core: EngineCore, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
) -> list[Any]:
    """Run a worker method and record the engine core; replaces `EngineCore.collective_rpc`.

    Keeps that signature, because vLLM inspects it and passes arguments by name.
    """
    engines[:] = [core]
    found: list[Any] = _plain_call(core, method, timeout, args, kwargs)
    return found


def batched_step(core: EngineCore) -> tuple[dict[int, Any] | None, bool]:
    """Take a step of an engine with several at a time; replaces `EngineCore.step_with_batch_queue`.

    Its batches span several reads, so `attach_weights` refuses it. Weights that were sent change only while it is
    paused.
    """
    if not received.whole and core.scheduler.has_requests():
        _end_all(core, SegmentGoneError("weights", "no weights were received"))
    outputs: tuple[dict[int, Any] | None, bool] = _plain_batched_step(core)
    return outputs


def executed(worker: Worker, scheduled: Any) -> Any:
    """Count a forward pass; replaces `Worker.execute_model`."""
    reader.steps += 1
    return _plain_execute(worker, scheduled)


def in_parts() -> bool:
    """Return whether this engine steps by another function than `step`, or in another process."""
    return not engines or getattr(engines[0].step_fn, "__func__", None) is not step


def step(core: EngineCore) -> tuple[dict[int, Any], bool]:
    """Take one engine step under one version of the weights; replaces `EngineCore.step`."""
    if not core.scheduler.has_requests():
        return {}, False
    reader.steps += 1
    try:
        if reader.share is None:
            if received.whole:  # vLLM changes copies only while paused, and tracks their version
                return _taken(core)
            raise SegmentGoneError("weights", "no weights were attached or received")
        reader.follow()
        with reader.share.reading(PATIENCE_S) as version:
            if reader.is_new(version):
                # Cached keys and values belong to the old weights.
                core.scheduler.reset_prefix_cache(reset_running_requests=True)
                core._weight_version = version_label.of(version)
            return _taken(core)
    except WeightsBusyError as error:
        if reader.busy_s() < GIVE_UP_S:
            logger.warning("step postponed error=%s", error)
            return {}, False
        _end_all(core, error)
    except (WeightsTornError, WeightsMismatchError, SegmentGoneError) as error:
        _end_all(core, error)
    # Nothing is left to sample, but the worker must see the aborts, or the engine would never be idle.
    return _taken(core)


def _end_all(core: EngineCore, error: RolloutMQError) -> None:
    aborted = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    core._send_abort_outputs(aborted)
    # As text: the traceback would keep the memory of a lost segment mapped.
    logger.warning("requests aborted count=%d error=%s", len(aborted), str(error))


def _taken(core: EngineCore) -> tuple[dict[int, Any], bool]:
    outputs: tuple[dict[int, Any], bool] = _plain_step(core)
    return outputs


class SharedWeights:
    """Methods added to vLLM's worker, for `/collective_rpc`."""

    def attach_weights(self: Any, address: str, tokenizer: str = "") -> dict[str, Any]:
        """Attach to the segment that an address file names; return its name, or the error."""
        if in_parts():
            return {"error": IN_PARTS, "again": False}
        try:
            share = reader.attach(self.model_runner.get_model(), _config(self), Path(address), tokenizer)
        except RolloutMQError as error:
            return {"error": str(error), "again": isinstance(error, SegmentGoneError)}
        except Exception as error:  # otherwise the caller would see a status only
            logger.exception("attach failed")
            return {"error": f"{type(error).__name__}: {error}", "again": False}
        return {"segment": share.path.name, "version": version_label.of(share.version)}

    def steps_taken(self: Any) -> dict[str, int]:
        """Return the number of steps begun. Runs between two steps, so a hanging step delays it."""
        return {"steps": reader.steps}

    def match_weights(self: Any, encoded: str) -> dict[str, str]:
        """Return the first tensor of vLLM's model that differs from a manifest, or an empty dictionary."""
        if received.shared:
            return {"tensor": "weights", "problem": SHARED}
        manifest = msgspec.json.decode(encoded, type=WeightManifest)
        try:
            weight_matching.require_match(
                self.model_runner.get_model(), _config(self), manifest, shards=_shards(self)
            )
        except WeightsMismatchError as error:
            return {"tensor": error.tensor, "problem": error.problem}
        return {}

    def sent_weights(self: Any) -> dict[str, bool]:
        """Return whether the weights of this worker are those of a completed transfer."""
        return {"whole": received.whole}

    def end_update(self: Any) -> dict[str, str]:
        """End a transfer that failed, if there is one: vLLM would not begin another."""
        if self._weight_update_active:
            self.finish_weight_update()
        return {}

    def update_problem(self: Any) -> dict[str, str]:
        """Return why the last transfer failed, or an empty text."""
        return {"problem": received.problem}

    def weight_digests(self: Any, exact: bool = False) -> dict[str, str]:
        """Return digests of vLLM's tensors; the weights must not change meanwhile."""
        model = self.model_runner.get_model()
        return {name: digest(tensor, exact=exact) for name, tensor in model.named_parameters()}


def _config(worker: Any) -> dict[str, Any]:
    config: dict[str, Any] = worker.model_config.hf_config.to_dict()
    return config


def _shards(worker: Any) -> int:
    """Return how many workers share each tensor."""
    return int(worker.vllm_config.parallel_config.tensor_parallel_size)


end_with_parent()
layers.dispatch_cpu_unquantized_gemm = keep_the_matrix
EngineCore.step = step
EngineCore.step_with_batch_queue = batched_step
EngineCore.collective_rpc = called
Worker.execute_model = executed
