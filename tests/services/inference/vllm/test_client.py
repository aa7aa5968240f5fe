"""Responses of vLLM are accepted only if complete: a log-probability and a version for each token."""

from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Span
from rolloutmq.services.inference.vllm import version_label
from rolloutmq.services.inference.vllm.client import EngineFailedError, continuations

V = PolicyVersion


def choice(**changes: Any) -> dict[str, Any]:
    whole = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 8, 2],
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5 * t} for t in (7, 8, 2)]},
        "weight_versions": [
            {"version": "1.4", "start": 0, "end": 2},
            {"version": "1.5", "start": 2, "end": 3},
        ],
    }
    return whole | changes


def taken(*choices: dict[str, Any]) -> Any:
    return continuations(msgspec.json.encode({"choices": choices}), len(choices))


def test_tokens_come_with_their_logprobs_and_versions() -> None:
    second, first = choice(index=1, finish_reason="length"), choice()
    found = taken(second, first)
    assert [one.stopped for one in found] == [True, False]
    assert found[0].token_ids == [7, 8, 2]
    assert found[0].logprobs == [-3.5, -4.0, -1.0]
    assert found[0].spans == (Span(0, 2, V(1, 4)), Span(2, 3, V(1, 5)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"finish_reason": "abort"}, "its weights cannot be read"),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": -1.0}]}}, "do not match its tokens"),
        ({"logprobs": None}, "malformed response"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "'default' is not a version"),
        ({"weight_versions": [{"version": "1.4", "start": 1, "end": 3}]}, "not a version of tokens 1 to 3"),
        ({"weight_versions": [{"version": "1.4", "start": 0, "end": 2}]}, "1 tokens have no version"),
        ({"weight_versions": []}, "3 tokens have no version"),
    ],
)
def test_what_is_not_whole_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineFailedError, match=why):
        taken(choice(), choice(index=1, **changes))


def test_an_aborted_answer_needs_no_fields() -> None:
    """A request that ended before its first token has no log-probabilities at all."""
    with pytest.raises(EngineFailedError, match="cannot be read"):
        taken({"index": 0, "finish_reason": "abort"})


def test_all_that_were_asked_for_must_come() -> None:
    with pytest.raises(EngineFailedError, match="1 choices, 2 were requested"):
        continuations(msgspec.json.encode({"choices": [choice()]}), 2)
    with pytest.raises(EngineFailedError, match="malformed response"):
        continuations(b"<html>", 1)


def test_labels() -> None:
    assert version_label.version(version_label.of(V(3, 14))) == V(3, 14)
    for strange in ("default", "", "3", "a.b", "1.-2", "1.2.3"):
        assert version_label.version(strange) is None
