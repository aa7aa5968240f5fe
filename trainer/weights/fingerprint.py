"""Fingerprint of a model and its tokenizer: properties that change the output and that shapes do not show.

Two sources: the whole configuration, except keys known not to matter, so that a new key (a scaling, a logit cap) is
compared too; and every floating-point attribute of the modules: epsilons, scalings, the attention scaling of RoPE, per
layer type. Models are inspected by duck typing, so nothing here imports torch.

For tokenizers held in memory see `fingerprint`; `bus.tokenizer_fingerprint` defines its content.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rolloutmq.bus.tokenizer_fingerprint import FILE, fingerprint_of
from rolloutmq.bus.tokenizer_fingerprint import fingerprint as in_directory
from rolloutmq.schemas.errors import WeightsMismatchError

if TYPE_CHECKING:
    from torch import nn


IGNORED: Final = frozenset(
    {
        *("architectures", "auto_map", "transformers_version", "tokenizer_class", "dtype", "torch_dtype"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "initializer_range"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "head_dtype"),
    }
)
"""Configuration keys without influence on the logits. Types are checked per tensor, token ids by the tokenizer.
`head_dtype` is how finely a side computes the logits, not what they are.
"""


def config_facts(model: "nn.Module") -> dict[str, Any]:
    """Return the relevant configuration of a model as JSON values; empty if it has none."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    return plain(config.to_dict())


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the relevant part of a configuration as JSON values."""
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
    """Check that two configurations lead to the same output.

    Raises:
        WeightsMismatchError: They do not; names the first key that differs, with its path.
    """
    for key in sorted(shared.keys() | mine.keys()):
        left, right = shared.get(key), mine.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            require_same_config(left, right, f"{path}.{key}")
        elif left != right:
            raise WeightsMismatchError(f"{path}.{key}", f"{left!r} in the segment, {right!r} in the model")


def require_reached(model: "nn.Module") -> None:
    """Check that no module hides from the state dict, in a plain list or dict, where it would not be bound.

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
                raise WeightsMismatchError(where, "holds modules outside of named_modules()")


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value


def directory_fingerprint(directory: Path) -> str:
    """Return the fingerprint of the tokenizer in a model's directory; empty if there is none."""
    return in_directory(directory) if (directory / FILE).is_file() else ""


def fingerprint(tokenizer: Any) -> str:
    """Return the fingerprint of a `tokenizers.Tokenizer`, or of a transformers tokenizer built on one.

    Raises:
        WeightsMismatchError: It is built on something else and cannot be compared.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "get_vocab") or not hasattr(backend, "to_str"):
        raise WeightsMismatchError("tokenizer", f"a {type(tokenizer).__name__} has no {FILE} to compare")
    return fingerprint_of(json.loads(backend.to_str()))


def require_same_tokenizer(shared: str, mine: str) -> None:
    """Check that both sides have the same tokenizer, or neither has one.

    A side without a tokenizer does not match one with a tokenizer: the meaning of its token ids is unknown.

    Raises:
        WeightsMismatchError: They differ; names both fingerprints, or `none`.
    """
    if shared != mine:
        theirs, own = (each[:12] or "none" for each in (shared, mine))
        raise WeightsMismatchError("tokenizer", f"{theirs} in the segment, {own} here")
