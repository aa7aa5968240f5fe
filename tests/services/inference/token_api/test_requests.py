"""Requests for tokens: accepted ones, and the text of each refusal."""

from typing import Any

import msgspec
import pytest

from rolloutmq.services.inference.openai.requests import ApiError, Limits
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.token_api.requests import token_job, token_request

LIMITS = Limits(model="policy", positions=32, vocabulary=20, max_rows=64)


def job(sampling: Any = None, **fields: Any) -> Any:
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling or {}, **fields}
    return token_job(token_request(msgspec.json.encode(body)), LIMITS)


def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    made = job()
    assert made.prompts == [[1, 2, 3]]
    assert made.sampling == Sampling(n=1, max_tokens=29)


def test_an_answer_ends_where_the_context_does() -> None:
    assert job({"max_tokens": 30}).sampling.max_tokens == 29
    assert job({"max_tokens": 5}, token_ids=[1] * 31).sampling.max_tokens == 1


def test_values_arrive() -> None:
    asked = {
        "n": 1,
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": "x",
        "stop_token_ids": [2, 19],
        "logprobs": 1,
    }
    assert job(asked, model="policy").sampling == Sampling(1, 8, 0.5, 0.9, ("x",), 7, (2, 19))
    assert job({"stop": ["x", "yy"]}).sampling.stop == ("x", "yy")


def test_the_request_of_a_client_that_renders_is_accepted() -> None:
    """As `renderers` sends it for verifiers 0.4."""
    sampling = {
        "temperature": 1.0,
        "max_tokens": 4,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 2,
    }
    assert job(sampling, model="policy", cache_salt="s", priority=0).sampling.stop_ids == (2,)


def test_null_and_values_that_change_nothing_are_accepted() -> None:
    names = ("n", "max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "logprobs", "top_k")
    neutral = {
        "top_k": -1,
        "min_p": 0,
        "ignore_eos": False,
        "min_tokens": 0,
        "logit_bias": {},
        "bad_words": [],
    }
    assert job(dict.fromkeys(names)).sampling == job(neutral).sampling == Sampling(max_tokens=29)
    assert job(None, stream=False, output_mode="tokens", features=None, content_parts=[]).rows == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_ids": []}, r"Expected `array` of length >= 1 - at `\$.token_ids`"),
        ({"token_ids": "12"}, r"Expected `array`, got `str` - at `\$.token_ids`"),
        ({"token_ids": [True]}, r"Expected `int`, got `bool`"),
        ({"token_ids": [[1]]}, r"Expected `int`, got `array`"),
        ({"token_ids": [20]}, "token_ids: token ids must be from 0 to 19"),
        ({"token_ids": [-1]}, "token_ids: token ids must be from 0 to 19"),
        ({"sampling_params": {"stop_token_ids": [20]}}, "stop_token_ids: token ids must be from 0 to 19"),
        ({"sampling_params": {"stop_token_ids": [1] * 129}}, "length <= 128"),
        ({"sampling_params": {"n": 2}}, r"sampling_params.n: must be 1 \(got 2\); send a request for each"),
        ({"sampling_params": {"n": 0}}, "Expected `int` >= 1"),
        ({"sampling_params": {"max_tokens": 0}}, "Expected `int` >= 1"),
        ({"sampling_params": {"logprobs": 5}}, r"sampling_params.logprobs: must be 0 or 1 \(got 5\)"),
        ({"sampling_params": {"logprobs": -1}}, "Expected `int` >= 0"),
        ({"sampling_params": {"top_k": 5}}, "sampling_params.top_k: 5 is not supported"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: 0.1 is not supported"),
        ({"sampling_params": {"ignore_eos": True}}, "sampling_params.ignore_eos: True is not supported"),
        ({"sampling_params": {"min_tokens": 3}}, "sampling_params.min_tokens: 3 is not supported"),
        ({"sampling_params": {"allowed_token_ids": [1]}}, r"allowed_token_ids: \[1\] is not supported"),
        ({"sampling_params": {"logit_bias": {"1": 2}}}, "sampling_params.logit_bias: .* is not supported"),
        ({"sampling_params": {"temperature": -1}}, "Expected `float` >= 0"),
        ({"sampling_params": {"top_p": 0}}, "Expected `float` > 0"),
        ({"sampling_params": {"best_of": 1}}, "unknown field `best_of`"),
        ({"sampling_params": None}, "Expected `object`, got `null`"),
        ({"stream": True}, "stream: True is not supported"),
        ({"output_mode": "text"}, "output_mode: 'text' is not supported"),
        ({"priority": 1}, "priority: 1 is not supported"),
        ({"features": {"mm_hashes": {}}}, "features: .* is not supported"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts: .* is not supported"),
        ({"prompt": "1="}, "unknown field `prompt`"),
    ],
)
def test_a_bad_request_is_refused_by_its_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        job(**fields)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request_error")


def test_a_prompt_without_room_has_a_code_of_its_own() -> None:
    for length in (32, 33):
        with pytest.raises(ApiError, match=f"the context has 32 tokens; the prompt has {length}") as caught:
            job(token_ids=[1] * length)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_another_model_is_not_found() -> None:
    with pytest.raises(ApiError, match="the model `other` does not exist") as caught:
        job(model="other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 5000, b'{"token_ids": [1]}'])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="invalid request") as caught:
        token_request(body)
    assert caught.value.status == 400
