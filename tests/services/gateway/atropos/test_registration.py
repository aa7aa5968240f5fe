"""Trainers and environments register, and leave."""

from typing import Any

import pytest
from tests.services.gateway.atropos.bodies import (
    ENVIRONMENT,
    REGISTRATION,
    batch,
    group,
    join,
    numbers,
    post,
    register,
    start,
)
from tests.services.gateway.atropos.servers import Answer, Api


def blamed(answer: Answer) -> list[Any]:
    """Return the places that a refusal names."""
    assert answer.status == 422, answer.body
    problems = answer.json["detail"]
    assert all(problem.keys() >= {"loc", "msg", "type"} for problem in problems)
    return [problem["loc"] for problem in problems]


def test_a_trainer_gets_a_whole_number_of_128_bits(api: Api) -> None:
    answer = register(api)
    assert answer.keys() == {"uuid"}
    assert isinstance(answer["uuid"], int)
    assert 0 <= answer["uuid"] < 1 << 128


def test_each_registration_gets_another_number(api: Api) -> None:
    assert register(api) != register(api)


@pytest.mark.parametrize("field", REGISTRATION)
def test_a_trainer_says_all_eight(api: Api, field: str) -> None:
    rest = {name: value for name, value in REGISTRATION.items() if name != field}
    answer = api.post("/register", rest)
    assert blamed(answer) == [["body", field]]
    assert (answer.json["detail"][0]["type"], answer.json["detail"][0]["msg"]) == (
        "missing",
        "Field required",
    )


@pytest.mark.parametrize("field", REGISTRATION)
def test_none_of_the_eight_is_null(api: Api, field: str) -> None:
    assert blamed(api.post("/register", {**REGISTRATION, field: None})) == [["body", field]]


@pytest.mark.parametrize(("field", "value"), [("wandb_group", 1), ("batch_size", "many"), ("num_steps", [])])
def test_what_a_trainer_says_is_of_its_type(api: Api, field: str, value: object) -> None:
    assert blamed(api.post("/register", {**REGISTRATION, field: value})) == [["body", field]]


@pytest.mark.parametrize("path", ["/register", "/register-env", "/scored_data", "/scored_data_list"])
@pytest.mark.parametrize("body", [b"", b"{", b"[1", b"what?"])
def test_what_is_not_json_is_refused(api: Api, path: str, body: bytes) -> None:
    assert blamed(api.ask("POST", path, body))[0][0] == "body"


def test_names_may_be_empty(api: Api) -> None:
    register(api, wandb_group="", wandb_project="", checkpoint_dir="")
    assert api.get("/wandb_info").json == {"group": "", "project": ""}


def test_its_sizes_are_told(api: Api) -> None:
    register(api, batch_size=24, max_token_len=4096)
    assert api.get("/info").json == {"batch_size": 24, "max_token_len": 4096}


def test_its_project_is_told(api: Api) -> None:
    register(api, wandb_group="G", wandb_project="P")
    assert api.get("/wandb_info").json == {"group": "G", "project": "P"}


def test_registering_again_alike_changes_nothing(api: Api) -> None:
    start(api)
    post(api, group(1), group(2), group(3))
    assert numbers(batch(api)) == [1, 2]
    register(api)
    assert api.get("/status").json == {"current_step": 1, "queue_size": 1}


@pytest.mark.differs("their second trainer gets the settings and data of the first; ours begins its own run")
def test_registering_again_with_other_settings(api: Api) -> None:
    start(api)
    post(api, group(1))
    register(api, batch_size=2)
    assert api.get("/info").json["batch_size"] == api.either(theirs=4, ours=2)
    assert api.get("/status").json["queue_size"] == api.either(theirs=1, ours=0)


def test_an_environment_waits_for_the_first_batch_to_be_asked_for(api: Api) -> None:
    register(api)
    waiting = api.post("/register-env", ENVIRONMENT)
    assert (waiting.status, waiting.json) == (200, {"status": "wait for trainer to start"})
    api.get("/batch")
    assert api.post("/register-env", ENVIRONMENT).json["status"] == "success"


def test_an_environment_is_told_seven_things(api: Api) -> None:
    start(api, starting_step=3)
    answer = join(api, desired_name="this is a name")
    assert isinstance(answer.pop("env_id"), int)
    assert answer == {
        "status": "success",
        "wandb_name": "this is a name_0",
        "checkpoint_dir": "/somewhere/else",
        "starting_step": 3,
        "checkpoint_interval": 7,
        "num_steps": 1000,
    }


def test_an_environment_begins_at_the_step_of_now(api: Api) -> None:
    start(api, starting_step=3)
    post(api, group(1), group(2))
    batch(api)
    assert join(api)["starting_step"] == 4


def test_names_are_numbered_for_each_desired_one(api: Api) -> None:
    start(api)
    given = [join(api, desired_name=name)["wandb_name"] for name in ("a", "b", "a", "a_0", "a")]
    assert given == ["a_0", "b_0", "a_1", "a_0_0", "a_2"]


def test_every_environment_has_its_own_number(api: Api) -> None:
    start(api)
    given = [join(api)["env_id"] for _ in range(5)]
    assert given == list(range(given[0], given[0] + 5))


@pytest.mark.parametrize("field", ["max_token_length", "desired_name", "weight"])
def test_an_environment_says_all_three(api: Api, field: str) -> None:
    start(api)
    rest = {name: value for name, value in ENVIRONMENT.items() if name != field}
    assert blamed(api.post("/register-env", rest)) == [["body", field]]
    assert blamed(api.post("/register-env", {**rest, field: None})) == [["body", field]]


@pytest.mark.differs("older environments send three fields; ours takes the group size from their groups")
def test_an_environment_need_not_say_the_size_of_its_groups(api: Api) -> None:
    start(api, batch_size=100)
    answer = api.post("/register-env", {"max_token_length": 512, "desired_name": "old", "weight": 1.0})
    assert answer.status == api.either(theirs=422, ours=200)
    assert blamed(api.post("/register-env", {**ENVIRONMENT, "group_size": None})) == [["body", "group_size"]]
    if api.side == "ours":
        env_id = answer.json["env_id"]
        post(api, *(group(number, size=4, env_id=env_id) for number in range(3)))
        told = api.get("/status-env", env_id=env_id).json
        assert (told["queue_size"], told["self_queue_size"], told["max_group_size"]) == (3, 3, 4)


def test_a_minimum_share_need_not_be_said(api: Api) -> None:
    start(api)
    rest = {name: value for name, value in ENVIRONMENT.items() if name != "min_batch_allocation"}
    assert api.post("/register-env", rest).json["status"] == "success"


def test_an_environment_may_leave(api: Api) -> None:
    start(api)
    env_id = join(api)["env_id"]
    answer = api.post("/disconnect-env", {"env_id": env_id})
    assert (answer.status, answer.json) == (200, {"status": "success"})


def test_who_is_not_there_cannot_leave(api: Api) -> None:
    start(api)
    answer = api.post("/disconnect-env", {"env_id": 10_000})
    assert answer.status == 200
    assert answer.json["status"] == "failure"
    assert isinstance(answer.json["error"], str)


def test_who_left_has_no_weight_any_more(api: Api) -> None:
    start(api)
    first, second = join(api)["env_id"], join(api)["env_id"]
    assert api.get("/status-env", env_id=first).json["env_weight"] == 0.5
    api.post("/disconnect-env", {"env_id": second})
    assert api.get("/status-env", env_id=first).json["env_weight"] == 1.0
