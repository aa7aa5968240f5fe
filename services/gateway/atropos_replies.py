"""Replies of Atropos' HTTP interface. Pure.

Names, types and order are those of its server (atroposlib 0.4.0). Each endpoint encodes one of these structs, and
`/openapi.json` describes the same structs.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from rolloutmq.services.gateway.atropos_wire import ScoredData

UNKNOWN: Final = -1
"""Value of an unknown number."""


class Root(Struct, frozen=True, kw_only=True):
    """The server is up."""

    message: str = "AtroposLib API"


class TrainerRegistered(Struct, frozen=True, kw_only=True):
    """The trainer is registered."""

    uuid: Annotated[int, Meta(description="Number of 128 bits, another one for each registration.")]


class EnvRegistered(Struct, frozen=True, kw_only=True):
    """The environment is registered."""

    status: Literal["success"] = "success"
    env_id: Annotated[int, Meta(description="Number of the environment in its later requests.")]
    wandb_name: Annotated[str, Meta(description="The desired name with a number.")]
    checkpoint_dir: str
    starting_step: Annotated[int, Meta(description="Step of the trainer now.")]
    checkpoint_interval: Annotated[int, Meta(description="Steps between checkpoints; -1 if unknown.")]
    num_steps: Annotated[int, Meta(description="Steps of the run; -1 if unknown.")]


class WaitForTrainer(Struct, frozen=True, kw_only=True):
    """No trainer has started: ask again."""

    status: Literal["wait for trainer to start"] = "wait for trainer to start"


class Disconnected(Struct, frozen=True, kw_only=True):
    """The environment counts as gone until its next request."""

    status: Literal["success"] = "success"


class DisconnectFailed(Struct, frozen=True, kw_only=True):
    """No environment has this number."""

    status: Literal["failure"] = "failure"
    error: str


class WandbInfo(Struct, frozen=True, kw_only=True):
    """Where W&B collects the run; `project` is null while it is unknown."""

    group: str | None = None
    project: str | None = None


class Info(Struct, frozen=True, kw_only=True):
    """Sizes of the run; -1 before a trainer has registered."""

    batch_size: Annotated[int, Meta(description="Sequences of a batch.")] = UNKNOWN
    max_token_len: Annotated[int, Meta(description="Longest sequence in tokens; -1 is no limit.")] = UNKNOWN


class Status(Struct, frozen=True, kw_only=True):
    """Step and queue."""

    current_step: Annotated[int, Meta(description="Batches handed out, counted from the starting step.")]
    queue_size: Annotated[int, Meta(description="Queued groups.")]


class EnvStatus(Struct, frozen=True, kw_only=True):
    """Pacing information of one environment; sizes of queues are in groups of its own size."""

    current_step: Annotated[int, Meta(description="Batches handed out, counted from the starting step.")]
    queue_size: Annotated[
        int, Meta(description="Own groups, and those of others beyond their minimum share.")
    ]
    unallocated_fraction: Annotated[float, Meta(description="Part of a batch without a minimum share.")]
    self_queue_size: Annotated[int, Meta(description="Own groups.")]
    max_group_size: Annotated[int, Meta(description="Sequences of the largest group size in the queue.")]
    env_weight: Annotated[float, Meta(description="Own part of all weights, at least 0.01.")]


class Received(Struct, frozen=True, kw_only=True):
    """The broker has the group."""

    status: Literal["received"] = "received"


class ReceivedList(Struct, frozen=True, kw_only=True):
    """The broker has the groups."""

    status: Literal["received"] = "received"
    groups_processed: int


class Batch(Struct, frozen=True, kw_only=True):
    """The next batch, or null if there is none now."""

    batch: list[ScoredData] | None = None


class NotRegistered(Struct, frozen=True, kw_only=True):
    """No trainer has registered here."""

    status: Literal["error"] = "error"
    message: str = "Trainer not registered. Call /register first."
    batch: list[ScoredData] = []
