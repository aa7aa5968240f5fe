"""vLLM's model takes the tensors of a manifest, or the error names the one that differs."""

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
from rolloutmq.trainer.weights.posix_shm import WeightShare


class Rope(nn.Module):
    """RoPE as vLLM has it: a table, and how its frequencies are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.base = 10_000.0
        self.register_buffer("cos_sin_cache", torch.zeros(1), persistent=False)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return 1.0 / base ** (torch.arange(0, 32, 2, dtype=torch.float) / 32)


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
    if model.config.tie_word_embeddings:
        place(found, "lm_head.weight", found.get_parameter("model.embed_tokens.weight"))
    rope: Any = found.get_submodule("model.layers.0.self_attn")
    rope.rotary_emb = Rope()
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
    weight_matching.require_match(theirs, model.config.to_dict(), manifest)
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
    rope.base = 500_000.0


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
        (on_meta, "model.norm.weight", "device is cpu in the segment, meta"),
        (scaled, "model.norm._k_scale", "has no scale for the KV cache"),
        (turned, "model.layers.0.self_attn.rotary_emb.inv_freq", "was computed as"),
        (packed, "model.layers.0.mlp.gate_up_proj.weight", "shape is"),
    ],
)
def test_what_differs_is_named(
    both: Any, change: Callable[[nn.Module], None], name: str, problem: str
) -> None:
    model, theirs, share = both
    change(theirs)
    with pytest.raises(WeightsMismatchError, match=problem) as caught:
        weight_matching.require_match(theirs, model.config.to_dict(), share.manifest())
    assert caught.value.tensor == name


def test_the_configuration_must_be_the_same(both: Any) -> None:
    model, theirs, share = both
    config = model.config.to_dict() | {"rms_norm_eps": 1e-3}
    with pytest.raises(WeightsMismatchError, match="rms_norm_eps"):
        weight_matching.require_match(theirs, config, share.manifest())


def test_what_vllm_alone_is_configured_to_do_is_named(both: Any) -> None:
    model, theirs, share = both
    config = model.config.to_dict() | {"final_logit_softcapping": 30.0}
    with pytest.raises(WeightsMismatchError, match=r"None in the segment, 30\.0") as caught:
        weight_matching.require_match(theirs, config, share.manifest())
    assert caught.value.tensor == "config.final_logit_softcapping"


def test_a_tie_must_be_a_tie(both: Any) -> None:
    model, theirs, share = both
    head = theirs.get_parameter("lm_head.weight")
    place(theirs, "lm_head.weight", nn.Parameter(torch.empty_like(head)))
    if model.config.tie_word_embeddings:
        with pytest.raises(WeightsMismatchError, match=r"lm_head\.weight"):
            weight_matching.require_match(theirs, model.config.to_dict(), share.manifest())
