"""The layout for a server with fused projections: the same bytes under the names of both sides."""

import itertools
import mmap

import pytest
import torch
from tests.trainer.weights.conftest import Shares
from tests.trainer.weights.models import built, config, logits, on_meta
from torch import Tensor

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.trainer.weights.layout import ALIGNMENT, PhysicalTensor, TensorSpec, fused, in_a_row
from rolloutmq.trainer.weights.manifest import WeightManifest, describe

FAMILIES = ("llama", "qwen2", "qwen3")


def spans(manifest: WeightManifest) -> list[tuple[int, int]]:
    return [(one.offset, one.offset + one.nbytes) for one in manifest.fused]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_lie_back_to_back_and_nothing_overlaps(family: str) -> None:
    model = on_meta(config(family))
    manifest = describe(model, fused=True)
    logical = {spec.name: spec for spec in manifest.tensors}
    assert logical.keys() == {spec.name for spec in describe(model).tensors}
    assert [part for one in manifest.fused for part in one.parts] == list(logical)
    for one in manifest.fused:
        assert one.offset % ALIGNMENT == 0
        at = one.offset
        for name in one.parts:
            assert logical[name].offset == at
            at += logical[name].nbytes
        assert at <= one.offset + one.nbytes
        assert one.nbytes == 4 * torch.Size(one.shape).numel()
    found = spans(manifest)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(found))
    assert manifest.end == found[-1][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_servers_names_and_shapes(family: str) -> None:
    manifest = describe(on_meta(config(family)), fused=True)
    shapes = {one.name: one.shape for one in manifest.fused}
    assert shapes["model.embed_tokens.weight"] == (64, 16)
    assert shapes["model.layers.1.self_attn.qkv_proj.weight"] == (32, 16)
    assert shapes["model.layers.1.mlp.gate_up_proj.weight"] == (48, 16)
    assert ("model.layers.0.self_attn.qkv_proj.bias" in shapes) is (family == "qwen2")
    assert ("model.layers.0.self_attn.q_norm.weight" in shapes) is (family == "qwen3")
    assert not any("q_proj" in name or "up_proj" in name.replace("gate_up_proj", "") for name in shapes)
    assert shapes.get("lm_head.weight") == (None if family == "qwen2" else (64, 16))
    embedding = next(one for one in manifest.fused if one.name == "model.embed_tokens.weight")
    assert embedding.ties == (("lm_head.weight",) if family == "qwen2" else ())


def physical(memory: mmap.mmap, manifest: WeightManifest, one: PhysicalTensor) -> Tensor:
    count = torch.Size(one.shape).numel()
    dtype = getattr(torch, one.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=manifest.base + one.offset).view(
        one.shape
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_sides_see_the_same_values(shares: Shares, family: str, dtype: torch.dtype) -> None:
    model = built(config(family), dtype=dtype)
    before = logits(model)
    owner = shares.create(model, fused=True)
    reading = on_meta(model.config, dtype=dtype)
    shares.attach(reading)
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(reading), before)
    manifest = owner.manifest()
    with owner.path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    state = model.state_dict()
    for one in manifest.fused:
        rows = torch.cat([state[part] for part in one.parts])
        found = physical(memory, manifest, one)
        assert torch.equal(found[: len(rows)], rows), one.name
        assert not found[len(rows) :].any()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.fill_(3.0)
    qkv = next(one for one in manifest.fused if one.name == "model.layers.0.self_attn.qkv_proj.weight")
    assert torch.equal(physical(memory, manifest, qkv)[16:24], torch.full((8, 16), 3.0, dtype=dtype))
    assert torch.equal(logits(reading), logits(model))


def spec(name: str, shape: tuple[int, ...], dtype: str = "float32", ties: tuple[str, ...] = ()) -> TensorSpec:
    size = torch.Size(shape).numel() * 4
    return TensorSpec(name=name, dtype=dtype, shape=shape, stride=(), offset=0, nbytes=size, ties=ties)


def test_parts_that_come_apart_are_brought_together_in_their_order() -> None:
    names = ["k_proj.weight", "q_proj.weight", "k_proj.bias", "v_proj.weight", "q_proj.bias", "v_proj.bias"]
    specs = [spec(f"self_attn.{name}", (3, 5) if "weight" in name else (3,)) for name in names]
    placed, found = fused(specs)
    assert [one.name for one in placed[:3]] == [f"self_attn.{part}_proj.weight" for part in "qkv"]
    assert [(one.name, one.shape) for one in found] == [
        ("self_attn.qkv_proj.weight", (9, 5)),
        ("self_attn.qkv_proj.bias", (9,)),
    ]


def test_what_cannot_be_fused_is_refused_by_name() -> None:
    gate, up = spec("mlp.gate_proj.weight", (4, 2)), spec("mlp.up_proj.weight", (4, 2))
    for parts, problem in [
        ([gate], "mlp.up_proj.weight: is missing: mlp.gate_proj.weight cannot be fused without it"),
        ([gate, spec("mlp.up_proj.weight", (4, 3))], "mlp.up_proj.weight: float32"),
        ([gate, spec("mlp.up_proj.weight", (4, 2), "bfloat16")], "mlp.up_proj.weight: bfloat16"),
        ([gate, spec("mlp.up_proj.weight", (4, 2), ties=("other",))], "mlp.up_proj.weight: is tied"),
    ]:
        with pytest.raises(WeightsMismatchError, match=problem):
            fused(parts)
    fused([gate, up])


def test_other_projections_of_these_names_are_left_alone() -> None:
    placed, found = fused([spec("expert.gate_proj.weight", (4, 2)), spec("mixer.q_proj.weight", (4, 2))])
    assert [one.parts for one in found] == [(one.name,) for one in placed]


def test_without_fusing_nothing_is_padded() -> None:
    placed = in_a_row([spec("embed_tokens.weight", (33, 16)), spec("norm.weight", (16,))])
    assert placed[1].offset == -(-placed[0].nbytes // ALIGNMENT) * ALIGNMENT


def test_a_reader_follows_the_layout_of_the_segment(shares: Shares) -> None:
    manifest = shares.create(built(config("llama")), fused=True).manifest()
    assert shares.attach(on_meta(config("llama"))).manifest() == manifest
    assert manifest.fused
    assert describe(on_meta(config("llama"))).tensors != manifest.tensors
