"""How far the trainer is and how much is queued: what environments pace themselves by."""

import json
from typing import Any

import pytest
from tests.services.gateway.atropos.bodies import batch, group, join, post, start
from tests.services.gateway.atropos.servers import Api

AIOHTTP = {
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate",
    "User-Agent": "Python/3.11 aiohttp/3.14.5",
    "Content-Type": "application/json",
}
REQUESTS = {
    "User-Agent": "python-requests/2.34.2",
    "Accept-Encoding": "gzip, deflate",
    "Accept": "*/*",
    "Connection": "keep-alive",
    "Content-Type": "application/json",
}


def standing(api: Api, env_id: int) -> Any:
    """Ask as environments do, ten times a second."""
    answer = api.get("/status-env", env_id=env_id)
    assert answer.status == 200, answer.body
    return answer.json


def test_the_step_begins_where_the_trainer_does(api: Api) -> None:
    start(api, starting_step=41)
    assert api.get("/status").json == {"current_step": 41, "queue_size": 0}


def test_what_is_queued_is_counted_in_groups(api: Api) -> None:
    start(api, batch_size=100)
    post(api, group(1, size=2), group(2, size=4), group(3, size=2))
    assert api.get("/status").json == {"current_step": 0, "queue_size": 3}


def test_a_batch_is_a_step(api: Api) -> None:
    start(api)
    post(api, group(1), group(2), group(3))
    batch(api)
    assert api.get("/status").json == {"current_step": 1, "queue_size": 1}


@pytest.mark.differs("theirs counts what it has set aside as trained, and no longer as queued")
def test_more_than_one_batch_is_queued(api: Api) -> None:
    start(api)
    env_id = join(api)["env_id"]
    post(api, *(group(number, env_id=env_id) for number in range(6)))
    batch(api)
    expected = api.either(theirs=(3, 0), ours=(1, 4))
    told = api.get("/status").json
    assert (told["current_step"], told["queue_size"]) == expected
    told = standing(api, env_id)
    assert (told["current_step"], told["queue_size"]) == expected


@pytest.mark.parametrize("headers", [AIOHTTP, REQUESTS], ids=["aiohttp", "requests"])
def test_an_environment_names_itself_in_the_body_of_a_get(api: Api, headers: dict[str, str]) -> None:
    start(api)
    body = json.dumps({"env_id": join(api)["env_id"]}).encode()
    answer = api.ask("GET", "/status-env", body, headers)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == {
        "current_step": 0,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 1.0,
    }


def test_numbers_of_the_status_are_of_their_types(api: Api) -> None:
    start(api)
    told = standing(api, join(api)["env_id"])
    whole = ("current_step", "queue_size", "self_queue_size", "max_group_size")
    assert {name: type(value) for name, value in told.items()} == {
        **dict.fromkeys(whole, int),
        **dict.fromkeys(("unallocated_fraction", "env_weight"), float),
    }


@pytest.mark.differs("proxies drop the body of a GET, so ours also reads the number from the address")
def test_an_environment_names_itself_in_the_address(api: Api) -> None:
    start(api)
    answer = api.get(f"/status-env?env_id={join(api)['env_id']}")
    assert answer.status == api.either(theirs=422, ours=200)
    assert ("env_weight" in answer.json) == (api.side == "ours")


@pytest.mark.differs("proxies drop the body of a GET, so ours also takes it in a POST")
def test_an_environment_names_itself_in_the_body_of_a_post(api: Api) -> None:
    start(api)
    env_id = join(api)["env_id"]
    answer = api.post("/status-env", {"env_id": env_id})
    assert answer.status == api.either(theirs=405, ours=200)
    if api.side == "ours":
        assert answer.json == standing(api, env_id)
        assert api.post("/status-env", {}).status == 422
        assert api.post("/status-env", {"env_id": 10_000}).status == 404


@pytest.mark.parametrize("body", [{}, {"env_id": None}, {"env_id": "x"}, {"other": 1}])
def test_an_environment_that_does_not_name_itself_is_refused(api: Api, body: dict[str, object]) -> None:
    start(api)
    assert api.ask("GET", "/status-env", json.dumps(body).encode()).status == 422
    assert api.get("/status-env").status == 422


@pytest.mark.differs(
    "an unknown environment is no fault of the server: its clients try a 500 again, a 404 is final"
)
def test_the_status_of_an_unknown_environment(api: Api) -> None:
    start(api)
    answer = api.get("/status-env", env_id=10_000)
    assert answer.status == api.either(theirs=500, ours=404)


def test_weights_go_by_length_and_weight(api: Api) -> None:
    start(api)
    first = join(api, max_token_length=100, weight=3.0)["env_id"]
    second = join(api, max_token_length=400, weight=1.0)["env_id"]
    assert standing(api, first)["env_weight"] == 300 / 700
    assert standing(api, second)["env_weight"] == 400 / 700


def test_no_weight_is_below_a_hundredth(api: Api) -> None:
    start(api)
    light = join(api, weight=0.0001)["env_id"]
    join(api, weight=1000.0)
    assert standing(api, light)["env_weight"] == 0.01


def test_a_negative_weight_weighs_nothing(api: Api) -> None:
    start(api)
    odd, even = join(api, weight=-1.0)["env_id"], join(api, weight=1.0)["env_id"]
    assert standing(api, odd)["env_weight"] == 0.01
    assert standing(api, even)["env_weight"] == 1.0


@pytest.mark.differs("theirs divides by nothing")
def test_nobody_weighs_anything(api: Api) -> None:
    start(api)
    answer = api.get("/status-env", env_id=join(api, weight=0.0)["env_id"])
    assert answer.status == api.either(theirs=500, ours=200)
    if api.side == "ours":
        assert answer.json["env_weight"] == 0.01


@pytest.mark.parametrize(
    ("shares", "free"), [((None, None), 1.0), ((0.25, None), 0.75), ((0.25, 0.5), 0.25), ((0.75, 0.75), 0.0)]
)
def test_what_is_free_is_what_nobody_claims(api: Api, shares: tuple[float | None, ...], free: float) -> None:
    start(api)
    for share in shares:
        env_id = join(api, min_batch_allocation=share)["env_id"]
    assert standing(api, env_id)["unallocated_fraction"] == free


def test_the_queue_is_told_in_groups_of_ones_own_size(api: Api) -> None:
    start(api, batch_size=100)
    small = join(api, desired_name="small", group_size=2)["env_id"]
    large = join(api, desired_name="large", group_size=4)["env_id"]
    post(api, *(group(number, size=2, env_id=small) for number in range(3)))
    post(api, *(group(number, size=4, env_id=large) for number in range(2)))
    # Beside one's own, what others have is counted in whole groups of the largest size: 6 sequences are 2 of 4.
    first, second = standing(api, small), standing(api, large)
    assert (first["queue_size"], first["self_queue_size"], first["max_group_size"]) == (7, 3, 4)
    assert (second["queue_size"], second["self_queue_size"], second["max_group_size"]) == (4, 2, 4)


def test_what_others_are_promised_is_not_counted(api: Api) -> None:
    start(api, batch_size=8)
    first = join(api, desired_name="first")["env_id"]
    second = join(api, desired_name="second", min_batch_allocation=0.25)["env_id"]
    post(api, *(group(number, size=2, env_id=second) for number in range(2)))
    assert standing(api, first)["queue_size"] == 1
    assert standing(api, first)["self_queue_size"] == 0
    assert standing(api, second)["self_queue_size"] == 2


@pytest.mark.differs("theirs does not count others at all while every group has one sequence")
def test_groups_of_one_sequence_of_others(api: Api) -> None:
    start(api, batch_size=100)
    first = join(api, desired_name="first", group_size=1)["env_id"]
    second = join(api, desired_name="second", group_size=1)["env_id"]
    post(api, *(group(number, size=1, env_id=second) for number in range(3)))
    assert standing(api, first)["queue_size"] == api.either(theirs=0, ours=3)
