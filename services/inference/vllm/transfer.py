"""Runs inside vLLM: its own weight transfer, by way of a file; what `trainer.weights.vllm_http` talks to.

Of the transfers that vLLM brings, `ipc` and `nccl` need CUDA. This one works anywhere: the trainer writes a file with
the names of transformers, and vLLM's own loaders fuse and pad. The file carries the manifest of the weights, and
nothing is loaded before vLLM's model was proven to mean the same tensors (`matching`); afterwards it is proven again,
since a load that packs matrices into copies, or loosens a tie, is silent.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rolloutmq.schemas.sharing import WeightsMismatchError
from rolloutmq.services.inference.vllm import matching
from rolloutmq.trainer.weights.manifest import WeightManifest
from rolloutmq.trainer.weights.vllm_http import BACKEND, MANIFEST

logger = logging.getLogger(f"vllm.{__name__}")


SHARED: Final = "are shared with a trainer; nothing can be sent here"


class Received:
    """What is known of where the weights of this process come from."""

    def __init__(self) -> None:
        self.whole = False
        """Whether they are those of a transfer that was finished."""
        self.lent = False
        """Whether they are the trainer's own memory, mapped read-only: then nothing can be received."""


received: Final = Received()


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """What this transfer needs to know beforehand."""


@dataclass
class Parcel(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One whole set of weights."""

    path: str


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads what a trainer left in a file."""

    init_info_cls = Nothing
    update_info_cls = Parcel

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing is set up: each file says all."""

    def start_weight_update(self) -> None:
        """From here on, until the end, the weights are nobody's.

        Raises:
            WeightsMismatchError: They are the trainer's, and shared: loading would write into its memory.
        """
        if received.lent:
            raise WeightsMismatchError("weights", SHARED)
        received.whole = False
        self._manifest: WeightManifest | None = None

    def receive_weights(self, update_info: Parcel) -> None:
        """Prove the file, then load it.

        Raises:
            WeightsMismatchError: It is not of this model; nothing was loaded.
        """
        with safe_open(Path(update_info.path), framework="pt") as file:
            manifest = _manifest(file.metadata())
            names = {spec.name for spec in manifest.tensors}
            if strange := sorted(names ^ set(file.keys())):
                raise WeightsMismatchError(strange[0], "is in the file or in its manifest only")
            matching.require_match(self.model, self._config(), manifest)
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            finalize_layerwise_reload(self.model, self.model_config)
        self._manifest = manifest

    def finish_weight_update(self) -> None:
        """Prove the model once more; where nothing was loaded the weights stay nobody's, and nothing is sampled.

        Raises:
            WeightsMismatchError: Loading has changed what it consists of. A second call ends the update.
        """
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            matching.require_match(self.model, self._config(), manifest)
            received.whole = True

    def shutdown(self) -> None:
        """Nothing is held."""

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.model_config.hf_config.to_dict()
        return config


def _manifest(metadata: dict[str, str] | None) -> WeightManifest:
    try:
        return msgspec.json.decode((metadata or {})[MANIFEST], type=WeightManifest)
    except (KeyError, msgspec.DecodeError) as error:
        raise WeightsMismatchError("manifest", f"the file has none: {error}") from None


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
