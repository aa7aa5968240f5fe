"""What a server answers before any trainer has registered, and to what it does not know."""

import pytest
from tests.services.gateway.atropos.bodies import ENVIRONMENT
from tests.services.gateway.atropos.servers import Api


def test_the_root_says_what_it_is(new: Api) -> None:
    answer = new.get("/")
    assert (answer.status, answer.json) == (200, {"message": "AtroposLib API"})
    assert answer.headers["Content-Type"] == "application/json"


def test_the_sizes_are_minus_one(new: Api) -> None:
    assert new.get("/info").json == {"batch_size": -1, "max_token_len": -1}


def test_there_is_no_project(new: Api) -> None:
    assert new.get("/wandb_info").json == {"group": None, "project": None}


def test_nothing_is_queued_and_no_step_done(new: Api) -> None:
    assert new.get("/status").json == {"current_step": 0, "queue_size": 0}


def test_a_batch_is_refused_with_status_200(new: Api) -> None:
    answer = new.get("/batch")
    assert answer.status == 200
    assert answer.json == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }


def test_an_environment_is_told_to_wait(new: Api) -> None:
    answer = new.post("/register-env", ENVIRONMENT)
    assert (answer.status, answer.json) == (200, {"status": "wait for trainer to start"})


def test_nobody_can_leave(new: Api) -> None:
    answer = new.post("/disconnect-env", {"env_id": 0})
    assert answer.status == 200
    assert answer.json.keys() == {"status", "error"}
    assert answer.json["status"] == "failure"


def test_the_latest_example_is_nine_empty_lists(new: Api) -> None:
    assert new.get("/latest_example").json == {
        "tokens": [],
        "masks": [],
        "scores": [],
        "advantages": [],
        "ref_logprobs": [],
        "generation_params": [],
        "inference_logprobs": [],
        "messages": [],
        "images": [],
    }


@pytest.mark.differs(
    "an unknown environment is no fault of the server: its clients try a 500 again, a 404 is final"
)
def test_the_status_of_nobody(new: Api) -> None:
    assert new.get("/status-env", env_id=0).status == new.either(theirs=500, ours=404)


def test_unknown_paths_are_not_found(new: Api) -> None:
    answer = new.get("/no-such-path")
    assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/register"), ("POST", "/batch"), ("GET", "/scored_data")]
)
def test_other_methods_are_not_allowed(new: Api, method: str, path: str) -> None:
    answer = new.ask(method, path)
    assert (answer.status, answer.json) == (405, {"detail": "Method Not Allowed"})


def test_the_interface_is_described(new: Api) -> None:
    answer = new.get("/openapi.json")
    assert answer.status == 200
    assert answer.json["paths"].keys() >= {
        *("/", "/register", "/register-env", "/disconnect-env", "/wandb_info", "/info", "/batch"),
        *("/latest_example", "/scored_data", "/scored_data_list", "/status", "/status-env", "/reset_data"),
    }
    assert new.get("/docs").status == 200
