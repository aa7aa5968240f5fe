"""Responses have every field that training and OpenAI's clients need."""

from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Continuation, Job, Span
from rolloutmq.services.inference.openai import requests, responses
from rolloutmq.services.inference.sampling import Sampling


class Letters:
    def decode(self, ids: list[int], /) -> str:
        return "".join(self.token(token) for token in ids if token)

    def token(self, token: int, /) -> str:
        return " abcdefghij"[token]


SPANS = (Span(0, 1, PolicyVersion(1, 4)), Span(1, 3, PolicyVersion(1, 5)))
RESULTS = [
    Continuation([1, 2, 0], [-0.5, -1.5, -2.5], SPANS, stopped=True),
    Continuation([3, 4, 5], [-0.1, -0.2, -0.3], SPANS, stopped=False),
]
VERSIONS = [
    {"start": 0, "end": 1, "version": {"incarnation": 1, "step": 4}},
    {"start": 1, "end": 3, "version": {"incarnation": 1, "step": 5}},
]


def answer(request: Any, job: Job) -> Any:
    return msgspec.json.decode(
        responses.completion_response(request, job, Letters(), model="policy", number=7, created=99)
    )


def job(stop: tuple[str, ...] = ()) -> Job:
    return Job([[7, 8]], Sampling(n=2, max_tokens=3, stop=stop), results=RESULTS)


def test_completions() -> None:
    request = requests.text_request(b'{"prompt": [7, 8], "n": 2, "logprobs": 0, "return_token_ids": true}')
    assert answer(request, job()) == {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 99,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "token_ids": [1, 2, 0],
                "prompt_token_ids": [7, 8],
                "finish_reason": "stop",
                "logprobs": {"token_logprobs": [-0.5, -1.5, -2.5], "tokens": ["a", "b", " "]},
                "weight_versions": VERSIONS,
            },
            {
                "index": 1,
                "text": "cde",
                "token_ids": [3, 4, 5],
                "prompt_token_ids": [7, 8],
                "finish_reason": "length",
                "logprobs": {"token_logprobs": [-0.1, -0.2, -0.3], "tokens": ["c", "d", "e"]},
                "weight_versions": VERSIONS,
            },
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8},
    }


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"temperature": 1e-5}, {"temperature": 0.01}),
        ({"temperature": 0.0, "top_p": 0.5}, {}),  # the likeliest, and at 1
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({}, {}),
    ],
)
def test_how_it_was_sampled_is_said_where_log_probabilities_depend_on_it(
    sampling: dict[str, float], told: dict[str, float]
) -> None:
    request = requests.text_request(b'{"prompt": [7, 8]}')
    made = Job([[7, 8]], Sampling(n=2, max_tokens=3, **sampling), results=RESULTS)  # type: ignore[arg-type]
    for choice in answer(request, made)["choices"]:
        assert {name: choice[name] for name in ("temperature", "top_p") if name in choice} == told


def test_chat() -> None:
    request = requests.chat_request(b'{"messages": [{}], "logprobs": true, "return_token_ids": true}')
    said = answer(request, job())
    assert (said["id"], said["object"]) == ("chatcmpl-7", "chat.completion")
    choice = said["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "ab"}
    assert choice["logprobs"]["content"][1] == {"token": "b", "logprob": -1.5, "top_logprobs": []}
    assert choice["token_ids"] == [1, 2, 0]
    assert choice["prompt_token_ids"] == [7, 8]
    assert "text" not in choice


def test_what_was_not_asked_for_is_null() -> None:
    for request in (
        requests.text_request(b'{"prompt": "a"}'),
        requests.chat_request(b'{"messages": [{}], "logprobs": false}'),
    ):
        choice = answer(request, job())["choices"][0]
        assert choice["token_ids"] is choice["prompt_token_ids"] is choice["logprobs"] is None
        assert choice["weight_versions"] == VERSIONS


def test_choices_belong_to_their_prompts() -> None:
    request = requests.text_request(b'{"prompt": [[7], [8]], "n": 2, "return_token_ids": true}')
    two = Job([[7], [8]], Sampling(n=2), results=RESULTS * 2)
    assert [choice["prompt_token_ids"] for choice in answer(request, two)["choices"]] == [[7], [7], [8], [8]]


def test_text_ends_before_the_stop_text_and_token_ids_do_not() -> None:
    request = requests.text_request(b'{"prompt": "a", "return_token_ids": true}')
    choices = answer(request, job(stop=("e", "d")))["choices"]
    assert [choice["text"] for choice in choices] == ["ab", "c"]
    assert choices[1]["token_ids"] == [3, 4, 5]


def test_errors_are_those_of_openai() -> None:
    assert msgspec.json.decode(responses.error_body(400, "no", "bad")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "bad"}
    }
    assert msgspec.json.decode(responses.error_body(503, "no", "busy"))["error"]["type"] == "server_error"
