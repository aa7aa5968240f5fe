"""LoRA: the policy trains small matrices beside frozen weights; servers see plain weights.

    W = W0 + alpha / rank * B A        W0 frozen and private, A and B trained, W shared

Source: Hu et al. 2021, "LoRA" (arXiv:2106.09685), eq. 3. The trainer computes with W0, A and B, like peft. After each
step it writes W into the shared weights, under the write lock. Servers need no support for adapters, and layers without
adapters are shared with the trainer itself.

    plain policy -> `Adapters` keeps W0 -> `restore`, if resumed -> weights are shared -> `inject` -> steps, `publish`

The order matters: the first shared weights must be those of their version. The plain policy stays unchanged and holds
W; a twin of it is trained.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rolloutmq.bus.files import make_private, write_private
from rolloutmq.schemas.config.trainer import LoraConfig
from rolloutmq.schemas.errors import ConfigError, MissingError, install_remedy
from rolloutmq.trainer.policy.device import device_of
from rolloutmq.trainer.policy.model import twin
from rolloutmq.trainer.weights.manifest import named_tensors

ADAPTERS: Final = "adapter_model.safetensors"
DESCRIPTION: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
"""peft's prefix of module names in a file."""


class Adapters:
    """The adapters of one policy."""

    def __init__(self, policy: nn.Module, config: LoraConfig, base: str = "") -> None:
        """Keep a copy of the plain weights; the policy is not changed.

        Args:
            policy: The policy as built or loaded, before it is shared.
            config: Rank, alpha and target layers.
            base: Directory the policy was loaded from; recorded in the adapter files.

        Raises:
            ConfigError: A target is not a linear layer of the policy.
            MissingError: peft is not installed.
        """
        _require_peft()
        self._policy = policy
        self._config = config
        self._directory = base
        self._targets = _targets(policy, config)
        self._base = {name: _linear(policy, name).weight.detach().clone() for name in self._targets}
        self._learner = policy
        self._restored: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}
        self.base_digest = _digest(policy)
        """Digest of the base weights of the adapters."""

    @property
    def alpha(self) -> float:
        """Scale of the adapters, before division by their rank."""
        return self._config.alpha

    def restore(self, tensors: Mapping[str, Tensor], base_digest: str, alpha: float) -> None:
        """Load saved adapters into the plain policy, whose weights become W.

        Raises:
            ConfigError: They have another rank, other targets or another alpha, or belong to other weights.
        """
        if not tensors:
            raise ConfigError(
                "trainer.lora", "the checkpoint has no adapters; start a new run or remove [trainer.lora]"
            )
        if {key: tuple(one.shape) for key, one in tensors.items()} != self._shapes():
            raise ConfigError(
                "trainer.lora", "the adapters of the checkpoint have another rank or other targets"
            )
        if alpha != self._config.alpha:
            raise ConfigError(
                "trainer.lora.alpha", f"the adapters of the checkpoint were trained with {alpha}"
            )
        if base_digest != self.base_digest:
            raise ConfigError(
                "model", "its weights differ from those that the adapters of the checkpoint were trained on"
            )
        device = device_of(self._policy)
        self._restored = {key: tensor.to(device) for key, tensor in tensors.items()}
        with torch.no_grad():
            for name in self._targets:
                down, up = (self._restored[key] for key in _keys(name))
                _linear(self._policy, name).weight.copy_(self._sum(name, down, up))

    def _shapes(self) -> dict[str, tuple[int, int]]:
        shapes: dict[str, tuple[int, int]] = {}
        rank = self._config.rank
        for name, base in self._base.items():
            down, up = _keys(name)
            shapes |= {down: (rank, base.shape[1]), up: (base.shape[0], rank)}
        return shapes

    def inject(self) -> nn.Module:
        """Return the policy to train: adapters beside W0, all else from the plain policy, which is shared by now."""
        from peft import inject_adapter_in_model

        self._shared = {name: _linear(self._policy, name).weight.detach() for name in self._targets}
        self._learner = twin(self._policy)
        self._learner.requires_grad_(False)
        inject_adapter_in_model(self._peft_config(), self._learner)
        for name in self._targets:
            layer: Any = self._learner.get_submodule(name)
            layer.base_layer.weight = nn.Parameter(self._base[name], requires_grad=False)
            for matrix, key in zip(_matrices(layer), _keys(name), strict=True):
                matrix.data = matrix.data.float()  # they are float32 masters, whatever the dtype of W0
                matrix.requires_grad_(True)
                if self._restored:
                    matrix.data.copy_(self._restored[key])
        self._restored = {}
        return self._learner.eval()

    def _peft_config(self) -> Any:
        from peft import LoraConfig as PeftConfig

        return PeftConfig(
            r=self._config.rank,
            lora_alpha=self._config.alpha,  # pyright: ignore[reportArgumentType] - peft only divides it by r
            target_modules=list(self._targets),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._directory,
            inference_mode=True,
        )

    def publish(self) -> None:
        """Write W into the shared weights. Call under the write lock."""
        with torch.no_grad():
            for name, shared in self._shared.items():
                down, up = _matrices(self._learner.get_submodule(name))
                shared.copy_(self._sum(name, down, up))

    def _sum(self, name: str, down: Tensor, up: Tensor) -> Tensor:
        scale = self._config.alpha / self._config.rank
        return torch.addmm(self._base[name].float(), up.float(), down.float(), alpha=scale)

    def save(self, directory: Path) -> None:
        """Write the adapters in peft's format."""
        tensors = {
            key: matrix.detach().contiguous()
            for name in self._targets
            for key, matrix in zip(_keys(name), _matrices(self._learner.get_submodule(name)), strict=True)
        }
        save_file(tensors, directory / ADAPTERS, metadata={"format": "pt"})
        make_private(directory / ADAPTERS)
        description = self._peft_config().to_dict()
        description["target_modules"] = sorted(self._targets)
        write_private(directory / DESCRIPTION, json.dumps(description, indent=2, default=str).encode())


def _require_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        raise MissingError("peft", f"`[trainer.lora]` needs it; {install_remedy('lora')}") from None


def _targets(policy: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """Return the full names of the adapted layers, in the order of the policy."""
    head = policy.get_output_embeddings()  # type: ignore[operator]
    linear = [
        name for name, module in policy.named_modules() if type(module) is nn.Linear and module is not head
    ]
    wanted = set(config.targets)
    if unknown := wanted - {name.rpartition(".")[2] for name in linear}:
        raise ConfigError(
            "trainer.lora.targets", f"no such linear layer in the policy: {', '.join(sorted(unknown))}"
        )
    return tuple(name for name in linear if not wanted or name.rpartition(".")[2] in wanted)


def _linear(policy: nn.Module, name: str) -> nn.Linear:
    found = policy.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def _matrices(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A `(rank, inputs)` and B `(outputs, rank)` of a layer."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def _keys(name: str) -> tuple[str, str]:
    return f"{_PREFIX}{name}.lora_A.weight", f"{_PREFIX}{name}.lora_B.weight"


def _digest(policy: nn.Module) -> str:
    total = 0
    for name, tensor in named_tensors(policy):
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        total = crc32(raw.data, crc32(name.encode(), total))
    return f"{total:08x}"
