"""Short rounds of both sides, so that a change which breaks one of them shows before somebody measures."""

import json

import pytest

from benchmarks.harness import workload
from benchmarks.harness.workload import Shape
from benchmarks.queues import atropos, gateway
from rolloutmq.schemas.wire.replies import Durability

SHAPE = Shape(8, 64)
BATCH = [atropos.scored_data(workload.lists(SHAPE, number % 2), 0) for number in range(8)]
GROUPS = 2 * len(BATCH)

codings = pytest.mark.parametrize("coding", ["gzip", "identity"])


def test_a_round_is_whole_batches_and_more_than_one() -> None:
    for shape in gateway.SHAPES:
        for side, coding in gateway.ROUND_TOKENS:
            sequences = gateway.groups_of(side, shape, coding) * shape.sequences
            assert sequences % gateway.BATCH_SEQUENCES == 0
            assert sequences > gateway.BATCH_SEQUENCES


def test_what_was_posted_is_a_batch() -> None:
    gateway.check(json.dumps({"batch": BATCH}).encode(), SHAPE)


@pytest.mark.parametrize(
    "batch",
    [
        BATCH[1:],
        [*BATCH[1:], BATCH[0] | {"tokens": [[0] * SHAPE.tokens] * SHAPE.sequences}],
        [*BATCH[1:], BATCH[0] | {"inference_logprobs": [[0.0] * SHAPE.tokens] * SHAPE.sequences}],
    ],
    ids=["short", "tokens", "logprobs"],
)
def test_a_batch_that_is_not_what_was_posted_is_seen(batch: list[dict[str, object]]) -> None:
    with pytest.raises(AssertionError, match="a batch"):
        gateway.check(json.dumps({"batch": batch}).encode(), SHAPE)


@codings
def test_ours_brings_every_group_to_the_trainer(coding: atropos.Coding) -> None:
    assert gateway.rate("our", SHAPE, coding, GROUPS) > 0


@pytest.mark.extended
def test_ours_brings_every_group_over_the_disk() -> None:
    assert gateway.rate("our", SHAPE, "gzip", GROUPS, Durability.DISK) > 0


@pytest.mark.extended
def test_ours_answers_environments_meanwhile() -> None:
    assert gateway.status_ms("our", "gzip", SHAPE, GROUPS) > 0


@pytest.mark.extended
def test_ours_serves_the_client_that_encodes() -> None:
    assert gateway.client_rate("our", atropos.BATCH_GROUPS) > 0


@pytest.mark.extended
def test_ours_serves_that_client_and_a_trainer_of_the_sdk() -> None:
    assert gateway.step_rate("our", atropos.BATCH_GROUPS) > 0


@pytest.mark.rival
@pytest.mark.skipif(bool(atropos.missing()), reason=atropos.missing())
@codings
def test_theirs_brings_every_group_to_the_trainer(coding: atropos.Coding) -> None:
    assert gateway.rate("their", SHAPE, coding, GROUPS) > 0


@pytest.mark.rival
@pytest.mark.skipif(bool(atropos.missing()), reason=atropos.missing())
def test_theirs_answers_environments_meanwhile() -> None:
    assert gateway.status_ms("their", "gzip", SHAPE, GROUPS) > 0
