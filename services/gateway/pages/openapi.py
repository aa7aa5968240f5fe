"""Description of the gateway's endpoints in OpenAPI 3.1, made from the structs that it decodes and encodes. Pure."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, Final

import msgspec

from rolloutmq.services.gateway import atropos_replies as replies
from rolloutmq.services.gateway.atropos_wire import EnvIdentifier, RegisterEnv, Registration, ScoredData

TRAINER, ENVIRONMENT, OPERATION = "trainer", "environment", "operation"
JSON: Final = "application/json"
TEXT: Final = "text/plain"
SCHEMAS: Final = "#/components/schemas/{name}"
AWAY: Final = {503: "The broker was away for `gateway.post_wait_s`: ask again."}
BROWSER: Final = {403: "A browser sent it: send a POST instead."}
INVALID: Final = {422: "Invalid body; the reply names the field."}
TOO_LARGE: Final = {413: "The body or a group exceeds a limit."}
NO_ROOM: Final = {503: "The broker had no room for `gateway.post_wait_s`: send the same bytes again."}
EXAMPLE_GROUP: Final = {
    "tokens": [[1, 5, 6], [1, 7, 8]],
    "masks": [[-100, 5, 6], [-100, 7, 8]],
    "scores": [0.0, 1.0],
    "inference_logprobs": [[1.0, -0.7, -0.2], [1.0, -0.1, -1.3]],
}


class Problem(msgspec.Struct, frozen=True):
    """One error of a body."""

    type: str
    loc: list[str | int]
    msg: str


class Invalid(msgspec.Struct, frozen=True):
    """The errors of a body."""

    detail: list[Problem]


class Refusal(msgspec.Struct, frozen=True):
    """The reason of a refusal."""

    detail: str


@dataclass(frozen=True)
class Endpoint:
    """One operation.

    Attributes:
        body: Struct of the request's body.
        replies: Structs of a reply with status 200; for `TEXT`, none.
        refusals: Other statuses with their meaning.
        example: A body that is accepted.
        env_in_query: The number of the environment may stand in the address.
        discards: The operation discards the queue, or may.
    """

    method: str
    path: str
    audience: str
    summary: str
    body: Any = None
    replies: tuple[Any, ...] = ()
    refusals: Mapping[int, str] = field(default_factory=dict)
    example: Any = None
    env_in_query: bool = False
    discards: bool = False


ENDPOINTS: Final = (
    Endpoint(
        "POST", "/register", TRAINER,
        "Starts a trainer's run. With the settings of the present run it resumes; with others the queue is discarded.",
        Registration, (replies.TrainerRegistered,), INVALID,
        {
            "wandb_group": "group", "wandb_project": "project", "batch_size": 4, "max_token_len": 512,
            "checkpoint_dir": "checkpoints", "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 100,
        },
        discards=True,
    ),
    Endpoint(
        "GET", "/batch", TRAINER, "Next batch, oldest groups first, or null if there is none.",
        replies=(replies.Batch, replies.NotRegistered), refusals={403: "A browser sent it: a program takes batches."},
    ),
    Endpoint(
        "POST", "/register-env", ENVIRONMENT, "Registers an environment, once the trainer has started.",
        RegisterEnv, (replies.EnvRegistered, replies.WaitForTrainer), INVALID | AWAY,
        {"max_token_length": 512, "desired_name": "maths", "weight": 1.0, "group_size": 2},
    ),
    Endpoint(
        "POST", "/disconnect-env", ENVIRONMENT, "Releases the claims of an environment.",
        EnvIdentifier, (replies.Disconnected, replies.DisconnectFailed), INVALID, {"env_id": 0},
    ),
    Endpoint(
        "GET", "/wandb_info", ENVIRONMENT, "Group and project of the run in W&B.", replies=(replies.WandbInfo,)
    ),
    Endpoint(
        "GET", "/info", ENVIRONMENT, "Batch size and longest sequence.", replies=(replies.Info,), refusals=AWAY
    ),
    Endpoint(
        "GET", "/status-env", ENVIRONMENT,
        "Pacing information of an environment. Atropos' environments send its number as the body of the GET.",
        replies=(replies.EnvStatus,), refusals={404: "No environment has this number."} | INVALID | AWAY,
        env_in_query=True,
    ),
    Endpoint(
        "POST", "/status-env", ENVIRONMENT, "The same, for clients that cannot send a body with GET.",
        EnvIdentifier, (replies.EnvStatus,), {404: "No environment has this number."} | INVALID | AWAY,
        {"env_id": 0},
    ),
    Endpoint(
        "POST", "/scored_data", ENVIRONMENT, "Sends one group. The reply comes once the broker has it.",
        ScoredData, (replies.Received,), INVALID | TOO_LARGE | NO_ROOM, EXAMPLE_GROUP,
    ),
    Endpoint(
        "POST", "/scored_data_list", ENVIRONMENT, "Sends several groups; none is accepted if one is invalid.",
        list[ScoredData], (replies.ReceivedList,), INVALID | TOO_LARGE | NO_ROOM, [EXAMPLE_GROUP],
    ),
    Endpoint("GET", "/", OPERATION, "Confirms that the server is up.", replies=(replies.Root,)),
    Endpoint(
        "GET", "/status", OPERATION, "Step and number of queued groups.", replies=(replies.Status,), refusals=AWAY
    ),
    Endpoint(
        "GET", "/latest_example", OPERATION, "Newest group; with empty lists if there is none.",
        replies=(ScoredData,),
    ),
    Endpoint(
        "GET", "/reset_data", OPERATION, "Discards the run and its queue.", refusals=AWAY | BROWSER, discards=True
    ),
    Endpoint("POST", "/reset_data", OPERATION, "The same, also for browsers.", refusals=AWAY, discards=True),
    Endpoint(
        "GET", "/global-status", OPERATION, "Pressure, environments, workers and waits in one reply.",
        replies=(dict[str, Any],),
    ),
    Endpoint("GET", "/metrics", OPERATION, "The same for Prometheus."),
    Endpoint(
        "GET", "/health", OPERATION, "Whether the broker replies.", replies=(dict[str, Any],),
        refusals={503: "It does not."},
    ),
    Endpoint("GET", "/docs", OPERATION, "A page that shows this description, and sends requests."),
    Endpoint("GET", "/openapi.json", OPERATION, "This description.", replies=(dict[str, Any],)),
)  # fmt: skip


@cache
def openapi() -> dict[str, Any]:
    """Return the description of all endpoints."""
    models = [kind for one in ENDPOINTS for kind in (one.body, *one.replies) if kind is not None]
    _, components = msgspec.json.schema_components([*models, Invalid, Refusal], ref_template=SCHEMAS)
    for schema in components.values():
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"]).partition("\n\nAttributes:")[0]
    paths: dict[str, Any] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    info = {
        "title": "RolloutMQ gateway",
        "version": version("rolloutmq"),
        "description": "Atropos' HTTP interface on top of the bus. Bodies and replies may be compressed with gzip.",
    }
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _operation(one: Endpoint) -> dict[str, Any]:
    answers = {200: _reply(one.replies)} | {
        status: {"description": text} | _content(Invalid if status == 422 else Refusal)
        for status, text in one.refusals.items()
    }
    operation: dict[str, Any] = {
        "summary": one.summary,
        "tags": [one.audience],
        "responses": {str(status): answer for status, answer in answers.items()},
    }
    if one.discards:
        operation["x-discards-queue"] = True
    if one.env_in_query:
        number = {"name": "env_id", "in": "query", "required": True, "schema": {"type": "integer"}}
        operation["parameters"] = [number]
    if one.body is not None:
        body = _content(one.body)
        body["content"][JSON]["example"] = one.example
        operation["requestBody"] = {"required": True} | body
    return operation


def _reply(kinds: tuple[Any, ...]) -> dict[str, Any]:
    texts = [inspect.cleandoc(kind.__doc__).partition("\n")[0] for kind in kinds if _is_struct(kind)]
    described = {"description": " Or: ".join(texts) or "Done."}
    return described | (_content(*kinds) if kinds else {"content": {TEXT: {"schema": {"type": "string"}}}})


def _content(*kinds: Any) -> dict[str, Any]:
    schemas = [_schema(kind) for kind in kinds]
    return {"content": {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas}}}}


def _schema(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=SCHEMAS)
    return schema


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
