"""Requests: accepted ones, and the text of each refusal."""

from typing import Any

import msgspec
import pytest

from rolloutmq.services.inference.openai import requests
from rolloutmq.services.inference.openai.requests import ApiError, Limits
from rolloutmq.services.inference.sampling import Sampling

LIMITS = Limits(model="policy", positions=32, vocabulary=20, max_rows=64)


def encode_text(text: str) -> list[int]:
    return [1, *(ord(letter) - ord("a") for letter in text)]


def job(**fields: Any) -> Any:
    request = requests.text_request(msgspec.json.encode({"prompt": "abc", **fields}))
    return requests.job_of(request, requests.prompts_of(request, encode_text), LIMITS)


def chat_job(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "abc"}], **fields}
    request = requests.chat_request(msgspec.json.encode(body))
    return requests.job_of(request, [encode_text("abc")], LIMITS)


def test_defaults_are_those_of_openai() -> None:
    assert job().sampling == Sampling(n=1, max_tokens=16, temperature=1.0, top_p=1.0, stop=(), seed=None)
    assert chat_job().sampling.max_tokens == 28
    assert job(prompt="a" * 27).sampling.max_tokens == 4


def test_null_means_the_default() -> None:
    fields = [
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logprobs",
        "stream",
        "top_k",
        "user",
    ]
    assert job(**dict.fromkeys(fields)).sampling == Sampling()


def test_values_arrive() -> None:
    made = job(n=16, max_tokens=8, temperature=0.5, top_p=0.9, seed=7, stop="x", model="policy", logprobs=1)
    assert made.sampling == Sampling(16, 8, 0.5, 0.9, ("x",), 7)
    assert made.rows == 16
    assert job(stop=["x", "yy"]).sampling.stop == ("x", "yy")
    assert chat_job(max_tokens=3).sampling.max_tokens == 3
    assert chat_job(max_tokens=3, max_completion_tokens=4).sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[1, 0, 1]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", "b"], [[1, 0], [1, 1]]),
        (["a", [9]], [[1, 0], [9]]),
    ],
)
def test_a_prompt_has_many_forms(prompt: Any, expected: list[list[int]]) -> None:
    assert job(prompt=prompt).prompts == expected


def test_what_changes_nothing_is_accepted() -> None:
    assert job(stream=False, echo=False, top_k=-1, presence_penalty=0.0, best_of=2, n=2, logit_bias={})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt: must be a string"),
    ({"prompt": [1, "a"]}, "prompt: must be a string"),
    ({"prompt": [[1], []]}, "at least one token"),
    ({"prompt": [1, 20]}, "from 0 to 19"),
    ({"prompt": [-1]}, "from 0 to 19"),
    ({"prompt": [10**30]}, "from 0 to 19"),
    ({"prompt": [1.5]}, r"prompt"),
    ({"prompt": [True]}, r"prompt"),
    (
        {"prompt": "a" * 25, "max_tokens": 8},
        "the context has 32 tokens; the prompt has 26 and max_tokens is 8",
    ),
    ({"prompt": "a" * 40}, "the context has 32 tokens"),
    ({"max_tokens": 10**9}, "the context has 32 tokens"),
    ({"max_tokens": 0}, r"\$\.max_tokens"),
    ({"n": 0}, r"\$\.n"),
    ({"n": 65}, "at most 64 sequences a request"),
    ({"prompt": ["a", "b"], "n": 33}, r"at most 64 sequences a request \(got 66\)"),
    ({"n": 10**12}, "at most 64 sequences a request"),
    ({"temperature": -0.1}, r"\$\.temperature"),
    ({"temperature": "hot"}, r"\$\.temperature"),
    ({"top_p": 0}, r"\$\.top_p"),
    ({"top_p": 1.1}, r"\$\.top_p"),
    ({"seed": 1 << 63}, r"\$\.seed"),
    ({"stop": [""]}, r"\$\.stop"),
    ({"stop": ["x"] * 17}, r"\$\.stop"),
    ({"logprobs": 2}, r"logprobs: must be 0 or 1 \(got 2\)"),
    ({"stream": True}, "stream: True is not supported"),
    ({"top_k": 5}, "top_k: 5 is not supported"),
    ({"logit_bias": {"3": 1}}, "logit_bias"),
    ({"best_of": 3}, "best_of"),
    ({"promt": "a"}, "unknown field `promt`"),
]


def test_what_cannot_be_served_is_refused_with_its_place() -> None:
    for fields, says in REFUSED:
        with pytest.raises(ApiError, match=says) as caught:
            job(**fields)
        assert caught.value.status == 400


def test_an_empty_stop_text_stops_nothing() -> None:
    assert job(stop="").sampling.stop == ()


def test_another_model_is_not_found() -> None:
    with pytest.raises(ApiError, match="`gpt-4` does not exist") as caught:
        job(model="gpt-4")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_what_is_no_request_is_refused() -> None:
    bodies = [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b"{}",
    ]
    for body in bodies:
        for decode in (requests.text_request, requests.chat_request):
            with pytest.raises(ApiError) as caught:
                decode(body)
            assert caught.value.status == 400


def test_chat_needs_messages() -> None:
    with pytest.raises(ApiError, match="messages"):
        requests.chat_request(b'{"messages": []}')
    with pytest.raises(ApiError, match="unknown field `prompt`"):
        requests.chat_request(b'{"messages": [{}], "prompt": "a"}')
