"""A model that differs in one thing is refused, and the error names the thing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.trainer.weights.conftest import Shares
from tests.trainer.weights.models import ROPE, built, config, logits, on_meta
from torch import nn

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.trainer.weights.manifest import WeightManifest, arriving, describe, named_tensors
from rolloutmq.trainer.weights.model.binding import adopt, bind, manifest_of, prove, require_real

FAMILIES = ("llama", "qwen2", "qwen3")
MODELS = {family: built(config(family)) for family in FAMILIES}
MANIFESTS = {family: manifest_of(model) for family, model in MODELS.items()}
Mutation = Callable[[Any, str], str]
"""Changes one thing about the tensor of that name, and returns the name that must be told."""


def home(model: Any, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def replace(model: Any, name: str, tensor: torch.Tensor) -> str:
    module, leaf = home(model, name)
    setattr(module, leaf, nn.Parameter(tensor))
    return name


def value(model: Any, name: str) -> torch.Tensor:
    found: torch.Tensor = model.get_parameter(name).detach().clone()
    return found


def removed(model: Any, name: str) -> str:
    module, leaf = home(model, name)
    delattr(module, leaf)
    return name


def added(model: Any, name: str) -> str:
    module, leaf = home(model, name)
    module.register_parameter(f"{leaf}_extra", nn.Parameter(torch.zeros(2)))
    return f"{name}_extra"


def added_buffer(model: Any, name: str) -> str:
    module, leaf = home(model, name)
    module.register_buffer(f"{leaf}_scale", torch.ones(1))
    return f"{name}_scale"


def half(model: Any, name: str) -> str:
    return replace(model, name, value(model, name).to(torch.float16))


def longer(model: Any, name: str) -> str:
    tensor = value(model, name)
    return replace(model, name, torch.cat([tensor, tensor[:1]]))


def flat(model: Any, name: str) -> str:
    return replace(model, name, value(model, name)[None])


def strided(model: Any, name: str) -> str:
    tensor = value(model, name)
    return replace(model, name, torch.stack([tensor, tensor], -1)[..., 0])


def tied(model: Any, name: str) -> str:
    """Tie it to a tensor of another module of the same shape, or else a new name to it."""
    tensor = model.get_parameter(name)
    others = [other for other, one in model.named_parameters() if other != name and one.shape == tensor.shape]
    if not others:
        module, leaf = home(model, name)
        module.register_parameter(f"{leaf}_again", tensor)
        return name
    module, leaf = home(model, name)
    setattr(module, leaf, model.get_parameter(others[0]))
    return name


MUTATIONS: tuple[Mutation, ...] = (removed, added, added_buffer, half, longer, flat, strided, tied)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_single_change_of_a_tensor_is_refused_by_its_name(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    name = data.draw(st.sampled_from([spec.name for spec in MANIFESTS[family].tensors]))
    mutate = data.draw(st.sampled_from(MUTATIONS))
    model = copy.deepcopy(MODELS[family])
    prove(model, MANIFESTS[family])
    told = mutate(model, name)
    with pytest.raises(WeightsMismatchError) as caught:
        prove(model, MANIFESTS[family])
    assert told in str(caught.value)


CHANGED: dict[str, dict[str, Any]] = {
    "rms_norm_eps": {"rms_norm_eps": 1e-3},
    "hidden_act": {"hidden_act": "gelu"},
    "max_position_embeddings": {"max_position_embeddings": 128},
    "attention_dropout": {"attention_dropout": 0.1},
    **{f"rope_parameters.{key}": {"rope_parameters": rope} for key, rope in ROPE.items() if key != "default"},
}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FAMILIES), st.sampled_from(sorted(CHANGED)))
def test_any_single_change_of_the_configuration_is_refused(family: str, key: str) -> None:
    with pytest.raises(WeightsMismatchError, match=f"config.{key.split('.')[0]}"):
        prove(on_meta(config(family, **CHANGED[key])), MANIFESTS[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_configuration_is_the_same_model(family: str) -> None:
    prove(on_meta(config(family)), MANIFESTS[family])
    other = config(family)
    other.use_cache, other.pad_token_id, other.initializer_range = False, 3, 1.0
    other.head_dtype = "float32"  # how a vLLM of the run is told to compute its logits
    prove(on_meta(other), MANIFESTS[family])


def test_a_key_that_nobody_knows_is_compared() -> None:
    other = config("llama")
    other.logit_softcapping = 30.0
    with pytest.raises(WeightsMismatchError, match=r"config.logit_softcapping: None in the segment, 30.0"):
        prove(on_meta(other), MANIFESTS["llama"])


def test_a_scaling_that_no_configuration_tells_is_refused() -> None:
    model = copy.deepcopy(MODELS["qwen3"])
    model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(WeightsMismatchError, match=r"model.layers.1.self_attn.scaling: was computed as 0.5"):
        prove(model, MANIFESTS["qwen3"])
    model = copy.deepcopy(MODELS["qwen3"])
    model.model.rotary_emb.attention_scaling = 1.1
    with pytest.raises(WeightsMismatchError, match=r"model.rotary_emb.attention_scaling"):
        prove(model, MANIFESTS["qwen3"])


@pytest.mark.parametrize("dtypes", [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_bytes_of_one_type_are_not_read_as_another(dtypes: tuple[str, str]) -> None:
    theirs, mine = (getattr(torch, name) for name in dtypes)
    manifest = manifest_of(built(config("llama"), dtype=theirs))
    with pytest.raises(
        WeightsMismatchError, match=rf"embed_tokens.weight: dtype is {dtypes[0]} in the segment"
    ):
        prove(on_meta(config("llama"), dtype=mine), manifest)


@pytest.mark.parametrize("owner_ties", [True, False])
def test_a_pair_that_is_tied_on_one_side_only_is_refused(owner_ties: bool) -> None:
    manifest = manifest_of(built(config("qwen2", tie_word_embeddings=owner_ties)))
    model = on_meta(config("qwen2", tie_word_embeddings=not owner_ties))
    with pytest.raises(WeightsMismatchError, match=r"lm_head.weight: is tied to model.embed_tokens.weight"):
        prove(model, manifest)


@pytest.mark.parametrize("rope", sorted(ROPE))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tables_are_computed_from_what_the_configuration_says_of_rope(
    shares: Shares, family: str, rope: str
) -> None:
    model = built(config(family, rope_parameters=ROPE[rope]))
    shares.create(model)
    reading = on_meta(model.config)
    shares.attach(reading)
    table = reading.model.rotary_emb
    assert torch.equal(table.inv_freq, model.model.rotary_emb.inv_freq)
    assert table.attention_scaling == model.model.rotary_emb.attention_scaling
    assert (table.attention_scaling != 1.0) is (rope == "yarn")
    assert torch.equal(logits(reading), logits(model))
    assert not any("inv_freq" in name for name in reading.state_dict())


@pytest.mark.parametrize("rope", sorted(ROPE))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rope_table_that_was_computed_otherwise_is_refused_by_its_name(family: str, rope: str) -> None:
    """The configuration is the same on both sides, and so is every shared tensor."""
    described = config(family, rope_parameters=ROPE[rope])
    manifest, reading = manifest_of(built(described)), built(described)
    prove(reading, manifest)
    table = reading.model.rotary_emb
    for name in ("inv_freq", "original_inv_freq"):
        setattr(table, name, getattr(table, name).bfloat16().float())
    with pytest.raises(WeightsMismatchError, match=r"model.rotary_emb.(original_)?inv_freq: was computed as"):
        prove(reading, manifest)


def per_layer(theta: float) -> dict[str, Any]:
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": theta, "factor": 8.0},
    }


def test_rope_that_differs_by_kind_of_layer(shares: Shares) -> None:
    """And a constant of the embedding that only a build of the whole model tells."""
    kinds = ["sliding_attention", "full_attention"]
    described = config("gemma3", layer_types=kinds, rope_parameters=per_layer(1e6), query_pre_attn_scalar=4)
    for dtype in (torch.float32, torch.bfloat16):
        model = built(described, dtype=dtype)
        owner = shares.create(model)
        reading = on_meta(model.config, dtype=dtype)
        shares.attach(reading)
        assert torch.equal(logits(reading), logits(model))
        model.config.rope_parameters["full_attention"]["rope_theta"] = 1e5
        with pytest.raises(WeightsMismatchError, match=r"config.rope_parameters.full_attention.rope_theta"):
            shares.attach(on_meta(model.config, dtype=dtype))
        owner.close(unlink=True)


def test_nothing_is_left_on_meta_in_lists_of_modules() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"list": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])})
    with pytest.raises(WeightsMismatchError, match=r"list.0.0.weight: is still on meta"):
        require_real(model)


def test_modules_in_a_plain_list_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.hidden = [nn.Linear(2, 2)]  # type: ignore[assignment]
    with pytest.raises(WeightsMismatchError, match=r"hidden: holds modules outside of named_modules\(\)"):
        describe(model)


class Table(nn.Module):
    """A tensor as a plain attribute, as older RoPE modules have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.angles = torch.arange(4.0)


def test_a_plain_tensor_on_meta_is_refused_and_a_real_one_compared() -> None:
    manifest = manifest_of(Table())
    with torch.device("meta"):
        model = Table()
    with pytest.raises(WeightsMismatchError, match="angles: is on meta and cannot be computed"):
        prove(model, manifest)
    other = Table()
    prove(other, manifest)
    other.angles[1] = 7.0
    with pytest.raises(WeightsMismatchError, match="angles: was computed as"):
        prove(other, manifest)


def views(model: nn.Module, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    tensors = dict(named_tensors(model))
    return {spec.name: tensors[spec.name].detach() for spec in manifest.tensors}


def test_what_was_proven_is_bound_to_the_same_tensors() -> None:
    model, manifest = MODELS["qwen2"], MANIFESTS["qwen2"]
    reading = on_meta(config("qwen2"))
    adopt(reading, manifest, views(model, manifest), prove(reading, manifest))
    assert reading.lm_head.weight is reading.model.embed_tokens.weight
    assert torch.equal(logits(reading), logits(model))


def test_a_manifest_that_lies_about_a_size_is_refused() -> None:
    manifest = MANIFESTS["llama"]
    spec = manifest.tensors[3]
    for change in ({"nbytes": spec.nbytes * 2}, {"offset": spec.offset + 4}):
        tensors = list(manifest.tensors)
        tensors[3] = type(spec)(**({f: getattr(spec, f) for f in spec.__struct_fields__} | change))
        lying = WeightManifest(tensors=tuple(tensors), config=manifest.config, derived=manifest.derived)
        with pytest.raises(WeightsMismatchError, match=f"{spec.name}: {next(iter(change))} is"):
            prove(on_meta(config("llama")), lying)


def test_binding_keeps_the_values_of_the_owner() -> None:
    model = built(config("qwen2"), seed=3)
    before, manifest = logits(model), manifest_of(model)
    room = {name: torch.zeros_like(tensor) for name, tensor in views(model, manifest).items()}
    bind_with_values(model, manifest, room)
    assert torch.equal(logits(model), before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def bind_with_values(model: nn.Module, manifest: WeightManifest, room: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        bind(model, manifest, room, keep=True)


def test_each_tensor_of_a_source_is_taken_once_under_any_of_its_names() -> None:
    model, manifest = MODELS["qwen2"], MANIFESTS["qwen2"]
    state = list(model.state_dict().items())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= dict(state).keys()  # tied
    for tensors in (state, state[::-1], [pair for pair in state if pair[0] != "model.embed_tokens.weight"]):
        taken = {spec.name: tensor for spec, tensor in arriving(manifest, tensors)}
        assert sorted(taken) == sorted(spec.name for spec in manifest.tensors)
        assert all(torch.equal(tensor, value(model, name)) for name, tensor in taken.items())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.pop(), r"was not given; a version has every tensor"),
        (lambda state: state.append(state[0]), r"came twice"),
        (lambda state: state.append(("extra", torch.ones(1))), r"extra.*is not in the shared model"),
        (lambda state: state.append((state.pop()[0], torch.ones(2))), r"is \('float32', \(2,\)\) here"),
        (
            lambda state: state.append((state[-1][0], state.pop()[1].bfloat16())),
            r"is \('bfloat16', .* here, \('float32'",
        ),
    ],
)
def test_a_source_with_other_tensors_is_refused(change: Callable[[Any], object], problem: str) -> None:
    state = list(MODELS["llama"].state_dict().items())
    change(state)
    with pytest.raises(WeightsMismatchError, match=problem):
        list(arriving(MANIFESTS["llama"], state))
