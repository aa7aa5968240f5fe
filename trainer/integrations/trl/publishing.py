"""The weights of a TRL trainer, published to the engines of its run: `weights.backend` of the configuration says how.

The trainer's modules stay as they are. A model of the same configuration on meta describes the weights, and each write
copies the tensors one by one from the trainer's state dict, gathered if they are sharded (FSDP2). The leading rank
publishes; the others take part in the gathering.

The identity that engines build their model from, `model/` of the run directory, is written from the trainer's model and
tokenizer, so the two cannot differ.
"""

import copy
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig

from rolloutmq.bus.files import PRIVATE_DIRECTORY, copy_private
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.model import skeleton
from rolloutmq.trainer.policy.tokenizer import copy_tokenizer, replace
from rolloutmq.trainer.sharding import gathered
from rolloutmq.trainer.weights.backends import owned
from rolloutmq.trainer.weights.vllm_http import VllmSender

logger = logging.getLogger(__name__)

GENERATION = "generation_config.json"

Tensors = Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
"""Yields the tensors of a trainer's model under the names of its plain transformers model, whole; see `Source`."""


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the state dict of a plain model, or of one sharded by FSDP2."""
    return gathered(model.state_dict().items())


class Publication(Protocol):
    """Target of the trainer's weights. All ranks call both methods, at the same places."""

    def publish(self, version: PolicyVersion) -> None:
        """Publish the weights of the trainer as `version`."""

    def supply(self) -> None:
        """Wait until an engine can sample, where that depends on this trainer."""


class NoPublication:
    """No engine of the run reads the trainer's weights."""

    def publish(self, version: PolicyVersion) -> None:
        """Do nothing."""

    def supply(self) -> None:
        """Do nothing."""


class _Following:
    """A rank that does not lead: it takes part in gathering the tensors."""

    def __init__(self, source: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._source = source

    def publish(self, version: PolicyVersion) -> None:  # noqa: ARG002 - the leading rank publishes it
        for _ in self._source():
            pass

    def supply(self) -> None:
        """Do nothing: the leading rank waits."""


class _Leading:
    """The rank that publishes."""

    def __init__(self, share: Any) -> None:
        self._share = share

    def publish(self, version: PolicyVersion) -> None:
        with self._share.writing(version):
            pass

    def supply(self) -> None:
        if isinstance(self._share, VllmSender):
            self._share.supply()


@contextmanager
def published(
    model: nn.Module,
    tokenizer: Any,
    tensors: Tensors,
    run: RunConfig,
    layout: RunLayout,
    version: PolicyVersion,
    *,
    leads: bool,
) -> Iterator[Publication]:
    """Publish the weights of a trainer for as long as the block lasts, first as `version`.

    All ranks enter it. An orderly end removes the weights.

    Raises:
        ConfigError: The weights of this trainer cannot be published with `weights.backend`.
        WeightsMismatchError: The tensors are not those of the model's configuration; names the first.
    """
    require_publishable(model, tensors, run)

    def source() -> Iterable[tuple[str, Tensor]]:
        return tensors(model)

    if not leads:
        following = _Following(source)
        following.publish(version)
        yield following
        return
    identity = _identity(model)
    _write_identity(model, identity, tokenizer, layout.model)
    with owned(skeleton(identity, identity.dtype), run, layout, version, source) as share:
        logger.info("weights published backend=%s", run.weights.backend)
        yield _Leading(share)


class BusWeightTransfer:
    """Implements TRL's `WeightTransferProtocol`: weights of an `AsyncGRPOTrainer` go to the engines of the run.

    Args:
        run_dir: Run directory; its `weights.backend` is posix_shm or disk.
        model: Path or name of the trainer's model, as the trainer gets it; or the model, neither sharded nor wrapped.
        tokenizer: That of the model.
        version: Returns the policy that the weights are to be published as, such as `lambda: worker.version`.
        dtype: With a path: element type of the trainer's weights, that of `AsyncGRPOConfig.dtype`.
    """

    def __init__(
        self,
        run_dir: str | Path,
        model: nn.Module | str | Path,
        tokenizer: Any,
        version: Callable[[], PolicyVersion],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._run, self._layout = load_run(Path(run_dir))
        if self._run.weights.backend not in {"posix_shm", "disk"}:
            raise ConfigError(
                "weights.backend",
                f"must be posix_shm or disk with AsyncGRPOTrainer (got {self._run.weights.backend}), because it sends "
                "its weights once for each version",
            )
        self._model = _described(model, dtype) if isinstance(model, str | Path) else model
        self._tokenizer = tokenizer
        self._version = version
        self._stack = ExitStack()
        self._share: Any = None
        self._tensors: Iterable[tuple[str, Tensor]] = ()

    def init_weight_transfer(self) -> None:
        """Write the identity that engines build their model from."""
        self._identity = _identity(self._model)
        _write_identity(self._model, self._identity, self._tokenizer, self._layout.model)

    def pause(self) -> None:
        """Do nothing: engines finish their forward pass, and each token has its version."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publish the tensors as the current version, one at a time.

        Raises:
            WeightsMismatchError: They are not all tensors of the model; names the first that differs.
        """
        self._tensors = iterator
        if self._share is None:
            meant = skeleton(self._identity, self._identity.dtype)
            owner = owned(meant, self._run, self._layout, self._version(), lambda: self._tensors)
            self._share = self._stack.enter_context(owner)
        else:
            with self._share.writing(self._version()):
                pass
        self._tensors = ()

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Remove the weights. May be called twice."""
        self._share = None
        self._stack.close()


def require_publishable(model: nn.Module, tensors: Tensors, run: RunConfig) -> None:
    """Check that the weights of a trainer can be published.

    Raises:
        ConfigError: They cannot.
    """
    backend = run.weights.backend
    if tensors is state_tensors and hasattr(model, "peft_config"):
        raise ConfigError(
            "peft_config",
            "the weights of adapters are not merged for the engines; pass `tensors=` a function that yields the "
            "merged tensors, or `publish=False`",
        )
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if sharded and backend == "vllm_http":
        raise ConfigError(
            "weights.backend",
            "must be posix_shm or disk with a sharded trainer (got vllm_http), because a new vLLM gets the weights "
            "from the leading rank alone",
        )


def _described(path: str | Path, dtype: torch.dtype) -> nn.Module:
    """Return the model at a path, without its weights."""
    model: Any = skeleton(AutoConfig.from_pretrained(path), dtype)
    with suppress(OSError):  # it has no such file: the configuration says it all
        model.generation_config = GenerationConfig.from_pretrained(path)
    return cast("nn.Module", model)


def _identity(model: nn.Module) -> Any:
    """Return the configuration of the model with the element type that its weights have."""
    identity: Any = copy.deepcopy(model.config)
    identity.dtype = next(model.parameters()).dtype
    return identity


def _write_identity(model: nn.Module, identity: Any, tokenizer: Any, directory: Path) -> None:
    """Write configuration and tokenizer; the configuration last, so a directory that has one is complete."""
    directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rolloutmq-") as scratch:
        tokenizer.save_pretrained(scratch)
        copy_tokenizer(Path(scratch), directory)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        if ends is not None:
            GenerationConfig(eos_token_id=ends).save_pretrained(scratch)
            copy_private(Path(scratch) / GENERATION, directory / GENERATION)
    replace(directory / "config.json", identity.to_json_string(use_diff=False))
