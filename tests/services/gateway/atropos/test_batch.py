"""Batches go to the trainer: which, in what order, and with every value as it came."""

import json
import math
from typing import Any

import pytest
from tests.services.gateway.atropos.bodies import (
    NO_LABEL,
    OPTIONAL,
    REQUIRED,
    batch,
    group,
    join,
    numbers,
    post,
    register,
    start,
)
from tests.services.gateway.atropos.servers import Api, wait_for

DOUBLES = [
    *(0.1, 1 / 3, -0.0, 1e-300, 5e-324, -1.7976931348623157e308, 2.0**53 + 2, math.pi, 1e22),
    *(-0.6931471805599453, 1.0, 123456789.12345678),
]
WORDS = 'Grüße, 世界! 👩‍🚀 \u0000\u001f"\\/\u2028'
NESTED: dict[str, Any] = {
    "temperature": 0.7,
    "stop": None,
    "n": 16,
    "large": 1 << 60,
    "deep": {"a": [1, [2.5, {"b": [True, False, None]}], "c"]},
    WORDS: [WORDS],
    "": {},
}


def same(one: object, other: object) -> bool:
    """Tell whether two values are the same JSON: 1 is not 1.0, and -0.0 is not 0.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def through(api: Api, **fields: Any) -> Any:
    """Send a group with these fields through the server."""
    start(api, batch_size=2)
    post(api, group(7, **fields))
    [found] = batch(api)
    return found


def test_there_is_none(api: Api) -> None:
    register(api)
    answer = api.get("/batch")
    assert (answer.status, answer.json) == (200, {"batch": None})


def test_half_a_batch_is_none(api: Api) -> None:
    start(api)
    post(api, group(1))
    assert batch(api) is None
    post(api, group(2))
    assert numbers(batch(api)) == [1, 2]
    assert batch(api) is None


def test_a_batch_has_the_size_that_was_registered(api: Api) -> None:
    start(api, batch_size=8)
    post(api, *(group(number, size=4) for number in range(2)))
    assert [len(one["tokens"]) for one in batch(api)] == [4, 4]


def test_groups_of_several_sizes_make_a_batch(api: Api) -> None:
    start(api, batch_size=8)
    post(api, group(1, size=2), group(2, size=4), group(3, size=2))
    found = batch(api)
    assert sorted(numbers(found)) == [1, 2, 3]
    assert sum(len(one["tokens"]) for one in found) == 8


@pytest.mark.differs("theirs never forms a batch of groups whose sizes do not add up to it exactly")
def test_groups_that_do_not_add_up(api: Api) -> None:
    start(api, batch_size=4)
    post(api, *(group(number, size=3) for number in range(4)))
    if api.either(theirs=False, ours=True):
        wait_for(lambda: batch(api), what="a batch that is smaller than asked for")
    else:
        assert batch(api) is None


@pytest.mark.differs("theirs hands out the newest first")
def test_the_order_of_batches(api: Api) -> None:
    start(api)
    post(api, *(group(number) for number in range(6)))
    assert [numbers(batch(api)) for _ in range(3)] == api.either(
        theirs=[[4, 5], [2, 3], [0, 1]], ours=[[0, 1], [2, 3], [4, 5]]
    )
    assert batch(api) is None


@pytest.mark.differs("theirs counts what it has formed, ours what it has handed out")
def test_the_steps_of_batches(api: Api) -> None:
    start(api, starting_step=10)
    post(api, *(group(number) for number in range(6)))
    steps = []
    for _ in range(3):
        batch(api)
        steps.append(api.get("/status").json["current_step"])
    assert steps == api.either(theirs=[13, 13, 13], ours=[11, 12, 13])


def test_nothing_is_handed_out_twice(api: Api) -> None:
    start(api)
    post(api, *(group(number) for number in range(20)))
    got = [number for _ in range(10) for number in numbers(batch(api))]
    assert sorted(got) == list(range(20))
    assert batch(api) is None


def test_a_minimum_share_is_kept(api: Api) -> None:
    start(api, batch_size=8)
    many = join(api, desired_name="many")["env_id"]
    few = join(api, desired_name="few", min_batch_allocation=0.5)["env_id"]
    post(api, *(group(number, env_id=many) for number in range(6)))
    post(api, *(group(number, env_id=few) for number in range(10, 12)))
    assert {10, 11} <= set(numbers(batch(api)))


def test_every_field_is_there_and_absent_ones_are_null(api: Api) -> None:
    found = through(api)
    assert found.keys() == {*REQUIRED, *OPTIONAL}
    assert len(found) == 14
    assert {name: found[name] for name in OPTIONAL} == dict.fromkeys(OPTIONAL)


def test_tokens_and_labels_are_as_they_were(api: Api) -> None:
    tokens = [[0, 1, 151_935, (1 << 31) - 1], [5]]
    masks = [[NO_LABEL, NO_LABEL, 151_935, (1 << 31) - 1], [NO_LABEL]]
    found = through(api, tokens=tokens, masks=masks)
    assert same([found["tokens"], found["masks"]], [tokens, masks])


@pytest.mark.parametrize("label", [0, 1, -1, -100, 7])
def test_a_mask_is_whatever_it_was(api: Api, label: int) -> None:
    masks = [[label] * 3, [label] * 3]
    assert same(through(api, masks=masks)["masks"], masks)


def test_scores_are_doubles(api: Api) -> None:
    half = len(DOUBLES)
    tokens = [[1, 2]] * half
    start(api, batch_size=half)
    post(api, {"tokens": tokens, "masks": tokens, "scores": DOUBLES})
    assert same(batch(api)[0]["scores"], DOUBLES)


def test_whole_scores_are_answered_as_doubles(api: Api) -> None:
    assert same(through(api, scores=[1, 0])["scores"], [1.0, 0.0])


@pytest.mark.parametrize("field", ["advantages", "ref_logprobs", "inference_logprobs"])
def test_numbers_of_tokens_are_doubles(api: Api, field: str) -> None:
    rows = [[1] * len(DOUBLES), [2]]
    masks = [[-100] * len(DOUBLES), [2]]  # where nothing is trained, logprobs may be anything
    values = [DOUBLES, [-0.25]]
    assert same(through(api, tokens=rows, masks=masks, **{field: values})[field], values)


def test_whole_numbers_of_tokens_are_answered_as_doubles(api: Api) -> None:
    values = [[1, 0, -1], [1, 2, 3]]
    assert same(through(api, advantages=values)["advantages"], [[1.0, 0.0, -1.0], [1.0, 2.0, 3.0]])


@pytest.mark.parametrize("field", ["generation_params", "group_overrides"])
def test_what_belongs_to_the_group_is_as_it_was(api: Api, field: str) -> None:
    assert same(through(api, **{field: NESTED})[field], NESTED)


def test_what_belongs_to_each_sequence_is_as_it_was(api: Api) -> None:
    overrides = [NESTED, {"set_advantage_to_zero": True}]
    assert same(through(api, overrides=overrides)["overrides"], overrides)


@pytest.mark.parametrize("images", ["base64", ["a", None], [[NESTED], []], NESTED, 0, False, 1.5, ""])
def test_images_are_anything(api: Api, images: object) -> None:
    assert same(through(api, images=images)["images"], images)


def test_messages_are_as_they_were(api: Api) -> None:
    said = [
        {"role": "user", "content": WORDS, "more": NESTED},
        {"role": "assistant", "content": [NESTED, WORDS]},
    ]
    messages = [said, said[:1]]
    assert same(through(api, messages=messages)["messages"], messages)


def test_what_a_teacher_says_is_by_sequence_position_and_rank(api: Api) -> None:
    ids = [[[1, 2], [3], []], [[4, 5, 6], [7, 8], [9]]]
    logprobs = [[[-0.1, -2.5], [-1e-3], []], [[-0.5, -1.5, -2.5], [0.0, -0.7], [-9.0]]]
    found = through(api, distill_token_ids=ids, distill_logprobs=logprobs)
    assert same([found["distill_token_ids"], found["distill_logprobs"]], [ids, logprobs])


def test_whose_group_it_is_is_told(api: Api) -> None:
    start(api, batch_size=2)
    env_id = join(api)["env_id"]
    post(api, group(env_id=env_id))
    assert batch(api)[0]["env_id"] == env_id


def test_the_latest_example_is_the_newest_group(api: Api) -> None:
    start(api)
    post(api, group(1), group(2, generation_params=NESTED, messages=[[], []]))
    latest = api.get("/latest_example")
    assert latest.status == 200
    assert latest.json.keys() == {*REQUIRED, *OPTIONAL}
    assert latest.json["tokens"][0][0] == 2
    assert same(latest.json["generation_params"], NESTED)


def test_the_latest_example_stays_when_it_was_handed_out(api: Api) -> None:
    start(api)
    post(api, group(1), group(2))
    batch(api)
    assert api.get("/latest_example").json["tokens"][0][0] == 2


def test_a_reset_forgets_the_run(api: Api) -> None:
    start(api, starting_step=5)
    post(api, group(1), group(2), group(3))
    batch(api)
    answer = api.get("/reset_data")
    assert (answer.status, answer.body) == (200, b"Reset successful")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert api.get("/status").json == {"current_step": 0, "queue_size": 0}
    assert api.get("/info").json["batch_size"] == -1
    assert api.get("/wandb_info").json == {"group": None, "project": None}
    start(api)
    assert batch(api) is None


def test_a_reset_twice_is_a_reset(api: Api) -> None:
    assert api.get("/reset_data").status == 200
    assert api.get("/reset_data").status == 200


@pytest.mark.differs("theirs fails")
def test_a_batch_after_a_reset(api: Api) -> None:
    start(api)
    api.get("/reset_data")
    answer = api.get("/batch")
    assert answer.status == api.either(theirs=500, ours=200)
    if api.side == "ours":
        assert answer.json["status"] == "error"
        assert answer.json["batch"] == []
