"""Runs inside vLLM: its weights are those of the trainer, not a copy of them.

Loaded by `--worker-extension-cls` into the process of the engine, where scheduler and worker live together (the
executor is `UniProcExecutor`), in vLLM's own environment. Of ours it imports what needs msgspec and torch alone, which
vLLM has: segment, lock and manifest are the very code that the trainer writes them with.

`attach_weights` maps the segment read-only and makes each parameter of vLLM a view of it, in the fused layout that the
manifest describes (`trainer.weights.placement`). It fails closed: what differs is named, and nothing is changed.

From then on a step of the engine is one read of the weights. The lock is taken before anything is scheduled and given
back after the tokens are recorded, so that no token comes from half-written weights, and the version that was read is
the version of exactly the tokens of that step. Where it is another than that of the step before, the prefix cache is
emptied and what is under way gets its keys and values anew: every token is drawn as if its whole sequence had been read
by the weights of its version. Weights that a dead writer left half-written end every request; so do those that a living
one keeps for too long, and those of another segment that does not fit, for as long as it is that one that is shared.
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
from vllm.logger import init_logger
from vllm.model_executor.layers import utils as layers
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.sharing import (
    SegmentGoneError,
    WeightsBusyError,
    WeightsMismatchError,
    WeightsTornError,
)
from rolloutmq.services.inference.vllm import label, matching
from rolloutmq.services.inference.vllm.transfer import SHARED, received
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S
from rolloutmq.trainer.weights.manifest import WeightManifest
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.proof import digest
from rolloutmq.trainer.weights.tokenizer import require_same_tokenizer

logger = init_logger(f"vllm.{__name__}")

SERVER: Final = "ROLLOUTMQ_VLLM_SERVER"
"""Variable with the process id of the API server, which is to be the parent of this process."""
PATIENCE_S: Final = 1.0
"""How long a step waits for a writer; then the engine looks after its queue, and tries again."""
GIVE_UP_S: Final = READ_PATIENCE_S
"""How long steps are put off before all requests are ended: a writer that keeps the weights for so long is stopped."""
WATCH_S: Final = 0.25
"""How often it is looked whether the trainer shares another segment."""
IN_PARTS: Final = "scheduler and worker must be in one process, and take one step at a time"
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Die when the API server does: one that is killed leaves its engine behind, with all its memory."""
    expected = os.environ.get(SERVER)
    if expected is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(expected):
        os.kill(os.getpid(), signal.SIGKILL)


def keep_the_matrix(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001
    """Multiply by the matrix itself.

    Stands in for what packs each matrix into a copy when it is loaded, and frees the first: then a write would change
    nothing, and of tied embeddings only the one half that is looked up.
    """
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


class Reader:
    """The weights of this engine and what was done about their last change. One for the process."""

    def __init__(self) -> None:
        self.share: WeightShare | None = None
        self._model: Any = None
        self._config: dict[str, Any] = {}
        self._address = Path()
        self._tokenizer = ""
        self.steps = 0
        """Steps that were begun, those included that were put off: who waits for the weights does not hang."""
        self._seen: tuple[str, PolicyVersion] | None = None
        self._look_at = 0.0
        self._busy_since: float | None = None

    def attach(self, model: Any, config: dict[str, Any], address: Path, tokenizer: str) -> WeightShare:
        """Make the parameters of a model views of the segment that the address file names.

        Args:
            model: Of vLLM.
            config: Its configuration.
            address: The file.
            tokenizer: Fingerprint of the tokenizer of those who send prompts here; of every segment to come, too.

        Raises:
            SegmentGoneError: There is none, or its owner is dead.
            WeightsMismatchError: It is not of this model or tokenizer; names the tensor or the key.
        """
        share = WeightShare.open(address)
        try:
            if not share.owner_lives():
                raise SegmentGoneError(str(share.path), "its owner is dead")
            manifest = share.manifest()
            require_same_tokenizer(manifest.tokenizer, tokenizer)
            matching.require_match(model, config, manifest)
            received.lent = True
            matching.bind(model, manifest, share.physical_views())
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
        """Attach anew if the trainer shares another segment by now.

        Raises:
            WeightsMismatchError: That one is not of this model. The next step looks again at once: what is shared now
                is not what would be sampled from.
        """
        assert self.share is not None
        if (now := time.monotonic()) < self._look_at:
            return
        if self.share.is_replaced():
            # Where it is gone, the trainer is about to publish another; until then the old one is what it says it is.
            with suppress(SegmentGoneError):
                self.attach(self._model, self._config, self._address, self._tokenizer)
                logger.info("attached anew segment=%s", self.share.path.name)
        self._look_at = now + WATCH_S

    def is_new(self, version: PolicyVersion) -> bool:
        """Tell whether these are other weights than those of the last step."""
        assert self.share is not None
        seen = (self.share.nonce, version)
        changed, self._seen = seen != self._seen, seen
        self._busy_since = None
        return changed

    def busy_s(self) -> float:
        """Return for how long no step had the weights; called for one that had not."""
        now = time.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        return now - self._busy_since


reader: Final = Reader()
engines: Final[list[Any]] = []
"""The scheduler's side of vLLM, if it was seen in this process."""
_plain_step: Final = EngineCore.step
_plain_call: Final = EngineCore.collective_rpc


def called(
    core: EngineCore, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
) -> list[Any]:
    """Let the worker do something, which it learns from whom; in place of `EngineCore.collective_rpc`.

    With the parameters of that one: vLLM looks at them, and passes on what has a name.
    """
    engines[:] = [core]
    found: list[Any] = _plain_call(core, method, timeout, args, kwargs)
    return found


def refused_step(_core: EngineCore) -> None:
    """End the engine; in place of `EngineCore.step_with_batch_queue`, whose batches are of several reads."""
    raise RuntimeError(f"vLLM takes several steps at a time: {IN_PARTS}")


def in_parts() -> bool:
    """Tell whether a step of this engine is another than `step`, or is taken in another process."""
    return not engines or getattr(engines[0].step_fn, "__func__", None) is not step


def step(core: EngineCore) -> tuple[dict[int, Any], bool]:
    """Take one step of the engine under one version of the weights; in place of `EngineCore.step`."""
    if not core.scheduler.has_requests():
        return {}, False
    reader.steps += 1
    try:
        if reader.share is None:
            if received.whole:  # copies change only while nothing is sampled, and vLLM knows their version
                return _taken(core)
            raise SegmentGoneError("weights", "none were attached or received")
        reader.follow()
        with reader.share.reading(PATIENCE_S) as version:
            if reader.is_new(version):
                # Keys and values of other weights are none of these.
                core.scheduler.reset_prefix_cache(reset_running_requests=True)
                core._weight_version = label.of(version)
            return _taken(core)
    except WeightsBusyError as error:
        if reader.busy_s() < GIVE_UP_S:
            logger.warning("step put off why=%s", error)
            return {}, False
        _end_all(core, error)
    except (WeightsTornError, WeightsMismatchError, SegmentGoneError) as error:
        _end_all(core, error)
    # There is nothing left to sample; but the worker must hear of what ended, or the engine would never be idle.
    return _taken(core)


def _end_all(core: EngineCore, error: RolloutMQError) -> None:
    aborted = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    core._send_abort_outputs(aborted)
    # As text: an error holds the frames that it went through, and those hold the memory of a segment that is gone.
    logger.warning("requests ended count=%d why=%s", len(aborted), str(error))


def _taken(core: EngineCore) -> tuple[dict[int, Any], bool]:
    outputs: tuple[dict[int, Any], bool] = _plain_step(core)
    return outputs


class SharedWeights:
    """What the worker of vLLM gets beside its own methods, for `/collective_rpc`."""

    def attach_weights(self: Any, address: str, tokenizer: str = "") -> dict[str, Any]:
        """Attach to the segment that an address file names; say to which, or why not."""
        if in_parts():
            return {"error": IN_PARTS, "again": False}
        try:
            share = reader.attach(self.model_runner.get_model(), _config(self), Path(address), tokenizer)
        except RolloutMQError as error:
            return {"error": str(error), "again": isinstance(error, SegmentGoneError)}
        except Exception as error:  # the caller would be told nothing but a status
            logger.exception("attaching failed")
            return {"error": f"{type(error).__name__}: {error}", "again": False}
        return {"segment": share.path.name, "version": label.of(share.version)}

    def steps_taken(self: Any) -> dict[str, int]:
        """Tell how many steps were begun so far; called between two of them, so that one that hangs keeps it silent."""
        return {"steps": reader.steps}

    def match_weights(self: Any, encoded: str) -> dict[str, str]:
        """Tell which tensor of vLLM's model is another than a manifest says, or why none can be sent."""
        if received.lent:
            return {"tensor": "weights", "problem": SHARED}
        manifest = msgspec.json.decode(encoded, type=WeightManifest)
        try:
            matching.require_match(self.model_runner.get_model(), _config(self), manifest)
        except WeightsMismatchError as error:
            return {"tensor": error.tensor, "problem": error.problem}
        return {}

    def sent_weights(self: Any) -> dict[str, Any]:
        """Tell whether the weights are those of a transfer that is over, and of which version.

        It is over when vLLM samples again: a sender may die with the weights whole and vLLM paused.
        """
        if not engines:
            return {"whole": False, "version": ""}
        core = engines[0]
        return {
            "whole": received.whole and not core.is_scheduler_paused(),
            "version": core._weight_version,
        }

    def weight_digests(self: Any, exact: bool = False) -> dict[str, str]:
        """Tell what each tensor of vLLM holds; they must not change meanwhile."""
        model = self.model_runner.get_model()
        return {name: digest(tensor, exact=exact) for name, tensor in model.named_parameters()}


def _config(worker: Any) -> dict[str, Any]:
    config: dict[str, Any] = worker.model_config.hf_config.to_dict()
    return config


end_with_parent()
layers.dispatch_cpu_unquantized_gemm = keep_the_matrix
EngineCore.step = step
EngineCore.step_with_batch_queue = refused_step
EngineCore.collective_rpc = called
