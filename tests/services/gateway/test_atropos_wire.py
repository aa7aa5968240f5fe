import json

import pytest

from rolloutmq.schemas.errors import GroupTooLargeError
from rolloutmq.services.gateway.atropos_wire import (
    FIELDS,
    LARGE_BYTES,
    EnvIdentifier,
    RefusedBodyError,
    RegisterEnv,
    Registration,
    ScoredData,
    check_messages,
    decode,
)

GROUP = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1]}


def body(**changes: object) -> bytes:
    return json.dumps({**GROUP, **changes}).encode()


def test_a_group_has_the_fields_of_atropos_in_their_order() -> None:
    assert FIELDS[:3] == ("tokens", "masks", "scores")
    assert len(FIELDS) == 14


def test_what_is_null_an_empty_list_or_unknown() -> None:
    data = decode(body(advantages=None, ref_logprobs=[], new_field=3), ScoredData)
    assert (data.advantages, data.ref_logprobs) == (None, [])
    assert data.scores == [1.0]
    assert isinstance(data.scores[0], float)


def test_numbers_in_texts_are_numbers_as_there() -> None:
    assert decode(b'{"env_id": "3"}', EnvIdentifier).env_id == 3


@pytest.mark.parametrize(
    ("sent", "place"),
    [
        (body(tokens=None), ("body", "tokens")),
        (body(tokens=[1]), ("body", "tokens")),
        (body(scores=["x"]), ("body", "scores")),
        (body(env_id="x"), ("body", "env_id")),
        (b'{"tokens": [[1]]}', ("body", "masks")),
        (b"[]", ("body",)),
        (b"", ("body",)),
        (b"\xff\xfe", ("body",)),
        (b'{"tokens":', ("body",)),
        (b"[" * 100_000, ("body",)),
    ],
)
def test_a_body_that_cannot_be_says_where(sent: bytes, place: tuple[str, ...]) -> None:
    with pytest.raises(RefusedBodyError) as refused:
        decode(sent, ScoredData)
    assert refused.value.place == place
    assert refused.value.status == 422
    assert refused.value.reason


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_finite_are_named(number: str) -> None:
    with pytest.raises(RefusedBodyError, match="not finite"):
        decode(body().replace(b"[1]", f"[{number}]".encode()), ScoredData)


@pytest.mark.parametrize(
    ("kind", "first"), [(Registration, "wandb_group"), (RegisterEnv, "max_token_length")]
)
def test_a_missing_field_is_named(kind: type, first: str) -> None:
    with pytest.raises(RefusedBodyError, match="Field required") as refused:
        decode(b"{}", kind)
    assert refused.value.place == ("body", first)


def test_a_message_has_a_role_and_content_and_anything_else() -> None:
    good = decode(body(messages=[[{"role": "user", "content": None, "x": [1]}]]), ScoredData)
    check_messages(good)
    bad = decode(body(messages=[[{"role": "user", "content": ""}, {"role": "tool"}]]), ScoredData)
    with pytest.raises(RefusedBodyError) as refused:
        check_messages(bad)
    assert refused.value.place == ("body", "messages", 0, 1)


TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 7,
    "starting_step": 0,
    "num_steps": 100,
}
ENV = {
    "max_token_length": 64,
    "desired_name": "maths",
    "weight": 1.0,
    "group_size": 2,
    "min_batch_allocation": None,
}


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("batch_size", 1, 1 << 24),
        ("starting_step", 0, 1 << 53),
        ("max_token_len", -1, 10**30),
        ("save_checkpoint_interval", -1, 10**30),
        ("num_steps", -1, 10**30),
    ],
)
def test_the_numbers_of_a_trainer_have_bounds(field: str, least: int, most: int) -> None:
    for number in (least, most):
        made = decode(json.dumps({**TRAINER, field: number}).encode(), Registration)
        assert getattr(made, field) == min(number, 1 << 53)
    beyond = [least - 1, -(10**30), *([most + 1] if most <= 1 << 53 else [])]
    for number in beyond:
        with pytest.raises(RefusedBodyError) as refused:
            decode(json.dumps({**TRAINER, field: number}).encode(), Registration)
        assert refused.value.place == ("body", field)


@pytest.mark.parametrize(
    ("field", "fine", "refused"),
    [
        ("min_batch_allocation", (None, 0, 0.0, 0.25, 1), (1e308, 1.0001, -0.25, "much")),
        ("weight", (0, 1.0, 1e-9, 1e6, -1.0), (1e7, -1e7, 1e308, None)),
        ("group_size", (1, 8, 1 << 16, 10**30), (0, -1, -(10**30))),
        ("max_token_length", (-1, 0, 1 << 20, 10**30), (-2, -(10**30))),
        ("desired_name", ("", "a name", "ü" * 512, "\x1b"), ("x" * 513, 3, None)),
    ],
)
def test_the_claims_of_an_environment_have_bounds(
    field: str, fine: tuple[object, ...], refused: tuple[object, ...]
) -> None:
    for value in fine:
        decode(json.dumps({**ENV, field: value}).encode(), RegisterEnv)
    for value in refused:
        with pytest.raises(RefusedBodyError) as error:
            decode(json.dumps({**ENV, field: value}).encode(), RegisterEnv)
        assert error.value.place == ("body", field)


@pytest.mark.parametrize(
    ("field", "longest"), [("wandb_group", 512), ("wandb_project", 512), ("checkpoint_dir", 4096)]
)
def test_names_and_paths_of_a_trainer_have_a_length(field: str, longest: int) -> None:
    decode(json.dumps({**TRAINER, field: "x" * longest}).encode(), Registration)
    with pytest.raises(RefusedBodyError) as refused:
        decode(json.dumps({**TRAINER, field: "x" * (longest + 1)}).encode(), Registration)
    assert refused.value.place == ("body", field)


@pytest.mark.parametrize("inner", ["[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000])
@pytest.mark.parametrize("field", ["images", "generation_params", "unknown"])
def test_what_is_nested_without_end_is_refused(field: str, inner: str) -> None:
    sent = json.dumps({**GROUP, field: "HERE"}).replace('"HERE"', inner).encode()
    with pytest.raises(RefusedBodyError):
        decode(sent, ScoredData)


@pytest.mark.parametrize(
    ("images", "told"),
    [
        ("[" + "[]," * 200_000 + "[]]", "too many values"),
        ("[" + "{}," * 200_000 + "{}]", "too many values"),
        ("[" + "0," * 2_000_000 + "0]", "too many values"),
        ("[" * 5_000 + "0" + "]" * 5_000, "nested too deeply"),
        ("[" * 300_000 + "]" * 300_000, "nested too deeply|too many values|recursion"),
    ],
    ids=["lists", "maps", "numbers", "deep", "deeper"],
)
def test_values_that_would_take_long_to_decode_are_refused_before(images: str, told: str) -> None:
    sent = json.dumps({**GROUP, "messages": None}).encode()[:-1] + b', "images": ' + images.encode() + b"}"
    with pytest.raises(RefusedBodyError, match=told) as refused:
        decode(sent, ScoredData)
    assert refused.value.status == 422


def test_separators_in_a_text_are_no_values() -> None:
    text = '\\"[],{}\\\\' * 400_000
    data = decode(body(images=text, messages=[[{"role": "user", "content": text}]]), ScoredData)
    assert data.images == text
    assert data.messages[0][0]["content"] == text


def test_more_numbers_than_a_group_may_have_are_refused_before() -> None:
    with pytest.raises(GroupTooLargeError):
        decode(body(tokens=[[1] * 400_000]), ScoredData, group_bytes=1_000_000)


def test_a_list_without_end_is_refused_before() -> None:
    with pytest.raises(RefusedBodyError, match="members"):
        decode(b"[" + b"{}," * 500_000 + b"{}]", list[ScoredData])


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"tokens": 1}, ("body", "tokens")),
        ({"tokens": ["[1]"]}, ("body", "tokens")),
        ({"advantages": [["x"]]}, ("body", "advantages")),
        ({"messages": [[1]]}, ("body", "messages")),
        ({"distill_token_ids": [[1]]}, ("body", "distill_token_ids")),
    ],
)
def test_a_large_group_that_cannot_be_says_where(changes: dict[str, object], place: tuple[str, ...]) -> None:
    with pytest.raises(RefusedBodyError) as refused:
        decode(body(images="x" * LARGE_BYTES, **changes), ScoredData)
    assert refused.value.place == place
    missing = json.dumps({"tokens": [[1]], "scores": [1], "images": "x" * LARGE_BYTES}).encode()
    with pytest.raises(RefusedBodyError, match="Field required") as refused:
        decode(missing, ScoredData)
    assert refused.value.place == ("body", "masks")
