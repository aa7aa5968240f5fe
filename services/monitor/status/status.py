"""`rolloutmq status`: the broker's state, as text or JSON."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.engine_registry import SILENT_S, engines_of
from rolloutmq.bus.rundir import read_run
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.errors import MalformedError, RolloutMQError
from rolloutmq.schemas.files import Endpoints, GpuBook, GpuRecord, InferenceAddress, NodeRecord, RunLayout
from rolloutmq.schemas.printable import printable_lines
from rolloutmq.schemas.wire.control import (
    GetStatus,
    JournalStatus,
    LaneStatus,
    Pressure,
    StatusReply,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.telemetry import CurriculumProgress
from rolloutmq.services.monitor.liveness import Fate, RunLiveness, fate_of
from rolloutmq.services.monitor.report import evaluation
from rolloutmq.services.monitor.report.evaluation import NO_EVALUATIONS, Evaluations
from rolloutmq.services.monitor.report.history import ran_s
from rolloutmq.services.monitor.status import counts, curricula, gpus, orchestrator_view, record_view, waits
from rolloutmq.services.monitor.status.curricula import read_curricula
from rolloutmq.services.monitor.status.ended import LABEL_CHARS, show_ended
from rolloutmq.services.monitor.status.gpus import read_gpus
from rolloutmq.services.monitor.status.lately import Lately, read_lately
from rolloutmq.services.monitor.status.trainers import trouble
from rolloutmq.services.monitor.status.worker_view import (
    WorkerRow,
    counted,
    fields,
    in_order,
    joined,
    slots_of,
    supervision_of,
    trouble_text,
    with_hangs,
)
from rolloutmq.services.monitor.text import figures, format, network, nodes
from rolloutmq.services.monitor.text.exit_codes import FAILED, USAGE, complain, reader_may_leave

PATIENCE_S: Final = 3.0
"""Longest wait for the broker, which normally replies in milliseconds."""
LANES_SHOWN: Final = 64
"""Most lanes of the text for a person."""
RESTARTED_S: Final = 60.0
"""Time after the start of a run from which the broker is a later one: the first waits for nothing that long."""


@dataclass(frozen=True)
class RunDetails:
    """State beside the broker's reply: workers (None: as the broker alone knows them), engines, GPUs, the waits of the
    trainer and of the workers outside the broker, whether the run has workers by design, the curricula, the points of
    the evaluation, the problems of the orchestrator and of the record, what training showed last, the seconds that the
    run has run, whether no launcher starts its trainer, and the nodes of a cluster that runs the workers.
    """

    crew: Sequence[WorkerRow] | None = None
    engines: Sequence[InferenceAddress] = ()
    book: GpuBook = field(default_factory=GpuBook)
    outside: str = ""
    unserved: str = ""
    has_workers: bool = True
    curricula: tuple[CurriculumProgress, ...] = ()
    evaluations: Evaluations = NO_EVALUATIONS
    orchestrator: str = ""
    record: str = ""
    lately: Lately = field(default_factory=Lately)
    ran_s: float | None = None
    is_own_trainer: bool = False
    nodes: Sequence[NodeRecord] = ()


def status(where: Path, as_json: bool) -> int:
    """Print the status of a run; return the exit code. Blocks for at most six seconds.

    Of a run that has ended, the files say how. FAILED if its launcher or its broker was killed, or if no
    broker replies.
    """
    if not where.is_dir():
        return complain(f"{where}: no run directory; start a run with `rolloutmq up CONFIG`", USAGE)
    layout = RunLayout(where)
    fate = fate_of(layout)
    try:
        reply = heard(layout, fate)
    except RolloutMQError as error:
        return complain(str(error), FAILED)
    if reply is None:
        is_over = fate.life is RunLiveness.ENDED
        return show_ended(layout, fate, as_json) if is_over else complain(fate.say(layout), FAILED)
    text, plain = described(layout, fate, reply)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()
    with reader_may_leave():
        sys.stdout.write(printable_lines(text) + "\n")
    return 0


def heard(layout: RunLayout, fate: Fate) -> StatusReply | None:
    """Return the broker's state; None if no broker serves the run. Blocks for at most `PATIENCE_S`.

    A broker started by hand is asked whatever its pid says: that of another machine or container means nothing here.

    Raises:
        RolloutMQError: The broker runs and does not reply, or refuses.
    """
    endpoints = endpoints_of(layout)
    if endpoints is None or (fate.life in {RunLiveness.ENDED, RunLiveness.DEAD} and not fate.broker):
        return None
    try:
        return _ask(endpoints)
    except RolloutMQError:
        if fate.life in {RunLiveness.DEAD, RunLiveness.ABSENT}:
            return None
        raise


def _ask(endpoints: Endpoints) -> StatusReply:
    with BlockingClient(endpoints.serve, keys=keys_of(endpoints)) as client:
        reply = client.request(GetStatus(), timeout_s=PATIENCE_S)
    if not isinstance(reply, StatusReply):
        raise MalformedError("unexpected reply from the broker to a status request")
    return reply


def described(layout: RunLayout, fate: Fate, reply: StatusReply) -> tuple[str, dict[str, Any]]:
    """Return the status of a run whose broker replied: the lines of a label and a text, and the same as JSON objects.

    Blocks for at most three seconds, while it listens for a silent orchestrator.
    """
    known = supervision_of(layout)
    book = gpus.with_limits(read_gpus(layout), known)
    heard_at = orchestrator_view.listen(layout, known)
    now, wall = time.monotonic(), time.time()
    crew = with_hangs(joined(known, reply.pressure.workers, now, slots_of(layout)), layout)
    has_workers = known is not None or _configures_workers(layout)
    also = RunDetails(
        crew,
        engines_of(layout),
        book,
        waits.outside(layout),
        waits.unserved(layout),
        has_workers,
        read_curricula(layout),
        Evaluations.read(layout),
        orchestrator_view.problem(layout, known, now, wall, heard_at),
        record_view.problem(layout, now, wall),
        read_lately(layout),
        ran_s(layout, wall),
        known is None or _has_own_trainer(layout),
        nodes.nodes_of(known),
    )
    orchestrator = orchestrator_view.fields(layout, known, now, wall, heard_at)
    supervision = {"orchestrator": orchestrator, **fields(known, crew)}
    life = RunLiveness.LIVING if fate.life is RunLiveness.ABSENT else fate.life
    plain = status_json(reply, also, supervision=supervision, life=life)
    return "\n".join([status_text(reply, also, wall), *_dead(fate, layout)]), plain


def _configures_workers(layout: RunLayout) -> bool:
    try:
        config, _ = read_run(layout.root)
    except RolloutMQError:
        return True
    return bool(config.environment)


def _has_own_trainer(layout: RunLayout) -> bool:
    try:
        config, _ = read_run(layout.root)
    except RolloutMQError:
        return False
    return not config.trainer.enabled


def _dead(fate: Fate, layout: RunLayout) -> list[str]:
    return (
        [f"{'DEAD':<{LABEL_CHARS}}{fate.say(layout)}"]
        if fate.life is RunLiveness.DEAD and not fate.elsewhere
        else []
    )


def status_json(reply: StatusReply, also: RunDetails = RunDetails(), **more: Any) -> dict[str, Any]:
    """Return the reply as JSON objects, with `why`, one line on the reasons of waits, and with the other details.

    `gpus` carry their standings; `limits` says why an environment has fewer workers than its target; `curriculum` has
    the progress of each curriculum, by environment; `evaluation` has the points so far, as in `summary.json`; `metrics`
    says why no event is recorded, if so; `nodes` are those of a cluster; `ran_s` is the time of the run, its lives
    together; `figures`, `not_finite` and `findings` are what training showed last; `counts` are the groups by split.
    """
    plain: dict[str, Any] = msgspec.to_builtins(reply)
    del plain["kind"], plain["pressure"]["kind"]
    return {
        "why": _why(reply, also),
        "engines": msgspec.to_builtins(also.engines),
        "gpus": [_gpu(record) for record in also.book.gpus],
        "limits": also.book.limits,
        "nodes": msgspec.to_builtins(also.nodes),
        "curriculum": curricula.figures(also.curricula),
        "evaluation": evaluation.figures(also.evaluations, also.ran_s),
        "metrics": {"problem": also.record},
        "ran_s": also.ran_s,
        "counts": counts.counted(reply.pressure).plain(),
        **_lately(also.lately),
        **plain,
        **more,
    }


def _why(reply: StatusReply, also: RunDetails) -> str:
    return waits.explain(
        reply.pressure,
        also.outside,
        unserved=also.unserved,
        has_workers=also.has_workers,
        trainers=trouble(reply.pressure, reply.total_steps, is_own=also.is_own_trainer),
        crew=_counts(reply, also.crew),
        engines=network.engine_trouble(reply.network, reply.pressure.workers),
    )


def _gpu(record: GpuRecord) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(record.standing)
    sample = None if record.sample is None else msgspec.to_builtins(record.sample)
    for one in (plain, sample or {}):
        one.pop("kind", None)
    return {**plain, "cordoned": record.standing.cordoned, "sample": sample}


def status_text(reply: StatusReply, also: RunDetails = RunDetails(), wall: float = 0.0) -> str:
    """Return the reply as text: a few lines, among them the reasons of waits and the unwell workers."""
    pressure = reply.pressure
    total = f" of {reply.total_steps}" if reply.total_steps else ""
    held = pressure.queued_bytes + pressure.leased_bytes
    unreached, joining = network.unreachable(pressure.workers), (reply.network, pressure.workers)
    rows = [
        ("run", f"{reply.run}, {_up(reply, also.ran_s)}, durability {reply.durability}"),
        *([("insecure", format.insecure(pressure.insecure))] if pressure.insecure else []),
        *([("insecure", format.unencrypted(pressure.unencrypted))] if pressure.unencrypted else []),
        ("step", f"{pressure.step}{total}"),
        *(("figures", text) for text in _figures(also.lately)),
        (
            "queue",
            f"{pressure.queued_sequences} sequences in {counts.queued(pressure)},"
            f" {pressure.rollout_pressure:.2f} batches of {pressure.batch_sequences};"
            f" {format.amount(held)} of {format.amount(pressure.high_bytes)}",
        ),
        (
            "flow",
            f"in {pressure.produced_per_s:.0f}, out {pressure.consumed_per_s:.0f} sequences a second",
        ),
        ("why", _why(reply, also)),
        *(("groups", line) for line in counts.lines(pressure)),
        *(("lane", text) for text in _lanes(pressure)),
        *(("health", f"{one.env}: {one.problem}; {one.remedy}") for one in also.lately.findings),
        *(("sampler", curricula.line(one)) for one in also.curricula),
        *(("eval", line) for line in _evaluated(also.evaluations, also.ran_s)),
        *(("set", f"{one.key} = {one.now}, configured {one.configured}") for one in reply.changed),
        *([("orch", f"orchestrator {also.orchestrator}")] if also.orchestrator else []),
        *([("metrics", also.record)] if also.record else []),
        ("workers", _workers(reply, also.crew)),
        *(line for row in also.crew or () if row.is_unwell for line in _unwell(row)),
        *(("engine", _engine(one, wall, unreached)) for one in also.engines),
        *((label, text) for label, text, _ in nodes.lines(also.nodes)),
        *((label, text) for label, text, _ in network.lines(*joining, nodes.placed(also.nodes))),
        *(("gpu", gpus.line(record.sample, record.standing)) for record in also.book.gpus),
        *(("limit", f"{env}: {reason}") for env, reason in also.book.limits.items()),
    ]
    tasks = msgspec.structs.asdict(pressure.tasks)
    if any(tasks.values()):
        rows.append(("tasks", ", ".join(f"{count} {state}" for state, count in tasks.items() if count)))
    if pressure.late_members:
        rows.append(
            ("late", ", ".join(f"{count} members of {env}" for env, count in pressure.late_members.items()))
        )
    if untaught := sum(worker.untaught for worker in pressure.workers):
        rows.append(("untaught", f"{untaught} groups given up at the teacher; see the workers' logs"))
    if reply.journal.health != "none":
        rows.insert(1, ("journal", _journal(reply.journal)))
    if reply.as_frames:
        reasons = ", ".join(f"{why} {count:,}" for why, count in reply.as_frames.items())
        rows.append(
            ("frames", f"{sum(reply.as_frames.values()):,} groups not through shared memory ({reasons})")
        )
    if reply.rejected_messages:
        reasons = ", ".join(f"{why} {count}" for why, count in reply.rejected_by_reason.items())
        rows.append(("refused", f"{reply.rejected_messages} messages ({reasons})"))
    elif arenas := {why: n for why, n in reply.rejected_by_reason.items() if why.startswith("arena_")}:
        rows.append(("arenas", _arenas(arenas, framed=bool(reply.as_frames))))
    return "\n".join(f"{label:<{LABEL_CHARS}}{text}" for label, text in rows)


def _lanes(pressure: Pressure) -> Iterator[str]:
    """Yield the lanes, those first in which a producer waits, and how many are left out."""
    in_order = sorted(pressure.lanes, key=lambda lane: not waits.is_waiting(lane.wait))
    yield from map(_lane, in_order[:LANES_SHOWN] if len(in_order) > LANES_SHOWN else pressure.lanes)
    if (more := len(in_order) - LANES_SHOWN) > 0:
        yield f"{more:,} more; `--json` has all"


def _up(reply: StatusReply, ran: float | None) -> str:
    """Return for how long the run has run, and its broker if that was restarted since."""
    broker = format.clock(reply.uptime_s)
    if ran is None or ran - reply.uptime_s < RESTARTED_S:
        return f"up {broker}"
    return f"up {format.clock(ran)}, broker {broker}"


def _figures(lately: Lately) -> Iterator[str]:
    """Yield the last figures of training as one line, if there are any."""
    parts = []
    if lately.step is not None:
        parts.append(f"reward {lately.step.reward:.4g} · staleness {lately.step.staleness_max}")
    if lately.figures or lately.not_finite:
        parts.append(figures.line(lately.figures, lately.not_finite))
    if parts:
        yield " · ".join(parts)


def _lately(lately: Lately) -> dict[str, Any]:
    findings: list[dict[str, Any]] = msgspec.to_builtins(lately.findings)
    return {
        "figures": dict(lately.figures),
        "not_finite": list(lately.not_finite),
        "findings": [{name: one[name] for name in one if name != "kind"} for one in findings],
    }


def _evaluated(found: Evaluations, ran: float | None) -> Iterator[str]:
    """Yield the last point of the evaluation with the cost of all points so far, and the points left out."""
    if points := found.in_force:
        last, cost = points[-1], evaluation.cost_text(found.seconds, found.share(ran))
        yield f"{evaluation.policies(last)}: {evaluation.point_text(last)}; {cost}"
    if text := found.left_out.text():
        yield text


def _arenas(refused: Mapping[str, int], *, framed: bool) -> str:
    reasons = ", ".join(f"{why} {count}" for why, count in refused.items())
    then = "groups came as frames" if framed else "no group was affected: the producer offered another"
    return f"{sum(refused.values())} offers of shared memory not opened ({reasons}); {then}"


def _lane(lane: LaneStatus) -> str:
    """Return a lane as text. For the evaluation a permit without a task is no rollout: `tasks` counts those."""
    granted = "may start" if lane.split is Split.EVAL else "under way"
    return (
        f"{lane.env}{_split(lane)}: {lane.queued_groups} queued, {lane.leased_groups} leased, {lane.granted} {granted}"
        f" at {lane.producers} producers, {lane.accepted_per_s:.1f} groups a second"
        + (
            f", {format.portion(lane.held_bytes, lane.high_bytes)} of its high-water mark"
            if lane.high_bytes
            else ""
        )
        + _rewards(lane)
        + _blocked(lane)
    )


def _rewards(lane: LaneStatus) -> str:
    if lane.reward_mean is None:
        return ""
    return f", reward {lane.reward_mean:.4g} ± {lane.reward_deviation or 0.0:.4g}"


def _blocked(lane: LaneStatus) -> str:
    """Return how many producers wait and for what, as the broker holds them back."""
    text = waits.waiting_text(lane)
    return f", {text}: {lane.wait}" if text and waits.is_waiting(lane.wait) else ""


def _split(lane: LaneStatus) -> str:
    return " (eval)" if lane.split is Split.EVAL else ""


def _engine(engine: InferenceAddress, wall: float, unreached: Mapping[str, str]) -> str:
    text = f"{engine.name}: pid {engine.pid}, {engine.url}"
    if not engine.number:
        return text
    if (silent_s := wall - engine.at) > SILENT_S:
        return f"{text}, silent for {format.clock(silent_s)}"
    text += f", {engine.in_hand} requests in hand, {engine.busy:.0%} busy"
    text += f", {engine.trouble}" if engine.trouble else ""
    text += f", {unreached[engine.name]}" if engine.name in unreached else ""
    return f"{text}, draining" if engine.draining else text


def _journal(journal: JournalStatus) -> str:
    parts = [f"{journal.health}, {format.amount(journal.nbytes)} in {journal.segments} segments"]
    parts.append(f"{format.amount(journal.behind_bytes)} behind")
    if journal.commits:
        parts.append(f"{1e3 * journal.commit_s / journal.commits:.1f} ms a commit")
    if journal.quarantined:
        parts.append(f"{journal.quarantined} damaged records quarantined")
    return ", ".join(parts)


def _workers(reply: StatusReply, crew: Sequence[WorkerRow] | None) -> str:
    return ", ".join(map(" ".join, in_order(_counts(reply, crew)))) or "none"


def _counts(reply: StatusReply, crew: Sequence[WorkerRow] | None) -> Counter[str]:
    """Return the number of workers by state; only those that the broker heard, where nobody joined the views."""
    return Counter(one.counts_as for one in reply.pressure.workers) if crew is None else counted(crew)


def _unwell(row: WorkerRow) -> list[tuple[str, str]]:
    return [("", f"{row.worker}: {trouble_text(row)}"), *(("", f"  | {line}") for line in row.last_lines)]
