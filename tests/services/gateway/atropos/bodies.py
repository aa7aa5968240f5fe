"""What trainers and environments of Atropos say, and how they begin."""

from typing import Any, Final

from tests.services.gateway.atropos.servers import Api

REGISTRATION: Final[dict[str, Any]] = {
    "wandb_group": "a group",
    "wandb_project": "a project",
    "batch_size": 4,
    "max_token_len": 512,
    "checkpoint_dir": "/somewhere/else",
    "save_checkpoint_interval": 7,
    "starting_step": 0,
    "num_steps": 1000,
}
ENVIRONMENT: Final[dict[str, Any]] = {
    "max_token_length": 512,
    "desired_name": "env",
    "weight": 1.0,
    "group_size": 2,
    "min_batch_allocation": None,
}
REQUIRED: Final = ("tokens", "masks", "scores")
OPTIONAL: Final = (
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
)
"""All fields of a group, in the order in which the answers have them."""
NO_LABEL: Final = -100


def group(number: int = 0, size: int = 2, **fields: Any) -> dict[str, Any]:
    """Return a small group; `number` is its first token."""
    return {
        "tokens": [[number, 10 + row, 20] for row in range(size)],
        "masks": [[NO_LABEL, 10 + row, 20] for row in range(size)],
        "scores": [row + 0.5 for row in range(size)],
        **fields,
    }


def register(api: Api, **changes: Any) -> Any:
    """Be a trainer that registers."""
    answer = api.post("/register", {**REGISTRATION, **changes})
    assert answer.status == 200, answer.body
    return answer.json


def start(api: Api, **changes: Any) -> None:
    """Be a trainer that registers, and asks for its first batch before there is anything."""
    register(api, **changes)
    assert api.get("/batch").json == {"batch": None}


def join(api: Api, **changes: Any) -> Any:
    """Be an environment that registers with a trainer that has started."""
    answer = api.post("/register-env", {**ENVIRONMENT, **changes})
    assert answer.json["status"] == "success", answer.body
    return answer.json


def post(api: Api, *groups: dict[str, Any]) -> None:
    """Post groups, one after the other."""
    for one in groups:
        answer = api.post("/scored_data", one)
        assert answer.status == 200, answer.body


def batch(api: Api) -> Any:
    """Return the next batch; None if there is none."""
    answer = api.get("/batch")
    assert answer.status == 200, answer.body
    return answer.json["batch"]


def numbers(groups: list[dict[str, Any]]) -> list[int]:
    """Return which groups these are."""
    return [one["tokens"][0][0] for one in groups]
