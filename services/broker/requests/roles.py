"""What the holder of each role may do: a table of requests, and of topics.

A request that is not in the table is refused to every key but those of admins. Pure.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire import control, hardware, joining, requests, tasks

_WORKER: Final = frozenset({Role.WORKER})
_TRAINER: Final = frozenset({Role.TRAINER})
_READERS: Final = frozenset({Role.MONITOR})
_ALL: Final = frozenset(Role)
_NONE: Final = frozenset[Role]()


class Rule(NamedTuple):
    """One kind of request.

    Attributes:
        may: What it does, after "may not".
        roles: Roles that may send it, besides admin.
    """

    may: str
    roles: frozenset[Role]


REQUESTS: Final[Mapping[type, Rule]] = {
    requests.RegisterProducer: Rule("register a producer", _WORKER),
    requests.DeclareTables: Rule("declare tables", _WORKER),
    requests.Sync: Rule("ask for acks", _WORKER),
    requests.Goodbye: Rule("end a session", _WORKER),
    requests.RegisterConsumer: Rule("register a consumer", _TRAINER),
    requests.Pull: Rule("pull batches", _TRAINER),
    requests.Settle: Rule("settle batches", _TRAINER),
    requests.SettleGroups: Rule("settle groups", _TRAINER),
    requests.Commit: Rule("report checkpoints", _TRAINER),
    requests.Release: Rule("release batches", _TRAINER),
    requests.LogFigures: Rule("log figures", _TRAINER),
    requests.ConsumerBeat: Rule("send heartbeats of a consumer", _TRAINER),
    requests.GetInfo: Rule("ask for the run", _ALL),
    joining.GetRun: Rule("ask for the configuration", _ALL),
    joining.GetFile: Rule("ask for files of the model", _ALL),
    joining.EngineBeat: Rule("send heartbeats of an engine", frozenset({Role.ENGINE})),
    joining.RelayBeat: Rule("send heartbeats of a relay", frozenset({Role.ENGINE, Role.TRAINER})),
    joining.GetWeightsTicket: Rule("get the weights", frozenset({Role.ENGINE, Role.TRAINER})),
    tasks.SubmitTasks: Rule("submit tasks", _TRAINER),
    tasks.CancelTasks: Rule("cancel tasks", _TRAINER),
    tasks.AwaitTasks: Rule("ask for tasks", _TRAINER),
    tasks.TakeTasks: Rule("take tasks", _WORKER),
    tasks.HandBack: Rule("hand tasks back", _WORKER),
    control.WorkerBeat: Rule("send heartbeats of a worker", _WORKER),
    control.GetStatus: Rule("read the status", _READERS),
    control.LatestExample: Rule("read groups", _READERS),
    control.Drain: Rule("drain workers", _NONE),
    control.RestartWorker: Rule("restart workers", _NONE),
    control.SetWorkers: Rule("scale environments", _NONE),
    hardware.CordonGpu: Rule("cordon GPUs", _NONE),
    hardware.UncordonGpu: Rule("uncordon GPUs", _NONE),
    control.SetValues: Rule("change settings", _NONE),
    control.Disconnect: Rule("disconnect environments", _NONE),
    control.Requeue: Rule("requeue dead letters", _NONE),
    control.Reset: Rule("reset the run", _NONE),
    control.Shutdown: Rule("end the broker", _NONE),
}

_TELEMETRY: Final = topics.TELEMETRY
HEARS: Final[Mapping[Role, tuple[bytes, ...]]] = {
    Role.WORKER: (topics.ACK, topics.CONTROL, topics.PRESSURE, topics.POLICY),
    Role.TRAINER: (topics.PRESSURE, topics.POLICY, topics.STEP),
    Role.ENGINE: (topics.PRESSURE, topics.POLICY),
    Role.MONITOR: (b"",),
    Role.ADMIN: (b"",),
}
"""Prefixes of the topics that a role may subscribe to."""
TELLS: Final[Mapping[Role, tuple[bytes, ...]]] = {
    Role.WORKER: tuple(topics.telemetry(what, "") for what in ("trace", "latency", "health")),
    Role.TRAINER: (topics.POLICY, topics.STEP, _TELEMETRY),
    Role.ENGINE: (topics.telemetry("latency", ""), topics.telemetry("host", ""), topics.telemetry("gpu", "")),
    Role.MONITOR: (),
    Role.ADMIN: (b"",),
}
"""Prefixes of the topics that a role may publish."""


def refusal(name: str, role: Role, kind: type) -> str:
    """Return why a key may not send a request of this kind; empty if it may."""
    rule = REQUESTS.get(kind)
    if role is Role.ADMIN or (rule is not None and role in rule.roles):
        return ""
    roles = rule.roles if rule is not None else _NONE
    needed = " or ".join(sorted(wanted.value for wanted in roles | {Role.ADMIN} if wanted is not role))
    return f"key {name} (role {role.value}) may not {may_of(kind)}; use a key of role {needed}"


def may_of(kind: type) -> str:
    """Return what a request of this kind does, after "may not"."""
    rule = REQUESTS.get(kind)
    return rule.may if rule is not None else f"send {kind.__name__}"


def hears(role: Role, topic: bytes) -> bool:
    """Return whether a role may subscribe to this prefix of topics."""
    return topic.startswith(HEARS[role])


def tells(role: Role, topic: bytes) -> bool:
    """Return whether a role may publish this topic."""
    return topic.startswith(TELLS[role])
