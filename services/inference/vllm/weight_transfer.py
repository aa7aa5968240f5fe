"""Weight transfer into vLLM through a file; the counterpart of `trainer.weights.vllm_http`. Runs inside vLLM.

vLLM's own transfers `ipc` and `nccl` need CUDA. This one works anywhere: the trainer writes a file with the tensor
names of transformers, and vLLM's loaders fuse and pad. The file carries the manifest. The transfer verifies vLLM's
model against it before loading (`weight_matching`), and again afterwards, because a load that copies matrices or breaks
a tie reports no error.
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
        received.whole = False
        self._manifest: WeightManifest | None = None

    def receive_weights(self, update_info: Parcel) -> None:
        """Verify the file, then load it.

        Raises:
            WeightsMismatchError: It belongs to another model; nothing was loaded.
        """
        with safe_open(Path(update_info.path), framework="pt") as file:
            manifest = _manifest(file.metadata())
            names = {spec.name for spec in manifest.tensors}
            if strange := sorted(names ^ set(file.keys())):
                raise WeightsMismatchError(strange[0], "must be in both the file and its manifest")
            weight_matching.require_match(self.model, self._config(), manifest)
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            finalize_layerwise_reload(self.model, self.model_config)
        self._manifest = manifest

    def finish_weight_update(self) -> None:
        """Verify the model again. If nothing was loaded the weights stay incomplete, and nothing is sampled.

        Raises:
            WeightsMismatchError: Loading changed the tensors of the model. A second call ends the update.
        """
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            weight_matching.require_match(self.model, self._config(), manifest)
            received.whole = True

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.model_config.hf_config.to_dict()
        return config


def _manifest(metadata: dict[str, str] | None) -> WeightManifest:
    try:
        return msgspec.json.decode((metadata or {})[MANIFEST], type=WeightManifest)
    except (KeyError, msgspec.DecodeError) as error:
        raise WeightsMismatchError("manifest", f"the file has no valid manifest: {error}") from None


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
