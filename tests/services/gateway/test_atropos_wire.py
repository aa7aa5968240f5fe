import json

import pytest

from rolloutmq.services.gateway.atropos_wire import (
    FIELDS,
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
