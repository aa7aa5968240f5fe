"""Scores equal those of the teacher's model for each position alone, in any batch."""

from typing import Any

import numpy as np
import pytest
import torch

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.wire.distillation import TeacherLogprobs, TeachRequest
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.teacher.scoring import (
    ScoreRequest,
    TeacherLimits,
    TeacherScorer,
    question_of,
)
from rolloutmq.trainer.policy.model import Policy, build_policy

VOCABULARY = 32
REACH = TeacherLimits("print", VOCABULARY, 12, 8)


@pytest.fixture(scope="module")
def model() -> Policy:
    return build_policy(ModelConfig(hidden_size=16, mlp_size=16, initializer_range=0.5), seed=3)


def question(
    seed: int, teacher_logprobs: TeacherLogprobs = TeacherLogprobs.TOP_K, k: int = 5, rows: int = 3
) -> ScoreRequest:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, VOCABULARY, length) for length in rng.integers(2, 12, rows)]
    wanted = [np.flatnonzero(np.r_[False, rng.random(len(one) - 1) < 0.6]) for one in sequences]
    return ScoreRequest(teacher_logprobs, k, sequences, wanted)


def alone(model: Any, one: ScoreRequest) -> tuple[Any, Any]:
    """Ask the model about one prefix after the other."""
    ids, told = [], []
    for sequence, places in zip(one.sequences, one.wanted, strict=True):
        for place in places:
            with torch.inference_mode():
                spread = (
                    model(input_ids=torch.from_numpy(sequence[None, :place])).logits[0, -1].log_softmax(-1)
                )
            best = {
                TeacherLogprobs.TOP_K: spread.topk(one.k).indices,
                TeacherLogprobs.FULL: torch.arange(VOCABULARY),
                TeacherLogprobs.SAMPLED: torch.tensor([sequence[place]]),
            }[one.teacher_logprobs]
            ids.append(best.numpy())
            told.append(spread[best].numpy())
    return np.array(ids), np.array(told)


@pytest.mark.parametrize("pass_tokens", [1, 30, 10_000])
def test_every_place_gets_what_the_model_says_of_its_prefix(model: Policy, pass_tokens: int) -> None:
    questions = [
        question(1),
        question(2, TeacherLogprobs.FULL, VOCABULARY),
        question(3),
        question(4, TeacherLogprobs.SAMPLED, 1),
        question(5, k=2),
    ]
    done: list[ScoreRequest] = []
    TeacherScorer(model, pass_tokens).answer(questions, done.extend)
    assert set(done) == set(questions)
    for one in questions:
        ids, told = alone(model, one)
        np.testing.assert_array_equal(one.token_ids, ids)
        np.testing.assert_allclose(one.logprobs, told, atol=1e-5)
        assert one.token_ids.dtype.name + one.logprobs.dtype.name == "int32float32"


def test_what_is_left_of_one_is_the_tail(model: Policy) -> None:
    one, whole = question(6), question(6, TeacherLogprobs.FULL, VOCABULARY)
    TeacherScorer(model, 100).answer([one, whole], lambda _: None)
    np.testing.assert_allclose(np.exp(whole.logprobs).sum(-1), 1.0, atol=1e-5)
    others = np.sort(np.exp(whole.logprobs), -1)[:, : -one.k].sum(-1)
    np.testing.assert_allclose(1 - np.exp(one.logprobs).sum(-1), others, atol=1e-5)


def test_a_question_that_nobody_waits_for_is_not_answered(model: Policy) -> None:
    gone, living = question(7), question(8)
    gone.cancelled = True
    done: list[ScoreRequest] = []
    TeacherScorer(model, 100).answer([gone, living], done.extend)
    assert done == [living]
    assert not gone.logprobs.size


def test_passes_are_bounded_unless_one_sequence_is_longer() -> None:
    scorer = TeacherScorer(None, 10)
    lengths = [2, 9, 3, 12, 3, 1]
    sequences = [np.zeros(length, np.int64) for length in lengths]
    wanted = [np.arange(1, length) for length in lengths]
    passes = list(scorer._passes(sequences, wanted))
    assert passes == [[0, 2, 4], [1], [3]]  # what has no place that is asked for is not read
    assert all(len(rows) * lengths[rows[-1]] <= 10 or len(rows) == 1 for rows in passes)


def request(**changed: Any) -> TeachRequest:
    tokens = np.array([1, 2, 3, 4, 5], "<i4").tobytes()
    usual: dict[str, Any] = {
        "tokenizer": "print",
        "teacher_logprobs": TeacherLogprobs.TOP_K,
        "top_k": 4,
        "tokens": tokens,
    }
    return TeachRequest(**(usual | {"lengths": (3, 2), "wanted": b"\0\1\1\0\1"} | changed))


def test_a_request_becomes_a_question() -> None:
    one = question_of(request(), REACH)
    assert [list(tokens) for tokens in one.sequences] == [[1, 2, 3], [4, 5]]
    assert [list(places) for places in one.wanted] == [[1, 2], [1]]
    assert (one.rows, one.k) == (2, 4)
    assert question_of(request(top_k=1000), REACH).k == VOCABULARY
    assert question_of(request(teacher_logprobs=TeacherLogprobs.FULL), REACH).k == VOCABULARY
    assert question_of(request(teacher_logprobs=TeacherLogprobs.SAMPLED), REACH).k == 1
    empty = question_of(request(tokens=b"", wanted=b"", lengths=()), REACH)
    assert sum(map(len, empty.wanted)) == 0


@pytest.mark.parametrize(
    ("changed", "status", "why"),
    [
        ({"tokenizer": "other"}, 409, r"\(got fingerprint print, the student has other\)"),
        ({"tokens": b"123"}, 400, "must have the same length"),
        ({"wanted": b"\0\1"}, 400, "must have the same length"),
        ({"lengths": (3, 3)}, 400, r"must add up to 5 tokens \(got 6\)"),
        ({"lengths": (1, 1, 1, 1, 1, 0, 0, 0, 0)}, 400, r"at most 8 sequences a request \(got 9\)"),
        ({"wanted": b"\1\1\1\0\1"}, 400, "the first token of a sequence"),
        ({"tokens": np.array([1, 2, 3, 4, 32], "<i4").tobytes()}, 400, "must be from 0 to 31"),
        ({"tokens": np.array([1, 2, 3, 4, -1], "<i4").tobytes()}, 400, "must be from 0 to 31"),
        ({"teacher_logprobs": TeacherLogprobs.NONE}, 400, "teacher_logprobs: must be"),
        ({"top_k": 0}, 400, "top_k: required"),
        (
            {"tokens": bytes(4 * 13), "wanted": bytes(13), "lengths": (13,)},
            400,
            r"at most 12 tokens a sequence \(got 13\)",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(
    changed: dict[str, Any], status: int, why: str
) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        question_of(request(**changed), REACH)
    assert refused.value.status == status
