"""Requests and answers of the dialect: what is understood, and what is refused."""

import json
from typing import Any

import pytest

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.worker import dialect
from rolloutmq.services.worker.policy import Completion

KNOWN = (PolicyVersion(0, 8), PolicyVersion(0, 9))


def text_answer(**changes: Any) -> bytes:
    choice = {
        "index": 0,
        "text": "37",
        "token_ids": [4, 5],
        "prompt_token_ids": [1, 2],
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["3", "7"], "top_logprobs": None},
    }
    return json.dumps({"id": "x", "object": "text_completion", "choices": [choice | changes]}).encode()


def span(start: int, end: int, version: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "version": version}


def one(body: bytes) -> Completion:
    (completion,) = dialect.text_completions(body, KNOWN)
    return completion


def test_a_completion_is_read() -> None:
    version = {"incarnation": 2, "step": 17}
    completion = one(text_answer(weight_versions=[span(0, 2, version)]))
    stamp = PolicyVersion(2, 17)
    assert completion == Completion("37", [1, 2], [4, 5], [-0.5, -0.25], stamp, stamp, "stop", ["3", "7"])


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (None, KNOWN),
        ([], KNOWN),
        ([span(0, 1, {"step": 3}), span(1, 2, {"step": 4})], (PolicyVersion(0, 3), PolicyVersion(0, 4))),
        ([span(0, 2, 12)], (PolicyVersion(0, 12), PolicyVersion(0, 12))),
        ([span(0, 2, "12")], (PolicyVersion(0, 12), PolicyVersion(0, 12))),
        ([span(0, 2, "weights-of-monday")], KNOWN),
        (
            [span(0, 1, {"incarnation": 1, "step": 2}), span(1, 2, {"incarnation": 0, "step": 5})],
            (PolicyVersion(0, 5), PolicyVersion(1, 2)),
        ),
    ],
)
def test_versions_are_the_oldest_and_newest_told_or_else_known(
    versions: Any, expected: tuple[PolicyVersion, PolicyVersion]
) -> None:
    completion = one(text_answer(weight_versions=versions))
    assert (completion.oldest, completion.newest) == expected


@pytest.mark.parametrize(
    ("said", "asked", "found"), [(None, 0.5, 0.5), (None, 0.0, 1.0), (0.7, 1.0, 0.7), (1.0, 0.0, 1.0)]
)
def test_the_temperature_is_that_of_the_server_or_else_that_asked_for(
    said: float | None, asked: float, found: float
) -> None:
    (completion,) = dialect.text_completions(text_answer(temperature=said), KNOWN, asked)
    assert completion.temperature == found


def test_what_came_from_a_nucleus_is_refused() -> None:
    assert one(text_answer(top_p=1.0)).temperature == 1.0
    with pytest.raises(PolicyRefusedError, match=r"top_p 0\.5: .* no trainer can compute"):
        one(text_answer(top_p=0.5))


def test_a_chat_answer_is_read() -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None},
        "token_ids": [7],
        "finish_reason": None,
        "logprobs": {"content": [{"token": "a", "logprob": -1.5, "bytes": None}]},
    }
    body = json.dumps({"choices": [choice], "prompt_token_ids": [1]}).encode()
    (completion,) = dialect.chat_completions(body, KNOWN)
    assert completion == Completion("", [1], [7], [-1.5], *KNOWN, "", ["a"])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not of the dialect"),
        (b"<html>", "not of the dialect"),
        (b"[]", "not of the dialect"),
        (b'{"choices": [{"token_ids": ["a"]}]}', "not of the dialect"),
        (text_answer(token_ids=None), "`return_token_ids`"),
        (text_answer(prompt_token_ids=None), "`return_token_ids`"),
        (text_answer(logprobs=None), "log-probability"),
        (text_answer(logprobs={"token_logprobs": [-1.0]}), "log-probability"),
        (text_answer(logprobs={"token_logprobs": [-1.0, None]}), "not of the dialect"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(PolicyRefusedError) as caught:
        dialect.text_completions(body, KNOWN)
    assert caught.value.status == 200
    assert problem in str(caught.value)


def test_a_server_may_keep_the_texts_of_tokens_to_itself() -> None:
    assert one(text_answer(logprobs={"token_logprobs": [-1.0, -2.0]})).tokens == []


def test_requests_ask_for_what_training_needs() -> None:
    asked = json.loads(dialect.text_request("m", (1, 2), n=3, max_tokens=4, temperature=1.0))
    assert asked == {
        "model": "m",
        "prompt": [1, 2],
        "logprobs": 0,
        "return_token_ids": True,
        "n": 3,
        "max_tokens": 4,
        "temperature": 1.0,
    }
    chat = json.loads(dialect.chat_request("m", ({"role": "user", "content": "ä"},), n=1))
    assert chat["messages"] == [{"role": "user", "content": "ä"}]
    assert chat["logprobs"] is True
    assert chat["return_token_ids"] is True


def test_errors_are_read_whatever_their_form() -> None:
    assert dialect.error_text(b'{"error": {"message": "too\\n long", "code": 1}}') == "too long"
    assert dialect.error_text(b"<b>no\n</b>") == "<b>no </b>"
    assert dialect.error_text(b"\xff") == "\ufffd"
    assert len(dialect.error_text(b"x" * 10_000)) == 200


def test_the_first_model_is_the_one() -> None:
    assert dialect.first_model(b'{"data": [{"id": "a"}, {"id": "b"}]}') == "a"
    for body in (b'{"data": []}', b"{}", b"no"):
        with pytest.raises(PolicyRefusedError, match="names no model"):
            dialect.first_model(body)
