import gzip
import json

import pytest

from benchmarks.harness import workload
from benchmarks.harness.workload import Shape
from benchmarks.queues import atropos

LISTS = workload.lists(Shape(2, 16), 1)


def test_labels_are_the_tokens_that_are_trained_on() -> None:
    payload = atropos.scored_data(LISTS, 7)
    tokens, labels = payload["tokens"][1], payload["masks"][1]
    assert labels == [atropos.NO_LABEL, atropos.NO_LABEL, *tokens[2:]]
    assert (payload["env_id"], payload["ref_logprobs"]) == (7, None)


def test_a_large_body_is_compressed_as_their_client_does() -> None:
    payload = atropos.scored_data(workload.lists(Shape(2, 200), 1), 0)
    body, headers = atropos.encoded(payload, "gzip")
    assert headers == {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert json.loads(gzip.decompress(body)) == payload


@pytest.mark.parametrize(("payload", "coding"), [({"a": 1}, "gzip"), (LISTS, "identity")])
def test_small_bodies_and_the_other_way_are_plain(payload: dict[str, object], coding: atropos.Coding) -> None:
    body, headers = atropos.encoded(payload, coding)
    assert headers == {"Content-Type": "application/json"}
    assert json.loads(body) == payload


@pytest.mark.rival
@pytest.mark.skipif(bool(atropos.missing()), reason=atropos.missing())
@pytest.mark.parametrize("coding", ["gzip", "identity"])
def test_theirs_brings_every_group_to_the_trainer(coding: atropos.Coding) -> None:
    assert atropos.their_rate(coding, groups=atropos.BATCH_GROUPS) > 0


@pytest.mark.parametrize("source", ["lists", "arrays"])
def test_ours_brings_every_group_to_the_trainer(source: atropos.Source) -> None:
    assert atropos.our_rate(source, groups=atropos.BATCH_GROUPS) > 0
