import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolloutmq.bus.encoding.codec import decode_group, encode_group, header_of
from rolloutmq.bus.encoding.opaque_columns import VALUES_LIMIT
from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.schemas.config.losses import DapoConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.group import Group
from rolloutmq.services.gateway import atropos_wire, group_mapping
from rolloutmq.services.gateway.atropos_wire import FIELDS, RefusedBodyError, ScoredData, decode
from rolloutmq.services.gateway.group_mapping import LOOKED_AT_BYTES, from_group, json_bytes, to_group
from rolloutmq.services.gateway.web import json_pieces
from rolloutmq.trainer.step.advantages import BatchAdvantages, study
from rolloutmq.trainer.step.collate import Bounds, collate
from rolloutmq.trainer.step.teacher_columns import columns_needed

numbers = st.floats(allow_nan=False, allow_infinity=False)
opaque = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
objects = st.dictionaries(st.text(max_size=4), opaque, max_size=3)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))

    def per_token(of: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(of, min_size=size, max_size=size)) for size in sizes]

    def rows(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=len(sizes), max_size=len(sizes)))

    def maybe(value: Any) -> Any:
        return draw(st.sampled_from([value, None, []]))

    data = {
        "tokens": per_token(st.integers(0, 2**31 - 1)),
        "masks": per_token(st.integers(-100, 2**31 - 1)),
        "scores": rows(numbers),
        "advantages": maybe(per_token(numbers)),
        "ref_logprobs": maybe(per_token(logprobs)),
        "inference_logprobs": maybe(per_token(logprobs)),
        "messages": maybe([[{"role": "user", "content": draw(opaque), **draw(objects)}] for _ in sizes]),
        "generation_params": draw(st.none() | objects),
        "overrides": maybe(rows(objects)),
        "group_overrides": draw(st.none() | objects),
        "images": draw(opaque),
        "env_id": draw(st.none() | st.integers(0, 9)),
    }
    pairs = [[[(t, -float(t)) for t in range(2)] for _ in range(size)] for size in sizes]
    if draw(st.booleans()):
        data["distill_token_ids"] = [[[t for t, _ in cell] for cell in row] for row in pairs]
        data["distill_logprobs"] = [[[p for _, p in cell] for cell in row] for row in pairs]
    return data


def through_the_bus(group: Group) -> Group:
    encoded = encode_group(group, 1 << 24)
    header = header_of(group, encoded, seq=1, position=encoded.nbytes)
    return decode_group(header, encoded.table, [bytes(frame) for frame in encoded.frames], "e")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a loaded machine
@given(groups())
def test_every_field_comes_back_as_it_went(data: dict[str, Any]) -> None:
    sent = decode(json.dumps(data).encode(), ScoredData)
    group = through_the_bus(to_group(sent, "g", at=1.0))
    answer = json.loads(msgspec.json.encode(from_group(group)))
    assert tuple(answer) == FIELDS
    expected = dict.fromkeys(FIELDS) | json.loads(json.dumps(data))
    assert repr(answer) == repr(expected), "types too"


@pytest.mark.parametrize("piece_bytes", [7, 64])
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=groups())
def test_a_large_group_in_pieces_is_the_same_group(
    data: dict[str, Any], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(data).encode()
    whole = encode_group(to_group(decode(body, ScoredData), "g", at=1.0), 1 << 24)
    with monkeypatch.context() as patched:
        patched.setattr(atropos_wire, "LARGE_BYTES", 0)
        for module in (atropos_wire, json_pieces):
            patched.setattr(module, "PIECE_BYTES", piece_bytes)
        patched.setattr(json_pieces, "_CHUNK_BYTES", 16)
        patched.setattr(group_mapping, "PIECE_NUMBERS", piece_bytes)
        group = to_group(decode(body, ScoredData), "g", at=1.0)
        answer = json.loads(msgspec.json.encode(from_group(group)))
    pieces = encode_group(group, 1 << 24)
    assert (pieces.table, [*map(bytes, pieces.frames)]) == (whole.table, [*map(bytes, whole.frames)])
    assert repr(answer) == repr(dict.fromkeys(FIELDS) | json.loads(body))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"masks": [[1, 2], [3, 4]]}, "masks"),
        ({"scores": [1.0]}, "tokens"),
        ({"scores": [1.0, 2.0, 3.0]}, "tokens"),
        ({"advantages": [[1.0, 2.0]]}, "advantages"),
        ({"ref_logprobs": [[1.0], [2.0]]}, "ref_logprobs"),
        ({"inference_logprobs": [[1.0, 2.0], []]}, "inference_logprobs"),
        ({"distill_logprobs": [[[1.0]]]}, "distill_logprobs"),
        ({"tokens": [], "masks": [], "scores": []}, "scores"),
        ({"tokens": [[2**63, 2], [3]]}, "tokens"),
        ({"images": [2**80]}, "images"),
        ({"advantages": [["nan", 2.0], [1.0]]}, "advantages"),
        ({"inference_logprobs": [["-inf", 2.0], [1.0]]}, "inference_logprobs"),
    ],
)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_contradicts_itself_is_refused_by_field(
    changes: dict[str, Any], field: str, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_pieces:
        monkeypatch.setattr(atropos_wire, "LARGE_BYTES", 0)
        for module in (atropos_wire, json_pieces):
            monkeypatch.setattr(module, "PIECE_BYTES", 1)
    data = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [1.0, 2.0], **changes}
    with pytest.raises(RefusedBodyError) as refused:
        through_the_bus(to_group(decode(json.dumps(data).encode(), ScoredData), "g", at=1.0))
    assert refused.value.place == ("body", field)
    assert refused.value.status == 422


def test_more_values_than_can_be_decoded_are_refused_here() -> None:
    half: list[None] = [None] * (VALUES_LIMIT // 2)
    data = ScoredData([[1]], [[1]], [1.0], generation_params={"a": half}, images=half)
    with pytest.raises(RefusedBodyError, match="opaque"):
        to_group(data, "g", at=1.0)


@pytest.mark.parametrize(
    ("images", "least", "most"),
    [
        (None, 64, 200),
        ("x" * 100_000, 100_000, 110_000),
        ([{"url": "x" * 1000}] * 50, 50_000, 60_000),
        ([[0] * 1000] * 1000, LOOKED_AT_BYTES, 2 << 20),
    ],
)
def test_it_is_known_about_how_large_a_group_is_as_text(images: Any, least: int, most: int) -> None:
    data = ScoredData([[1], [2]], [[1], [2]], [1.0, 1.0], images=images)
    for group in (made := to_group(data, "g", at=1.0)), through_the_bus(made):
        assert least <= json_bytes(group) <= most


def test_a_score_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(RefusedBodyError):
        to_group(decode(b'{"tokens":[[1]],"masks":[[1]],"scores":[1e999]}', ScoredData), "g", at=1.0)


@pytest.mark.parametrize("mask", [[[False, True], [True]], [[-100, 8], [9]]], ids=["marks", "labels"])
def test_a_group_that_came_over_the_bus_gets_labels(mask: list[list[int]]) -> None:
    native = Group.build("g", tokens=[[7, 8], [9]], mask=mask, scores=[1.0, 2.0])
    answer = from_group(native)
    assert answer["masks"] == [[-100, 8], [9]]
    assert answer["env_id"] is None
    assert answer["advantages"] is None


GROUP: dict[str, Any] = {
    "tokens": [[1, 2], [3, 4, 5]],
    "masks": [[-100, 2], [-100, 4, 5]],
    "scores": [0.0, 1.0],
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"generation_params": {"n": 2}}, None),
        ({"generation_params": {"temperature": 1}}, None),
        ({"generation_params": {"temperature": None}}, None),
        ({"generation_params": {"temperature": 0.0}}, None),
        ({"generation_params": {"temperature": 0.5}}, [0.5, 0.5]),
        ({"generation_params": {"temperature": "0.5"}}, [0.5, 0.5]),
        ({"group_overrides": {"temperature": 2}}, [2.0, 2.0]),
        ({"generation_params": {"temperature": 0.5}, "group_overrides": {"temperature": 2}}, [0.5, 0.5]),
        ({"overrides": [{}, {"temperature": 0.25}]}, [1.0, 0.25]),
        (
            {"overrides": [{}, {"temperature": 0.25}], "generation_params": {"temperature": 0.5}},
            [0.5, 0.25],
        ),
        ({"overrides": [{"temperature": 0}, {}], "generation_params": {"temperature": 0.5}}, [1.0, 0.5]),
    ],
)
def test_temperatures_become_the_column_of_the_trainer(
    fields: dict[str, Any], expected: list[float] | None
) -> None:
    sent = decode(json.dumps(GROUP | fields).encode(), ScoredData)
    group = through_the_bus(to_group(sent, "g", at=1.0))
    if expected is None:
        assert "temperatures" not in group
    else:
        rows = [row.tolist() for row in group["temperatures"]]
        assert rows == [[expected[0]] * 2, [expected[1]] * 3]
    answer = from_group(group)
    assert {name: answer[name] for name in fields} == fields
    assert answer.keys() == {*FIELDS}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"generation_params": {"temperature": "hot"}}, ("generation_params", "temperature")),
        ({"generation_params": {"temperature": [1]}}, ("generation_params", "temperature")),
        ({"generation_params": {"temperature": "nan"}}, ("generation_params", "temperature")),
        ({"group_overrides": {"temperature": "inf"}}, ("group_overrides", "temperature")),
        ({"group_overrides": {"temperature": 1e300}}, ("group_overrides", "temperature")),
        ({"overrides": [{}, {"temperature": {}}]}, ("overrides", 1, "temperature")),
        ({"overrides": [{}]}, ("overrides",)),
        ({"overrides": [{}, {}, {}]}, ("overrides",)),
        ({"overrides": [{}] * 3, "scores": [1.0] * 3, "generation_params": {"temperature": 2}}, ("tokens",)),
    ],
)
def test_settings_that_no_trainer_can_follow_are_refused(
    fields: dict[str, Any], place: tuple[str | int, ...]
) -> None:
    sent = decode(json.dumps(GROUP | fields).encode(), ScoredData)
    with pytest.raises(RefusedBodyError) as refused:
        to_group(sent, "g", at=1.0)
    assert refused.value.place == ("body", *place)
    assert refused.value.status == 422


def test_the_shipped_trainer_follows_what_was_posted() -> None:
    """From the body to the step: a temperature, a zeroed sequence, and a teacher with k or k + 1 entries."""
    k = 2
    likely, unlikely = {7: -0.7, 8: -0.8}, {9: -20.0}
    cells = [[{}, likely | unlikely], [{}, likely, unlikely | likely]]
    taught = {
        "distill_token_ids": [[[*cell] for cell in row] for row in cells],
        "distill_logprobs": [[[*cell.values()] for cell in row] for row in cells],
    }
    logprobs = {"inference_logprobs": [[1.0, -1.0], [1.0, -2.0, -3.0]], "advantages": []}
    zeroed = {"overrides": [{"set_advantage_to_zero": True, "temperature": 0.25}, {}], "group_overrides": {}}
    warm = {"generation_params": {"temperature": 0.5, "top_p": 1.0, "max_tokens": 9}}

    def studied(config: TrainerConfig, **fields: Any) -> BatchAdvantages:
        sent = decode(json.dumps(GROUP | logprobs | fields).encode(), ScoredData)
        bounds = Bounds(16, 8, columns_needed(config.distillation))
        return study([through_the_bus(to_group(sent, "g", at=1.0))], config, bounds, (), 0)

    (example,) = studied(TrainerConfig(loss=DapoConfig(advantage="dr_grpo")), **zeroed, **warm).examples
    (one,) = collate([example], 64)
    assert one.temperatures is not None
    assert one.temperatures.tolist() == [0.25, 0.5, 0.5]
    assert one.advantages.tolist() == [0.0, 0.5, 0.5]
    config = TrainerConfig(distillation=DistillationConfig(kind="top_k", top_k=k))
    (example,) = studied(config, **taught).examples
    (one,) = collate([example], 64, columns_needed(config.distillation))
    assert one.columns["distill_token_ids"].tolist() == [[*likely]] * 3
    (rejected,) = studied(config, **taught, **warm).rejected
    assert rejected.reason.startswith("temperatures: must be 1")
    (rejected,) = studied(config, group_overrides={"skip_teacher_top_k": True}).rejected
    assert rejected.reason.startswith("distill_token_ids: required")
