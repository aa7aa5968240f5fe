"""Groups are posted: what is taken, what is refused, and what is left of it."""

import gzip
import json
from typing import Any

import pytest
from tests.services.gateway.atropos.bodies import (
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
from tests.services.gateway.atropos.servers import Api

GZIP = {"Content-Encoding": "gzip"}
BODY = json.dumps(group(1)).encode()


def kept(api: Api, one: dict[str, Any]) -> Any:
    """Post a group of two sequences beside another; return what the trainer gets of it."""
    start(api)
    post(api, one, group(99))
    found: Any = batch(api)[0]
    return found


def test_a_group_is_received(api: Api) -> None:
    start(api)
    answer = api.post("/scored_data", group())
    assert (answer.status, answer.json) == (200, {"status": "received"})


def test_a_list_is_received_and_counted(api: Api) -> None:
    start(api)
    answer = api.post("/scored_data_list", [group(1), group(2), group(3)])
    assert (answer.status, answer.json) == (200, {"status": "received", "groups_processed": 3})
    assert api.get("/status").json["queue_size"] == 3


def test_an_empty_list_is_received(api: Api) -> None:
    start(api)
    answer = api.post("/scored_data_list", [])
    assert (answer.status, answer.json) == (200, {"status": "received", "groups_processed": 0})


def test_groups_of_a_list_stay_in_order(api: Api) -> None:
    start(api, batch_size=6)
    api.post("/scored_data_list", [group(1), group(2), group(3)])
    assert numbers(batch(api)) == [1, 2, 3]


def test_a_list_is_taken_whole_or_not_at_all(api: Api) -> None:
    start(api)
    bad = {**group(2), "scores": ["many", "more"]}
    assert api.post("/scored_data_list", [group(1), bad, group(3)]).status == 422
    assert api.get("/status").json["queue_size"] == 0


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_one_is_not_a_list_and_a_list_is_not_one(api: Api, path: str) -> None:
    start(api)
    one, several = group(), [group()]
    assert api.post(path, one if path.endswith("list") else several).status == 422


@pytest.mark.parametrize("field", REQUIRED)
def test_three_fields_are_required(api: Api, field: str) -> None:
    start(api)
    rest = {name: value for name, value in group().items() if name != field}
    for body in (rest, {**rest, field: None}):
        answer = api.post("/scored_data", body)
        assert answer.status == 422
        assert answer.json["detail"][0]["loc"] == ["body", field]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", [1, 2]),
        ("tokens", [["a"], ["b"]]),
        ("tokens", [[1.5], [2.5]]),
        ("masks", [[None], [None]]),
        ("scores", [[1.0], [2.0]]),
        ("scores", 1.0),
        ("advantages", [1.0, 2.0]),
        ("inference_logprobs", [["x"], ["y"]]),
        ("overrides", {}),
        ("overrides", [1, 2]),
        ("group_overrides", [1]),
        ("generation_params", "hot"),
        ("distill_token_ids", [[1], [2]]),
        ("env_id", "first"),
    ],
)
def test_fields_are_of_their_types(api: Api, field: str, value: object) -> None:
    start(api)
    answer = api.post("/scored_data", {**group(), field: value})
    assert answer.status == 422
    assert answer.json["detail"][0]["loc"][:2] == ["body", field]


@pytest.mark.parametrize("field", OPTIONAL)
def test_what_is_null_or_absent_is_answered_as_null(api: Api, field: str) -> None:
    assert kept(api, {**group(), field: None})[field] is None
    assert kept(api, group())[field] is None


@pytest.mark.parametrize("field", [name for name in OPTIONAL if name not in {"env_id"}])
def test_what_is_empty_is_answered_as_empty(api: Api, field: str) -> None:
    """As the environments do that use the default `collect_trajectories`."""
    empty: object = {} if field in {"generation_params", "group_overrides"} else []
    assert kept(api, {**group(), field: empty})[field] == empty


def test_other_fields_are_dropped(api: Api) -> None:
    assert kept(api, {**group(), "policy_version": 7, "x": None}).keys() == {*REQUIRED, *OPTIONAL}


def test_data_may_be_of_nobody(api: Api) -> None:
    assert kept(api, group(5))["tokens"][0][0] == 5


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": "user"}, {}])
def test_messages_have_a_role_and_content(api: Api, message: dict[str, str]) -> None:
    start(api)
    whole = {"role": "user", "content": "whole"}
    answer = api.post("/scored_data", group(messages=[[whole], [whole, message]]))
    assert answer.status == 422
    assert answer.json["detail"][0]["loc"][:2] == ["body", "messages"]


def test_messages_have_whatever_else_there_is(api: Api) -> None:
    odd = [
        {"role": "anything", "content": None, "reward": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]},
    ]
    assert kept(api, group(messages=[odd, []]))["messages"] == [odd, []]


@pytest.mark.differs(
    "theirs sets groups of another size than registered aside until some add up; ours takes any size"
)
def test_a_group_of_another_size_than_registered(api: Api) -> None:
    start(api)
    env_id = join(api, group_size=4)["env_id"]
    answer = api.post("/scored_data", group(1, size=2, env_id=env_id))
    assert answer.json == api.either(
        theirs={"status": "buffered", "buffer_size": 2}, ours={"status": "received"}
    )
    listed = api.post("/scored_data_list", [group(2, size=1, env_id=env_id)])
    assert listed.json == {
        "status": "received",
        "groups_processed": 1,
        **api.either(theirs={"buffered": 1, "last_buffer_size": 3}, ours={}),
    }
    assert api.get("/status").json["queue_size"] == api.either(theirs=0, ours=2)


@pytest.mark.differs("what cannot be of anybody is refused")
def test_a_group_of_an_unknown_environment(api: Api) -> None:
    start(api)
    answer = api.post("/scored_data", group(env_id=10_000))
    assert answer.status == api.either(theirs=200, ours=422)


@pytest.mark.differs("lengths that contradict each other are refused, for a trainer would stop at them")
@pytest.mark.parametrize(
    "fields",
    [
        {"scores": [1.0]},
        {"masks": [[1, 2, 3]]},
        {"masks": [[1], [2]]},
        {"inference_logprobs": [[0.0], [0.0]]},
        {"overrides": [{}]},
    ],
)
def test_contradicting_lengths(api: Api, fields: dict[str, Any]) -> None:
    start(api)
    answer = api.post("/scored_data", group(**fields))
    assert answer.status == api.either(theirs=200, ours=422)
    if api.side == "ours":
        # The scores count the sequences: where they differ from the tokens either may be blamed.
        assert answer.json["detail"][0]["loc"] in [["body", next(iter(fields))], ["body", "tokens"]]


@pytest.mark.differs("theirs loses a whole batch to one score that is not finite")
@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity"])
def test_a_score_that_is_not_finite(api: Api, score: str) -> None:
    start(api)
    body = BODY.replace(b"0.5", score.encode(), 1)
    answer = api.ask("POST", "/scored_data", body)
    assert answer.status == api.either(theirs=200, ours=422)
    post(api, group(2), *([group(3)] if api.side == "ours" else []))
    fetched = api.get("/batch")
    assert fetched.status == api.either(theirs=500, ours=200)
    assert api.side == "theirs" or numbers(fetched.json["batch"]) == [2, 3]


@pytest.mark.differs(
    "theirs keeps what comes early, and then takes no trainer until it is reset; ours keeps it for one"
)
def test_a_group_comes_before_the_trainer(api: Api) -> None:
    post(api, group(1), group(2))
    register(api, batch_size=4)
    found = api.get("/batch").json["batch"]
    assert numbers(found or []) == api.either(theirs=[], ours=[1, 2])


def test_a_body_may_be_gzip(api: Api) -> None:
    start(api)
    for level in (1, 9):
        assert api.ask("POST", "/scored_data", gzip.compress(BODY, level), GZIP).json == {
            "status": "received"
        }
    several = gzip.compress(json.dumps([group(2)]).encode())
    assert api.ask("POST", "/scored_data_list", several, {"Content-Encoding": "GZIP"}).status == 200
    assert api.get("/status").json["queue_size"] == 3


@pytest.mark.parametrize("body", [b"this is no gzip", BODY])
def test_what_says_gzip_and_is_not_is_refused(api: Api, body: bytes) -> None:
    start(api)
    answer = api.ask("POST", "/scored_data", body, GZIP)
    assert (answer.status, answer.body) == (400, b"Invalid gzip payload")
    assert answer.headers["Content-Type"].startswith("text/plain")


@pytest.mark.differs("theirs takes a body that was cut off for a fault of its own")
def test_gzip_that_was_cut_off(api: Api) -> None:
    start(api)
    answer = api.ask("POST", "/scored_data", gzip.compress(BODY)[:-12], GZIP)
    assert answer.status == api.either(theirs=500, ours=400)


@pytest.mark.differs("theirs inflates whatever it is sent")
def test_gzip_that_inflates_without_bound(api: Api) -> None:
    start(api)
    megabyte = b" " * (1 << 20)
    spaces = gzip.compress(BODY) if api.side == "theirs" else b"".join([gzip.compress(megabyte)] * 2048)
    answer = api.ask("POST", "/scored_data", spaces, GZIP)
    assert answer.status == api.either(theirs=200, ours=413)
    assert api.get("/status").status == 200
