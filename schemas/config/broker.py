"""`[broker]`: the queue, its journal and its limits."""

from typing import Annotated, Final, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolloutmq.schemas.config.base import MIB, Section
from rolloutmq.schemas.network.address import problem_of_listen
from rolloutmq.schemas.wire.replies import Durability

SEQUENCE_BYTES: Final = 13
"""Bytes of the shortest sequence: one token, its mask and its score. Every batch is at least that large."""

TOKEN_BYTES: Final = 5
"""Bytes of one further token and its mask."""


class BrokerConfig(Section):
    """`[broker]`: the queue, its journal and its limits."""

    listen: str = ""
    """Address for clients of other hosts, such as `tcp://0.0.0.0:7760`: they need a key. The broker binds this port and
    the next three; with port 0 the system chooses. Clients of this host use unix sockets in a private directory, with
    or without it."""
    keys: str = ""
    """Directory of `rolloutmq keys init`, relative to the configuration, with the keys that may enter by `listen`."""
    insecure: bool = False
    """Open `listen` to everybody in reach of it, without keys and without encryption."""
    durability: Durability = Durability.DISK
    """What an ack survives. `disk`: a power cut; `os`: a killed broker; `memory`: neither."""
    commit_ms: NonNegativeFloat = 10.0
    """Longest time to gather acks for one write to disk, in milliseconds. Batches and settlements do not wait for
    it."""
    segment_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 256 * MIB
    """Size of a journal segment. The broker deletes a segment once it needs none of its groups."""
    shared_memory: bool = True
    """Producers on this host put groups into shared memory that broker and trainers read. Off: they send them through
    the sockets."""
    ram_bytes: PositiveInt = 256 * MIB
    """Groups kept in memory. The broker reads the others from the journal when a batch needs them. At durability
    `memory` all groups stay in memory."""
    history_bytes: PositiveInt = 1024 * MIB
    """Old event logs kept for `explain` and `ledger verify`. Above it the broker deletes the oldest."""
    dead_bytes: PositiveInt = 256 * MIB
    """Contents of dead letters kept on disk. Above it only the record of a dead letter stays."""
    replay: bool = False
    """Keep every segment, so the run can be replayed."""
    high_bytes: PositiveInt = 256 * MIB
    """High-water mark of all environments: queued, leased and granted bytes stay below it."""
    high_groups: PositiveInt = 100_000
    """High-water mark in groups. Above it the broker stops reading from producers."""
    max_group_bytes: PositiveInt = 64 * MIB
    """Largest accepted group."""
    overhead_bytes: Annotated[int, Field(ge=64 * MIB)] = 512 * MIB
    """Memory limit of the broker beyond its groups, on top of `high_bytes`. Above it the broker drops connections,
    those of other hosts first: unfinished messages of some peer fill its memory. Correct peers reconnect and lose
    nothing."""
    retain_bytes: PositiveInt = 256 * MIB
    """Trained groups kept for a trainer that resumes from a checkpoint. Above it the broker asks for a checkpoint."""
    ack_interval_s: PositiveFloat = 0.25
    """Time after which an ack is repeated, once and on while its producer waits: a published ack may get lost."""
    pressure_interval_s: PositiveFloat = 0.25
    """Time between two `pressure` messages."""
    lease_s: PositiveFloat = 120.0
    """The broker redelivers a batch whose trainer makes no progress for this long."""
    silence_s: PositiveFloat = 10.0
    """The broker treats a trainer or worker as dead after this time without a heartbeat."""
    max_deliveries: PositiveInt = 3
    """A group becomes a dead letter when this many of its leases have failed."""
    max_tasks: PositiveInt = 10_000
    """Most submitted tasks that are open at once. Above it the broker refuses a submission with a time to retry."""
    task_bytes: PositiveInt = 64 * MIB
    """Most payload bytes of all open tasks."""
    remembered_groups: NonNegativeInt = 100_000
    """Number of ended groups that the broker recognizes if they are sent again. It forgets the oldest first."""
    remembered_tasks: PositiveInt = 10_000
    """Number of finished tasks whose status the broker keeps. It forgets the oldest first."""
    exact_wait_s: NonNegativeFloat = 5.0
    """Longest wait for whole groups with the exact size of a batch. After it the broker delivers the largest smaller
    batch. Also the longest wait for an environment that cannot meet its minimum share; later batches make up for it."""
    silent_env_s: PositiveFloat = 30.0
    """An environment without deliveries for this long is left out when rollouts are divided, and no batch waits for its
    minimum share."""

    @model_validator(mode="after")
    def _listen_with_keys(self) -> Self:
        if problem := problem_of_listen(self.listen, self.keys, insecure=self.insecure):
            raise ValueError(problem)
        return self
