"""Protocol reference: sockets, frames, requests, replies and events, from the structs of `schemas/wire`.

The tables come from the structs, and the meaning of a field from its docstring or from `Attributes:` of its class.
`protocol_texts` has the head, and the meaning of fields without a docstring. To write the page:

    python -m rolloutmq.launch.reference.protocol > docs/reference/protocol.md
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta

from rolloutmq.launch.reference.protocol_texts import ALIAS_MEANINGS, HEAD, MEANINGS
from rolloutmq.schemas.statistics import histogram, moments
from rolloutmq.schemas.wire import (
    control,
    distillation,
    envelope,
    evaluation,
    hardware,
    health,
    joining,
    latency,
    replies,
    requests,
    tasks,
    telemetry,
    tracing,
    training,
)
from rolloutmq.schemas.wire.envelope import Message

MODULES: Final[tuple[ModuleType, ...]] = (
    envelope,
    joining,
    replies,
    requests,
    tasks,
    hardware,
    health,
    latency,
    control,
    evaluation,
    training,
    telemetry,
    tracing,
    distillation,
)

Struct = type[msgspec.Struct]


class Exchange(NamedTuple):
    """One request: its replies, beside `ErrorReply`, and the effect of sending it again."""

    request: Struct
    replies: tuple[Struct, ...]
    repeated: str


PRODUCER_EXCHANGES: Final = (
    Exchange(
        requests.RegisterProducer,
        (replies.Registered,),
        "With the same `key`: the same session. With another or an empty `key`: a new session, and the older one is "
        "fenced.",
    ),
    Exchange(requests.DeclareTables, (replies.Ok,), "Nothing changes."),
    Exchange(requests.Sync, (replies.Ack,), "The newest ack; `abandoned` is a total."),
    Exchange(requests.Goodbye, (replies.Ok,), "Nothing changes."),
)
CONSUMER_EXCHANGES: Final = (
    Exchange(
        requests.RegisterConsumer,
        (replies.ConsumerRegistered,),
        "With the `generation` of the reply: nothing changes. With 0: the consumer loses its lease and gets a new "
        "generation.",
    ),
    Exchange(
        requests.Pull,
        (replies.Batch, replies.NoBatch),
        "With the same `request_id`: the same batch; after its settlement, error `lease_lost`.",
    ),
    Exchange(
        requests.Settle,
        (replies.Settled,),
        "With the same outcome: the same reply. With another outcome: error `conflict`.",
    ),
    Exchange(
        requests.SettleGroups,
        (replies.Settled,),
        "With the same `key`: the same reply, also after a restart.",
    ),
    Exchange(requests.Commit, (replies.Ok,), "Nothing changes."),
    Exchange(requests.Release, (replies.Ok,), "Nothing changes: the consumer holds no lease."),
    Exchange(requests.LogFigures, (replies.Ok,), "The figures are published again."),
    Exchange(requests.ConsumerBeat, (replies.Ok,), "`progress` is a total; only a larger one counts."),
    Exchange(requests.GetInfo, (replies.InfoReply,), "Reads only."),
)
TASK_EXCHANGES: Final = (
    Exchange(
        tasks.SubmitTasks,
        (tasks.TaskStates, tasks.TasksFull),
        "Known tasks are reported, not queued again. The same id with other content: error `conflict`.",
    ),
    Exchange(tasks.CancelTasks, (tasks.TaskStates,), "Nothing changes."),
    Exchange(tasks.AwaitTasks, (tasks.TaskStates,), "Reads only."),
    Exchange(tasks.TakeTasks, (tasks.TakenTasks,), "With the same `number`: the same tasks."),
    Exchange(tasks.HandBack, (replies.Ok,), "Nothing changes: the session no longer holds the task."),
)
CONTROL_EXCHANGES: Final = (
    Exchange(control.WorkerBeat, (control.WorkerBeatReply,), "All counts are totals."),
    Exchange(control.Drain, (replies.Ok,), "One drain, until the worker confirms it."),
    Exchange(control.RestartWorker, (replies.Ok,), "One order, by its id."),
    Exchange(control.SetWorkers, (replies.Ok,), "Nothing changes."),
    Exchange(hardware.CordonGpu, (hardware.GpuOrdered,), "Takes a new order number; the GPU stays cordoned."),
    Exchange(hardware.UncordonGpu, (hardware.GpuOrdered,), "Takes a new order number; the GPU stays in use."),
    Exchange(control.SetValues, (control.ValuesSet, control.ValueRefused), "Nothing changes."),
    Exchange(control.GetStatus, (control.StatusReply,), "Reads only."),
    Exchange(control.LatestExample, (control.LatestExampleReply,), "Reads only."),
    Exchange(control.Disconnect, (replies.Ok,), "Nothing changes, unless the environment registered again."),
    Exchange(
        control.Requeue,
        (control.Requeued,),
        "Groups requeued by the first request are listed in `refused`: they are no longer dead.",
    ),
    Exchange(
        control.Reset, (replies.Ok,), "Discards again, including groups accepted since the first reset."
    ),
    Exchange(control.Shutdown, (replies.Ok,), "Nothing changes."),
)
JOINING_EXCHANGES: Final = (
    Exchange(joining.GetRun, (joining.RunReply,), "Reads only."),
    Exchange(joining.GetFile, (joining.FilePart,), "Reads only. The file has changed: error `unknown`."),
    Exchange(joining.EngineBeat, (replies.Ok,), "The address file is written again."),
    Exchange(joining.RelayBeat, (replies.Ok,), "The relay counts as heard once more."),
    Exchange(joining.GetWeightsTicket, (joining.WeightsTicket,), "Another ticket is made."),
)
EXCHANGES: Final = (
    *PRODUCER_EXCHANGES,
    *CONSUMER_EXCHANGES,
    *TASK_EXCHANGES,
    *CONTROL_EXCHANGES,
    *JOINING_EXCHANGES,
)

FRAME_STRUCTS: Final[tuple[Struct, ...]] = (
    envelope.Envelope,
    envelope.GroupHeader,
    envelope.PolicyVersion,
    envelope.RewardSummary,
    histogram.Histogram,
    moments.Moments,
    envelope.ColumnTable,
    envelope.ColumnSpec,
    envelope.ArenaRef,
)


class Published(NamedTuple):
    """One event: the end of its topic in words, its publisher, and how often."""

    event: Struct
    topic: str
    publisher: str
    when: str


EVENTS: Final = (
    Published(
        replies.Ack,
        "`ack.PRODUCER/`",
        "broker",
        "on change, once more after `broker.ack_interval_s`, and on at that pace while the producer waits",
    ),
    Published(
        control.Drain,
        "`control.WORKER/`",
        "broker",
        "every `broker.ack_interval_s` until the worker confirms",
    ),
    Published(control.Pressure, "`pressure`", "broker", "every `broker.pressure_interval_s`"),
    Published(control.StepDone, "`step`", "trainer", "after each optimizer step"),
    Published(control.StepSkipped, "`telemetry.skipped.RUN`", "trainer", "after each batch without a signal"),
    Published(
        training.BatchSettled,
        "`telemetry.settled.RUN`",
        "broker",
        "after each training batch, whoever trains",
    ),
    Published(
        training.StepFigures, "`telemetry.figures.RUN`", "broker", "after each `LogFigures` of a trainer"
    ),
    Published(evaluation.EvaluationDone, "`telemetry.evaluation.RUN`", "who evaluates", "after each point"),
    Published(
        control.ScaleDecision,
        "`telemetry.scale.ENV`",
        "orchestrator",
        "with each decision",
    ),
    Published(
        telemetry.EngineDecision,
        "`telemetry.scale.inference`",
        "orchestrator",
        "with each decision",
    ),
    Published(
        hardware.GpuStanding, "`telemetry.fleet.UUID`", "orchestrator", "on change, and every few seconds"
    ),
    Published(
        telemetry.CurriculumProgress,
        "`telemetry.curriculum.ENV`",
        "curriculum",
        "after every `curriculum.NAME.report_every` outcomes",
    ),
    Published(
        joining.NetworkStatus, "`telemetry.network.RUN`", "broker", "once a second, with `broker.listen`"
    ),
    Published(telemetry.HostSample, "`telemetry.host.HOST`", "telemetry", "periodically"),
    Published(telemetry.GpuSample, "`telemetry.gpu.UUID`", "telemetry", "periodically"),
    Published(telemetry.GpuAbsence, "`telemetry.gpu.HOST`", "telemetry", "periodically, without GPUs"),
    Published(telemetry.ProcessSample, "`telemetry.process.NAME`", "telemetry", "periodically"),
    Published(telemetry.EngineSample, "`telemetry.engine.NAME`", "telemetry", "periodically"),
    Published(
        latency.LatencySample,
        "`telemetry.latency.NAME`",
        "each process",
        "every `telemetry.interval_s`, where anything was measured",
    ),
    Published(
        tracing.RolloutTrace,
        "`telemetry.trace.WORKER`",
        "workers",
        "after each rollout of a traced group",
    ),
    Published(
        health.HealthFinding,
        "`telemetry.health.ENV`",
        "workers and telemetry",
        "on change, and for each withheld group",
    ),
)
"""Events in the order of the page. `Ack` and `Drain` have their tables elsewhere."""

TEACHER: Final[tuple[Struct, ...]] = (distillation.TeachRequest, distillation.TeachReply)

ALIASES: Final[dict[str, Any]] = {
    "Name": envelope.Name,
    "GroupId": envelope.GroupId,
    "TableId": envelope.TableId,
    "Count": envelope.Count,
    "TaskId": tasks.TaskId,
    "GpuId": hardware.GpuId,
}
"""Types with a row of their own."""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD, *_requests(), *_replies(), *_events(), *_frames(), *_parts(), *_teacher()]
    return "\n\n".join([*parts, *_enums(), *_aliases()]) + "\n"


def structs() -> list[Struct]:
    """Return every struct of `schemas/wire`, in the order of the files."""
    return [one for one in _own(msgspec.Struct) if one is not Message]


def enums() -> list[type[Enum]]:
    """Return every enumeration of `schemas/wire`."""
    return _own(Enum)


def _own(base: type[Any]) -> list[Any]:
    return [
        one
        for module in MODULES
        for one in vars(module).values()
        if inspect.isclass(one) and issubclass(one, base) and one.__module__ == module.__name__
    ]


def _requests() -> Iterator[str]:
    yield "## Requests"
    yield (
        "Any request may also get an [ErrorReply](#errorreply); its codes are the values of "
        "[ErrorCode](#errorcode)."
    )
    groups = {
        "Requests of producers": PRODUCER_EXCHANGES,
        "Requests of consumers": CONSUMER_EXCHANGES,
        "Requests for tasks": TASK_EXCHANGES,
        "Requests of workers and operators": CONTROL_EXCHANGES,
        "Requests of other hosts": JOINING_EXCHANGES,
    }
    for title, exchanges in groups.items():
        yield f"### {title}"
        yield _table(
            ("request", "reply", "repeated"),
            ((_link(one.request), ", ".join(map(_link, one.replies)), one.repeated) for one in exchanges),
        )
        for one in exchanges:
            yield from _section(one.request, level=4)


def _replies() -> Iterator[str]:
    yield "## Replies"
    found: list[Struct] = [reply for one in EXCHANGES for reply in one.replies]
    found.append(replies.ErrorReply)
    for reply in dict.fromkeys(found):
        yield from _section(reply, level=3)


def _events() -> Iterator[str]:
    yield "## Events"
    yield (
        "The broker forwards `step` and `telemetry.*` from `publish` and drops other topics there. Events may be lost. "
        "A new subscriber to `pressure`, `ack.` or `control.` receives the last state at once."
    )
    yield _table(
        ("topic", "event", "publisher", "published"),
        ((one.topic, _link(one.event), one.publisher, one.when) for one in EVENTS),
    )
    elsewhere = {replies.Ack, control.Drain}
    for one in EVENTS:
        if one.event not in elsewhere:
            yield from _section(one.event, level=3)


def _frames() -> Iterator[str]:
    yield "## Structs of the data plane"
    yield "These are msgpack arrays: fields are identified by their position."
    for one in FRAME_STRUCTS:
        yield from _section(one, level=3)


def nested() -> list[Struct]:
    """Return the structs that occur only within others."""
    shown = {
        *(one.request for one in EXCHANGES),
        *(reply for one in EXCHANGES for reply in one.replies),
        *(one.event for one in EVENTS),
        *FRAME_STRUCTS,
        *TEACHER,
        replies.ErrorReply,
    }
    return [one for one in structs() if one not in shown]


def _parts() -> Iterator[str]:
    yield "## Parts of messages"
    for one in nested():
        yield from _section(one, level=3)


def _teacher() -> Iterator[str]:
    yield "## Teacher over HTTP"
    yield (
        f"A teacher ([distillation](../guides/distillation.md)) answers `POST {distillation.TEACH_PATH}` in msgpack, "
        f"and `GET {distillation.HEALTH_PATH}` with status 200 while it is well. A client retries after the statuses "
        f"{', '.join(map(str, sorted(distillation.AWAY)))}."
    )
    for one in TEACHER:
        yield from _section(one, level=3)


def _enums() -> Iterator[str]:
    yield "## Enumerations"
    for one in enums():
        yield f"### {one.__name__}"
        about, fields = _documented(one)
        if about:
            yield about
        rows = [
            (f"`{member.value}`", _sentence(fields.get(member.name) or _fallback(one, member.name)))
            for member in one
        ]
        if issubclass(one, int):
            named = [
                (value, f"`{member.name}`", text) for member, (value, text) in zip(one, rows, strict=True)
            ]
            yield _table(("value", "name", "meaning"), named)
        else:
            yield _table(("value", "meaning"), rows)


def _aliases() -> Iterator[str]:
    yield "## Scalar types"
    yield _table(
        ("type", "values", "meaning"),
        ((f"`{name}`", _type(alias), ALIAS_MEANINGS[name]) for name, alias in ALIASES.items()),
    )


def _section(struct: Struct, level: int) -> Iterator[str]:
    """Yield heading, purpose and fields of a struct."""
    config = struct.__struct_config__
    yield f"{'#' * level} {struct.__name__}"
    about, meanings = _documented(struct)
    tag = f"`kind`: `{config.tag}`. " if config.tag else ""
    left_out = " Fields with their default are left out." if config.omit_defaults else ""
    yield f"{tag}{about}{left_out}"
    fields = msgspec.structs.fields(struct)
    if not fields:
        yield "No fields."
        return
    hints = get_type_hints(struct, include_extras=True)
    scope = vars(sys.modules[struct.__module__])
    yield _table(
        ("field", "type", "default", "meaning"),
        (
            (
                f"`{field.name}`",
                _type(hints[field.name], scope),
                _default(field),
                _sentence(meanings.get(field.name) or _fallback(struct, field.name)),
            )
            for field in fields
        ),
    )


def _fallback(one: type[Any], name: str) -> str:
    return MEANINGS.get(f"{one.__name__}.{name}") or MEANINGS.get(name, "")


def _default(field: Any) -> str:
    if field.default_factory is not NODEFAULT:
        value = field.default_factory()
    elif field.default is NODEFAULT:
        return "required"
    else:
        value = field.default
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    texts: dict[Any, str] = {
        None: "`null`",
        "": '`""`',
        b"": "empty",
        (): "`[]`",
        True: "`true`",
        False: "`false`",
    }
    if isinstance(value, dict):
        return "`{}`"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return texts.get(value, f"`{value}`")
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _type(hint: Any, scope: Mapping[str, Any] = {}) -> str:
    """Return a type for a person, its bounds included; an alias known in `scope` by its name."""
    for name, alias in ALIASES.items():
        if name in scope and hint == alias:
            return f"[{name}](#scalar-types)"
    origin, args = get_origin(hint), get_args(hint)
    shown = [_type(one, scope) for one in args if one is not Ellipsis and not isinstance(one, Meta)]
    if origin is Annotated:
        for meta in args[1:]:
            if isinstance(meta, Meta) and meta.extra:
                return _type(meta.extra["encoded"], scope)
        return _bounded(shown[0], args[0], [meta for meta in args[1:] if isinstance(meta, Meta)])
    if origin in {Union, UnionType}:
        return " or ".join(shown)
    if origin is tuple:
        return f"array of {shown[0]}" if Ellipsis in args else f"array ({', '.join(shown)})"
    if origin is dict:
        return f"map of {shown[0]} to {shown[1]}"
    if hint is NoneType:
        return "null"
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct | Enum):
        return _link(hint)
    return str(hint.__name__)


def _bounded(text: str, base: Any, metas: Iterable[Meta]) -> str:
    parts = [text]
    for meta in metas:
        if meta.ge is not None:
            parts.append(f"at least {_number(meta.ge)}")
        if meta.gt is not None:
            parts.append(f"above {_number(meta.gt)}")
        if meta.le is not None:
            parts.append(f"at most {_number(meta.le)}")
        if meta.lt is not None:
            parts.append(f"below {_number(meta.lt)}")
        if meta.min_length is not None and meta.min_length > 0:
            parts.append(
                "not empty" if meta.min_length == 1 else f"at least {_number(meta.min_length)} {_unit(base)}"
            )
        if meta.max_length is not None:
            parts.append(f"at most {_number(meta.max_length)} {_unit(base)}")
        if meta.pattern is not None:
            parts.append(f"matches `{meta.pattern}`")
    return ", ".join(parts)


def _unit(base: Any) -> str:
    return {str: "characters", bytes: "bytes"}.get(base, "entries")


def _number(value: float) -> str:
    """Return a number; a large power of two as one."""
    whole = int(value)
    for exact, suffix in ((whole, ""), (whole + 1, " - 1")):
        if exact > 1 << 20 and exact & (exact - 1) == 0:
            return f"2^{exact.bit_length() - 1}{suffix}"
    if whole < -(1 << 20) and -whole & (-whole - 1) == 0:
        return f"-2^{(-whole).bit_length() - 1}"
    return f"{value:,g}" if whole != value else f"{whole:,}"


def _link(one: type[Any]) -> str:
    return f"[{one.__name__}](#{one.__name__.lower()})"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _sentence(text: str) -> str:
    first = text.partition(" ")[0]
    return text if any(letter.isdigit() for letter in first) else text[:1].upper() + text[1:]


@cache
def _classes(module: ModuleType) -> Mapping[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _documented(one: type[Any]) -> tuple[str, dict[str, str]]:
    """Return the purpose of a class, and the meaning of each documented field or member."""
    node = _classes(sys.modules[one.__module__])[one.__name__]
    about, _, attributes = (ast.get_docstring(node) or "").partition("Attributes:\n")
    meanings = _attributes(attributes)
    for field, text in zip(node.body, node.body[1:], strict=False):
        name = _assigned(field)
        if name and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            meanings.setdefault(name, _plain(str(text.value.value)))
    return _plain(about), meanings


def _assigned(node: ast.stmt) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else None
    if isinstance(node, ast.Assign):
        target = node.targets[0]  # type: ignore[assignment]
    return target.id if isinstance(target, ast.Name) else ""


def _attributes(text: str) -> dict[str, str]:
    """Parse the entries of an `Attributes:` section; an entry may name several fields."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        if entry := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2].strip())
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _plain(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(page())
