"""Latency of the hops of groups and of calls: each process publishes the histograms of what it measured since its last
sample. Histograms of all processes have the same buckets, so their sums are exact.

The broker tells the hops of the groups, by environment and split; beyond a number of them in a sample, one of several
stands for all. A worker tells its own rollouts once more: add up
those of the broker, or those of the workers, and not both.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from rolloutmq.schemas.statistics.histogram import Histogram
from rolloutmq.schemas.wire.envelope import Count, Message, Seconds, Split

BROKER = "broker"
"""Name of the broker in its samples: it measures the hops of the groups."""
ROWS_LIMIT = 256
"""Most rows of a sample; more of them share one row of their hop without names, and count in `dropped_rows`."""


class Hop(StrEnum):
    """One part of the way of a group, in the order of the way, or a call."""

    ROLLOUT = "rollout"
    """Begin to end of the rollout, by the clock of its worker; told by the broker and by the worker."""
    CALL = "call"
    """A call of a worker to an inference server."""
    SEND = "send"
    """End of the rollout to acceptance by the broker: ratings, spool, shared memory or socket."""
    QUEUE = "queue"
    """Acceptance to the first time that a trainer was handed the group."""
    TRAIN = "train"
    """Handed out to settled: the wait in the trainer, its step, and the settlement."""
    COMMIT = "commit"
    """Settled to covered by a checkpoint."""
    HTTP = "http"
    """A request to an HTTP server of the run: gateway or inference."""

    @property
    def has_status(self) -> bool:
        """Whether its rows have the class of a status."""
        return self in {Hop.CALL, Hop.HTTP}


class LatencyRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Durations of one hop of one environment, route or engine."""

    hop: Hop
    """Part of the way, or call."""
    durations: Histogram
    """Durations since the sample before."""
    env: Annotated[str, Meta(max_length=256)] = ""
    split: Split = Split.TRAIN
    route: Annotated[str, Meta(max_length=256)] = ""
    """Of `http`: the route as declared, not the path as sent; `other` for a path without a route. Of `call`: the
    path."""
    status: Annotated[str, Meta(max_length=3)] = ""
    """Of `http` and `call`: class of the status, such as `2xx`; empty if no answer came or the client left."""
    engine: Annotated[str, Meta(max_length=256)] = ""
    """Of `call`: name of the inference server."""
    tokens: Count = 0
    """Tokens of the groups, or tokens that the calls sampled."""
    slowest_s: Seconds = 0.0
    """Longest duration."""
    slowest_id: Annotated[str, Meta(max_length=512)] = ""
    """Id of the group with the longest duration, for `rolloutmq explain`; empty for a call or a request."""
    clock_error_s: Seconds = 0.0
    """Bound of the error between the two clocks of the hop; 0 on one host."""


class LatencySample(Message, tag="latency_sample", frozen=True, kw_only=True):
    """What one process measured; published on `telemetry.latency.NAME`."""

    name: str
    """Process, as in `process_sample`: `broker`, a worker, an engine, `teacher`, `gateway`."""
    number: Count
    at: Seconds
    since_s: Seconds
    """Seconds covered: since the sample before. 0 for a further part of the same sample, whose rows are too large for
    one message."""
    host: str = ""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of the process."""
    rows: Annotated[tuple[LatencyRow, ...], Meta(max_length=ROWS_LIMIT)] = ()
    """A hop of an environment, route or engine each."""
    dropped_rows: Count = 0
    """Environments, routes and engines beyond the limit that have no row of their own."""
