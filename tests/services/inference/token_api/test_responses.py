"""Responses with tokens: what a client that renders reads, and what a trainer needs."""

from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Continuation, Job, Span
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.token_api.requests import token_request
from rolloutmq.services.inference.token_api.responses import token_response

SPANS = (Span(0, 1, PolicyVersion(0, 3)), Span(1, 2, PolicyVersion(1, 4)))


def response(stopped: bool = True, sampling: Sampling = Sampling(), **fields: Any) -> Any:
    body = {"token_ids": [1, 2], "sampling_params": {"logprobs": 1}, **fields}
    job = Job([[1, 2]], sampling, results=[Continuation([7, 2], [-0.5, -0.25], SPANS, stopped)])
    made = token_response(
        token_request(msgspec.json.encode(body)), job, model="policy", request_id="r", created=5
    )
    return msgspec.json.decode(made)


def test_the_response_is_that_of_vllm_with_versions() -> None:
    assert response() == {
        "request_id": "generate-tokens-r",
        "created": 5,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "token_ids": [7, 2],
                "logprobs": {
                    "content": [
                        {"token": "token_id:7", "token_id": 7, "logprob": -0.5, "top_logprobs": []},
                        {"token": "token_id:2", "token_id": 2, "logprob": -0.25, "top_logprobs": []},
                    ]
                },
                "finish_reason": "stop",
                "stop_reason": None,
                "weight_versions": [
                    {"start": 0, "end": 1, "version": {"incarnation": 0, "step": 3}},
                    {"start": 1, "end": 2, "version": {"incarnation": 1, "step": 4}},
                ],
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "prompt_token_ids": None,
    }


def test_without_logprobs_there_are_none() -> None:
    assert response(sampling_params={})["choices"][0]["logprobs"] is None


def test_the_prompt_is_returned_on_request() -> None:
    assert response(return_token_ids=True)["prompt_token_ids"] == [1, 2]


@pytest.mark.parametrize(
    ("stopped", "stop_ids", "finish", "reason"),
    [
        (True, (2,), "stop", 2),
        (True, (9,), "stop", None),
        (False, (9,), "length", None),
        (True, (), "stop", None),
    ],
)
def test_a_stop_token_of_the_request_is_the_reason(
    stopped: bool, stop_ids: tuple[int, ...], finish: str, reason: int | None
) -> None:
    (choice,) = response(stopped, Sampling(stop_ids=stop_ids))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, reason)


def test_another_distribution_is_reported() -> None:
    (choice,) = response(sampling=Sampling(temperature=0.5, top_p=0.9))["choices"]
    assert (choice["temperature"], choice["top_p"]) == (0.5, 0.9)
