"""vLLM's model takes the tensors of a manifest, or the error names the one that differs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.services.inference.vllm.support.lent import FAMILIES, VOCABULARY, model_of
from torch import nn

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.services.inference.vllm import weight_matching
from rolloutmq.trainer.weights.layout import FUSED
from rolloutmq.trainer.weights.model.binding import manifest_of
from rolloutmq.trainer.weights.posix_shm import WeightShare

CPU = torch.device("cpu")


class Rope(nn.Module):
    """RoPE as vLLM has it: a table of cosines and sines for each position."""

    def __init__(self, config: Any, rope: dict[str, Any]) -> None:
        super().__init__()
        self.base: float = rope["rope_theta"]
        self.dim = config.head_dim if hasattr(config, "head_dim") else 32
        self.positions = config.max_position_embeddings
        self.rope = rope
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return 1.0 / base ** (torch.arange(0, self.dim, 2, dtype=torch.float) / self.dim)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return self.table(torch.arange(self.positions, dtype=torch.float), self._compute_inv_freq(self.base))

    def table(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        angles = torch.einsum("i,j -> ij", positions, frequencies)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Linear(Rope):
    """vLLM divides positions, and has rows beyond those of the model."""

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        positions = torch.arange(self.positions * self.rope["factor"], dtype=torch.float)
        return self.table(positions / self.rope["factor"], self._compute_inv_freq(self.base))


class Dynamic(Rope):
    """vLLM scales to the length of the model, which is the length up to which transformers does not."""

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        factor = self.rope["factor"]
        base = self.base * (factor * 1.0 - (factor - 1.0)) ** (self.dim / (self.dim - 2))
        return self.table(torch.arange(self.positions, dtype=torch.float), self._compute_inv_freq(base))


class Yarn(Rope):
    """Here the argument of `_compute_inv_freq` is not the base but the factor."""

    def _compute_inv_freq(self, scaling_factor: float) -> torch.Tensor:
        steps = self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float) / self.dim)
        old = self.rope["original_max_position_embeddings"]
        low, high = (
            self.dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(self.base)) for turns in (32, 1)
        )
        bounds = max(math.floor(low), 0), min(math.ceil(high), self.dim - 1)
        ramp = (torch.arange(self.dim // 2, dtype=torch.float) - bounds[0]) / (bounds[1] - bounds[0])
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (scaling_factor * steps) * (1 - kept) + 1.0 / steps * kept

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        factor = self.rope["factor"]
        positions = torch.arange(self.rope["original_max_position_embeddings"] * factor, dtype=torch.float)
        return self.table(positions, self._compute_inv_freq(factor)) * (0.1 * math.log(factor) + 1.0)


KINDS: dict[str, type[Rope]] = {"default": Rope, "linear": Linear, "dynamic": Dynamic, "yarn": Yarn}


def rotate(found: nn.Module, config: Any) -> None:
    """Give each layer of vLLM's model its RoPE; equal ones are one module there."""
    known: dict[str, Rope] = {}
    for number in range(config.num_hidden_layers):
        rope = config.rope_parameters
        if "rope_type" not in rope:
            rope = rope[config.layer_types[number]]
        made = known.setdefault(str(rope), KINDS[rope["rope_type"]](config, rope))
        attention: Any = found.get_submodule(f"model.layers.{number}.self_attn")
        attention.rotary_emb = made


def as_vllm_has_it(model: Any) -> nn.Module:
    """Build modules with the names and shapes that vLLM gives the same model."""
    found = nn.Module()
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.named_parameters():
        for fused, members in FUSED.items():
            for member in members:
                if f".{member}." in name:
                    parts.setdefault(name.replace(member, fused), []).append(tensor)
                    break
            else:
                continue
            break
        else:
            rows = 128 if tensor.shape[0] == VOCABULARY else tensor.shape[0]
            tensors[name] = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype)
    tensors |= {name: torch.empty_like(torch.cat(rows)) for name, rows in parts.items()}
    for name, tensor in tensors.items():
        place(found, name, nn.Parameter(tensor, requires_grad=False))
    if model.config.tie_word_embeddings and model.config.model_type != "gemma2":  # that has no head there
        place(found, "lm_head.weight", found.get_parameter("model.embed_tokens.weight"))
    rotate(found, model.config)
    return found


def place(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, leaf = name.split(".")
    module = root
    for word in path:
        if word not in module._modules:
            module.add_module(word, nn.Module())
        module = module.get_submodule(word)
    module.register_parameter(leaf, parameter)


@pytest.fixture(params=list(FAMILIES))
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    model = model_of(request.param)
    theirs = as_vllm_has_it(model)
    share = WeightShare.create_or_adopt(model, tmp_path / "weights.json", fused=True)
    reader = WeightShare.open(tmp_path / "weights.json")
    made = [model, theirs, reader]
    del model, theirs
    yield made
    reader.close()
    share.close(unlink=True)
    made.clear()  # memory stays mapped for as long as a tensor lives


def test_parameters_become_views(both: Any) -> None:
    model, theirs, share = both
    manifest = share.manifest()
    weight_matching.require_match(theirs, model.config.to_dict(), manifest, mapped=CPU)
    weight_matching.bind(theirs, manifest, share.physical_views())
    attention = model.model.layers[1].self_attn
    fused = theirs.get_parameter("model.layers.1.self_attn.qkv_proj.weight")
    with torch.no_grad():
        attention.k_proj.weight.fill_(3.0)
        model.lm_head.weight[5] = 7.0
    rows = attention.q_proj.weight.shape[0]
    assert bool((fused[rows : rows + attention.k_proj.weight.shape[0]] == 3.0).all())
    assert torch.equal(fused[:rows], attention.q_proj.weight)
    head = theirs.get_parameter("lm_head.weight")
    assert bool((head[5] == 7.0).all())
    assert bool((head[VOCABULARY:] == 0.0).all())
    tied = head.data_ptr() == theirs.get_parameter("model.embed_tokens.weight").data_ptr()
    assert tied == model.config.tie_word_embeddings


def more(model: nn.Module) -> None:
    place(model, "model.extra", nn.Parameter(torch.zeros(1)))


def fewer(model: nn.Module) -> None:
    del model.get_submodule("model.norm")._parameters["weight"]


def narrower(model: nn.Module) -> None:
    place(model, "model.norm.weight", nn.Parameter(torch.zeros(127)))


def halved(model: nn.Module) -> None:
    place(model, "model.norm.weight", nn.Parameter(torch.zeros(128, dtype=torch.bfloat16)))


def on_meta(model: nn.Module) -> None:
    place(model, "model.norm.weight", nn.Parameter(torch.zeros(128, device="meta")))


def scaled(model: nn.Module) -> None:
    model.get_submodule("model.norm").register_buffer("_k_scale", torch.tensor(0.5))


def turned(model: nn.Module) -> None:
    rope: Any = model.get_submodule("model.layers.0.self_attn.rotary_emb")
    rope.cos_sin_cache = rope.cos_sin_cache.bfloat16().float()


def cut(model: nn.Module) -> None:
    rope: Any = model.get_submodule("model.layers.1.self_attn.rotary_emb")
    rope.cos_sin_cache = rope.cos_sin_cache[:511]


def unknown(model: nn.Module) -> None:
    attention: Any = model.get_submodule("model.layers.1.self_attn")
    attention.rotary_emb = nn.Identity()


def packed(model: nn.Module) -> None:
    """What vLLM for CPUs does with every matrix unless it is kept from it."""
    place(model, "model.layers.0.mlp.gate_up_proj.weight", nn.Parameter(torch.empty(0)))


@pytest.mark.parametrize(
    ("change", "name", "problem"),
    [
        (more, "model.extra", "not in the segment"),
        (fewer, "model.norm.weight", "in the segment, not"),
        (narrower, "model.norm.weight", "shape is"),
        (halved, "model.norm.weight", "dtype is float32 in the segment, bfloat16"),
        (
            on_meta,
            "model.norm.weight",
            r"must lie on cpu in one piece to be mapped \(got meta\); .*vllm_http",
        ),
        (scaled, "model.norm._k_scale", "has no scale for the KV cache"),
        (
            turned,
            "model.layers.0.self_attn.rotary_emb",
            "cos and sin are float32 of width 32, crc32 .* Rope$",
        ),
        (cut, "model.layers.0.self_attn.rotary_emb", "has 511 positions, the model has 512"),
        (unknown, "model.layers.1.self_attn.rotary_emb", "Identity has no table to compare"),
        (packed, "model.layers.0.mlp.gate_up_proj.weight", "shape is"),
    ],
)
def test_what_differs_is_named(
    both: Any, change: Callable[[nn.Module], None], name: str, problem: str
) -> None:
    model, theirs, share = both
    change(theirs)
    with pytest.raises(WeightsMismatchError, match=problem) as caught:
        weight_matching.require_match(theirs, model.config.to_dict(), share.manifest(), mapped=CPU)
    assert caught.value.tensor == name


def test_the_configuration_must_be_the_same(both: Any) -> None:
    model, theirs, share = both
    config = model.config.to_dict() | {"rms_norm_eps": 1e-3}
    with pytest.raises(WeightsMismatchError, match="rms_norm_eps"):
        weight_matching.require_match(theirs, config, share.manifest(), mapped=CPU)


def test_what_vllm_alone_is_configured_to_do_is_named(both: Any) -> None:
    model, theirs, share = both
    config = model.config.to_dict() | {"final_logit_softcapping": 30.0}
    with pytest.raises(WeightsMismatchError, match=r"None in the segment, 30\.0") as caught:
        weight_matching.require_match(theirs, config, share.manifest(), mapped=CPU)
    assert caught.value.tensor == "config.final_logit_softcapping"


def test_a_tie_must_be_a_tie(both: Any) -> None:
    model, theirs, share = both
    head = theirs.get_parameter("lm_head.weight")
    place(theirs, "lm_head.weight", nn.Parameter(torch.empty_like(head)))
    if model.config.tie_word_embeddings:
        with pytest.raises(WeightsMismatchError, match=r"lm_head\.weight"):
            weight_matching.require_match(theirs, model.config.to_dict(), share.manifest(), mapped=CPU)


def compared(model: Any, theirs: nn.Module, mapped: torch.device | None = CPU, shards: int = 1) -> None:
    manifest = manifest_of(model, fused=True)
    weight_matching.require_match(theirs, model.config.to_dict(), manifest, mapped=mapped, shards=shards)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "linear", "gemma", "gemma2", "gemma3_text", "mistral"])
def test_each_family_and_type_of_rope_is_compared_by_its_tables(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(kind, dtype)
        theirs = as_vllm_has_it(model)
        for module in theirs.modules():
            if isinstance(module, Rope):
                module.cos_sin_cache = module.cos_sin_cache.to(dtype)
        compared(model, theirs)


def test_a_layer_that_turns_as_another_kind_of_layer_is_named() -> None:
    model = model_of("gemma3_text")
    theirs = as_vllm_has_it(model)
    first: Any = theirs.get_submodule("model.layers.0.self_attn")
    second: Any = theirs.get_submodule("model.layers.1.self_attn")
    first.rotary_emb, second.rotary_emb = second.rotary_emb, first.rotary_emb
    with pytest.raises(WeightsMismatchError, match="cos and sin are") as caught:
        compared(model, theirs)
    assert caught.value.tensor == "model.layers.0.self_attn.rotary_emb"


def test_a_factor_that_rounds_otherwise_is_refused_with_the_reason() -> None:
    model = model_of("linear by 3")
    with pytest.raises(WeightsMismatchError, match=r"vLLM divides positions by the factor.*a power of two"):
        compared(model, as_vllm_has_it(model))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_moe", r"config\.num_local_experts: `qwen3_moe` is not supported with vLLM: .* experts"),
        ("longrope", r"config\.rope_parameters: RoPE `longrope` is not supported with vLLM: .* every length"),
    ],
)
def test_what_vllm_is_known_to_compute_otherwise_is_refused_by_name(kind: str, reason: str) -> None:
    model = model_of(kind)
    with pytest.raises(WeightsMismatchError, match=reason):
        compared(model, nn.Module())


def test_a_copy_may_go_to_any_device() -> None:
    model = model_of("qwen2")
    theirs = as_vllm_has_it(model).to("meta")
    place(theirs, "lm_head.weight", theirs.get_parameter("model.embed_tokens.weight"))  # a move unties
    rope: Any = theirs.get_submodule("model.layers.0.self_attn.rotary_emb")
    assert rope.cos_sin_cache.is_meta
    compared(model, theirs, mapped=None)
    with pytest.raises(WeightsMismatchError, match="must lie on cpu in one piece"):
        compared(model, theirs)


def test_several_workers_share_a_copy() -> None:
    model = model_of("qwen2")
    theirs = as_vllm_has_it(model)
    for name, parameter in list(theirs.named_parameters()):
        cut_at = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        if "norm" not in name:
            place(theirs, name, nn.Parameter(parameter.chunk(2, dim=cut_at)[0]))
    place(theirs, "lm_head.weight", theirs.get_parameter("model.embed_tokens.weight"))
    compared(model, theirs, mapped=None, shards=2)
    for shards, problem in ((1, r"shape is \(128, 128\) in the segment, \(64, 128\)"), (2, "shape is")):
        if shards == 2:
            narrower(theirs)
            place(theirs, "model.norm.weight", nn.Parameter(torch.zeros(63)))
        with pytest.raises(WeightsMismatchError, match=problem):
            compared(model, theirs, mapped=None, shards=shards)
