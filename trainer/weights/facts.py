"""What no shape proves: facts of a model that change its output while every tensor stays the same.

Taken from two places. The configuration, whole, but for what is known not to matter: a key that nobody has heard of
yet (a new scaling, another cap on the logits) is compared like the rest. And from the modules themselves every number
with a point that they keep as an attribute: epsilons, scalings, the attention scaling of RoPE, for each kind of layer
where a model has several. Models are inspected by duck typing, so nothing here imports torch.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rolloutmq.schemas.sharing import WeightsMismatchError

if TYPE_CHECKING:
    from torch import nn

IGNORED: Final = frozenset(
    {
        *("architectures", "auto_map", "transformers_version", "tokenizer_class", "dtype", "torch_dtype"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "initializer_range"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    }
)
"""Keys of a configuration without influence on the logits. Types are proven tensor by tensor, ids by the tokenizer."""


def config_facts(model: "nn.Module") -> dict[str, Any]:
    """Return the configuration of a model as JSON has it, without what is ignored; nothing if it has none."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    return plain(config.to_dict())


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON has it, without what is ignored."""
    kept: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(_kept(config), enc_hook=str))
    return kept


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _kept(value) if key.endswith("_config") and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in IGNORED and not key.startswith("_")
    }


def module_facts(model: "nn.Module") -> dict[str, str]:
    """Return every floating-point attribute of every module by its full name."""
    return {
        f"{prefix}.{name}" if prefix else name: repr(value)
        for prefix, module in model.named_modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, float) and not name.startswith("_")
    }


def require_same_config(shared: Mapping[str, Any], mine: Mapping[str, Any], path: str = "config") -> None:
    """Prove that two configurations say the same of the output.

    Raises:
        WeightsMismatchError: They do not; names the first key that differs, to its depth.
    """
    for key in sorted(shared.keys() | mine.keys()):
        left, right = shared.get(key), mine.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            require_same_config(left, right, f"{path}.{key}")
        elif left != right:
            raise WeightsMismatchError(f"{path}.{key}", f"{left!r} in the segment, {right!r} in the model")


def require_reached(model: "nn.Module") -> None:
    """Prove that no module hides from the state dict, in a plain list or dict, where nothing would bind it.

    Raises:
        WeightsMismatchError: One does; names the attribute.
    """
    known = {id(module) for module in model.modules()}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            if any(hasattr(one, "named_modules") and id(one) not in known for one in _members(value)):
                where = f"{prefix}.{name}" if prefix else name
                raise WeightsMismatchError(where, "holds modules that are not part of the model")


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
