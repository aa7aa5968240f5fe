"""Weight transfer into vLLM through a file; the counterpart of `trainer.weights.vllm_http`. Runs inside vLLM.

vLLM's own transfers `ipc` and `nccl` need vLLM or pickles in the trainer. This one works anywhere: the trainer writes a
file with the tensor names of transformers, and vLLM's loaders fuse and pad, cut for several workers, and move to any
device. The file carries the manifest. The transfer verifies vLLM's model against it before loading
(`weight_matching`), and again afterwards, because a load that copies matrices or breaks a tie reports no error.

A failure is kept for the sender's question (`Received.problem`), not raised: of several workers vLLM reads the error of
the first, and takes that of the second for the answer to its next call.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.services.inference.vllm import weight_matching
from rolloutmq.trainer.weights.manifest import WeightManifest
from rolloutmq.trainer.weights.vllm_http import BACKEND, MANIFEST

logger = logging.getLogger(f"vllm.{__name__}")


SHARED: Final = "are shared with a trainer; they cannot be sent"


class Received:
    """Origin of this process's weights."""

    def __init__(self) -> None:
        self.whole = False
        """They come from a completed transfer."""
        self.problem = ""
        """Why the last transfer failed."""
        self.shared = False
        """They are the trainer's own memory, mapped read-only, so no transfer is possible."""


received: Final = Received()


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """Setup information of this transfer: none."""


@dataclass
class Parcel(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One complete set of weights."""

    path: str


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads the weights that a trainer wrote to a file."""

    init_info_cls = Nothing
    update_info_cls = Parcel

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: each file is self-contained."""

    def start_weight_update(self) -> None:
        """Begin an update; until its end the weights are incomplete.

        Raises:
            WeightsMismatchError: The weights are shared with the trainer: loading would write into its
                memory.
        """
        if received.shared:
            raise WeightsMismatchError("weights", SHARED)
        received.whole, received.problem = False, ""
        self._manifest: WeightManifest | None = None

    def receive_weights(self, update_info: Parcel) -> None:
        """Verify the file, then load it. If it belongs to another model, nothing is loaded."""
        try:
            self._manifest = self._loaded(Path(update_info.path))
        except Exception as error:
            received.problem = f"{type(error).__name__}: {error}"
            logger.exception("weights not received")

    def _loaded(self, path: Path) -> WeightManifest:
        with safe_open(path, framework="pt") as file:
            manifest = _manifest(file.metadata())
            names = {spec.name for spec in manifest.tensors}
            if strange := sorted(names ^ set(file.keys())):
                raise WeightsMismatchError(strange[0], "must be in both the file and its manifest")
            weight_matching.require_match(self.model, self._config(), manifest, shards=self._shards())
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            finalize_layerwise_reload(self.model, self.model_config)
        return manifest

    def finish_weight_update(self) -> None:
        """Verify the model again: loading may have changed its tensors.

        If it has, or if nothing was loaded, the weights stay incomplete, and nothing is sampled.
        """
        manifest, self._manifest = self._manifest, None
        if manifest is None:
            return
        try:
            weight_matching.require_match(self.model, self._config(), manifest, shards=self._shards())
        except WeightsMismatchError as error:
            received.problem = str(error)
        else:
            received.whole = True

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.model_config.hf_config.to_dict()
        return config

    def _shards(self) -> int:
        return int(self.parallel_config.tensor_parallel_size)


def _manifest(metadata: dict[str, str] | None) -> WeightManifest:
    try:
        return msgspec.json.decode((metadata or {})[MANIFEST], type=WeightManifest)
    except (KeyError, msgspec.DecodeError) as error:
        raise WeightsMismatchError("manifest", f"the file has no valid manifest: {error}") from None


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
