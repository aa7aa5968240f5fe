"""The state of a run as the sections of a page: JSON objects by name. Pure.

The rules of what is shown are those of `status` and `top`; here they only get a form. A section that is the same as
before need not be sent again, so each stands for itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.bus.engine_registry import SILENT_S
from rolloutmq.schemas.config.live_settings import SECTIONS, LiveSettingError, value
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import GpuRecord, InferenceAddress, Target
from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuSample, ProcessSample
from rolloutmq.services.dashboard.record.run_record import RunRecord
from rolloutmq.services.dashboard.run_files import RunFiles
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.profile.usage import part_of_run
from rolloutmq.services.monitor.report import evaluation
from rolloutmq.services.monitor.status import curricula, waits
from rolloutmq.services.monitor.status.worker_view import WorkerRow, counted, in_order
from rolloutmq.services.monitor.text import network, nodes

PROCESSES_SHOWN: Final = 64
ENVIRONMENTS_SHOWN: Final = 256
SETTINGS_SHOWN: Final = 512
_OF_LANES: Final = ("weight", "min_share", "max_staleness", "high_bytes")
_OF_ENVIRONMENT: Final = (*_OF_LANES, "min_workers", "max_workers")
_OF_PRESSURE: Final = ("high_bytes", "high_groups", "exact_wait_s", "silent_env_s")

Sections = dict[str, Any]


class Reading(NamedTuple):
    """How far the record has been read.

    Attributes:
        lines: Lines read.
        nbytes: Bytes of the file.
        damaged: Lines that do not decode, or are too long.
        loaded: Part of the file that has been read.
        problem: Why it cannot be read.
    """

    lines: int = 0
    nbytes: int = 0
    damaged: int = 0
    loaded: float = 1.0
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the end has been reached: before that no sum over the run is known."""
        return self.loaded >= 1.0


class Shown(NamedTuple):
    """All that a page shows at one moment.

    Attributes:
        root: The run directory.
        config: Configuration of the run, or why it cannot be read.
        board: State collected from its events.
        files: What its files say.
        record: What its record shows.
        reading: How far the record has been read.
        crew: Its workers.
        crew_version: Grows with each change of them.
        given_up: Environments without a worker, and why.
    """

    root: str
    config: RunConfig | str
    board: RunState
    files: RunFiles
    record: RunRecord
    reading: Reading
    crew: Sequence[WorkerRow]
    crew_version: int
    given_up: Mapping[str, str]


def sections(shown: Shown, now: float, wall: float) -> Sections:
    """Return every section.

    Args:
        shown: What is known.
        now: Time on the clock of the state.
        wall: Seconds since the epoch.
    """
    board, files = shown.board, shown.files
    pressure, on_cluster = board.pressure, nodes.nodes_of(board.supervision)
    network_lines = network.lines(board.network, board.workers(), nodes.placed(on_cluster))
    return {
        "run": _run(shown, now),
        "queue": None if pressure is None else _queue(shown, pressure),
        "waits": _waits(shown),
        "use": _use(shown),
        "environments": [*_environments(shown)],
        "worker_counts": {state: int(count) for count, state in in_order(counted(shown.crew))},
        "workers_version": shown.crew_version,
        "engines": [_engine(one, wall) for one in files.engines],
        "engine_target": _engine_target(shown),
        "network": [
            {"what": one.label, "text": one.text, "unwell": one.is_unwell}
            for one in (*nodes.lines(on_cluster), *network_lines)
        ],
        "gpus": _gpus(shown),
        "gpu_absence": "" if board.gpu_absence is None else board.gpu_absence.why,
        "trainers": [] if pressure is None else [_plain(one) for one in pressure.leaders],
        "trainer_trouble": board.trainer_trouble().text if files.answers else "",
        "ledger": None if pressure is None else _plain(pressure.ledger),
        "by_split": [] if pressure is None else _by_split(pressure),
        "findings": [_plain(one) for one in board.findings(now)],
        "decisions": list(shown.record.decisions)[-50:],
        "hops": shown.record.latencies.rows() if shown.reading.is_whole else [],
        "figures": dict(board.figures),
        "not_finite": list(board.not_finite),
        "evaluation": _evaluation(files),
        "curricula": [
            {"env": env, "text": curricula.line(one)} for env, one in sorted(board.curricula.items())
        ],
        "host": None if board.host is None else _plain(board.host),
        "processes": [_process(one) for one in _processes(shown)],
        "problems": [*_problems(shown)],
        "dead": {"count": files.dead},
        "settings": _settings(shown),
        "summary": None if files.summary is None else msgspec.to_builtins(files.summary),
        "record": {
            "lines": shown.reading.lines,
            "bytes": shown.reading.nbytes,
            "damaged_lines": shown.reading.damaged,
            "loaded": round(shown.reading.loaded, 3),
            "problem": shown.reading.problem,
        },
    }


def _plain(one: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one)
    fields.pop("kind", None)
    return fields


def _run(shown: Shown, now: float) -> dict[str, Any]:
    board, files, config = shown.board, shown.files, shown.config
    return {
        "name": board.name,
        "dir": shown.root,
        "life": files.life,
        "text": files.text,
        "ended": files.ended,
        "notice": board.notice,
        "read_only": not files.answers,
        "read_only_why": "" if files.answers else files.text,
        "step": board.steps_done if shown.reading.is_whole or board.pressure is not None else None,
        "total_steps": board.total_steps or None,
        "steps_per_s": round(board.steps_per_s(now), 3) if files.answers else None,
        "reward": board.reward(),
        "lanes": 0 if board.pressure is None else len(board.pressure.lanes),
        "ran_s": None if files.ran_s is None else round(files.ran_s),
        "left_s": board.left_s(now) if files.answers else None,
        "silent_s": round(board.silent_s(now)) if files.answers else 0,
        "durability": None if isinstance(config, str) else config.broker.durability,
    }


def _queue(shown: Shown, pressure: Pressure) -> dict[str, Any]:
    board = shown.board
    names = (
        *("rollout_pressure", "queued_sequences", "batch_sequences", "queued_groups", "queued_bytes"),
        *("leased_bytes", "high_bytes", "high_groups", "produced_per_s", "consumed_per_s", "staleness_max"),
        *("granted_bytes", "untrained_s"),
    )
    known = {name: getattr(pressure, name) for name in names}
    known["starved_s"] = shown.record.use().run_starved_s if shown.reading.is_whole else None
    return {**known, "low": board.low, "high": board.high, "staleness_bound": board.staleness_bound}


def _waits(shown: Shown) -> dict[str, Any]:
    board, files, pressure = shown.board, shown.files, shown.board.pressure
    if pressure is None or not files.answers:
        return {
            "why": "",
            "trainer": "",
            "workers": "",
            "seconds": [] if pressure is None else _spent(shown, pressure),
        }
    counts = counted(shown.crew)
    config = shown.config
    return {
        "why": waits.explain(
            pressure,
            files.outside,
            unserved=files.unserved,
            has_workers=isinstance(config, str) or bool(config.environment),
            trainers=board.trainer_trouble(),
            crew=counts,
            engines=network.engine_trouble(board.network, pressure.workers),
        ),
        "trainer": files.outside or waits.trainer(pressure, counts),
        "workers": waits.workers(pressure, files.unserved, counts),
        "seconds": _spent(shown, pressure),
    }


def _spent(shown: Shown, pressure: Pressure) -> list[dict[str, Any]]:
    """Return the seconds of waiting by reason, over all lives of the broker, the longest first."""
    if not shown.reading.is_whole:
        return []
    waited = shown.record.waited(pressure)
    spent = [
        {"who": who, "reason": reason, "seconds": round(seconds, 1)}
        for who, sums in (("trainer", waited.trainer_waits_s), ("workers", waited.producer_waits_s))
        for reason, seconds in sums.items()
    ]
    return sorted(spent, key=lambda one: (one["who"], -float(one["seconds"])))


def _use(shown: Shown) -> dict[str, Any]:
    """Return how the time was used: of the whole run, and from the first settled batch, as `profile` and `compare`.

    Nothing is told until the record has been read.
    """
    if not shown.reading.is_whole:
        return {
            "starved_of_run": None,
            "starved": None,
            "blocked": None,
            "blocked_reason": "",
            "blocked_by_env": {},
        }
    usage = shown.record.use()
    of_run = None if usage.is_unrecorded else part_of_run(usage.run_starved_s, shown.files.ran_s)
    return {
        "starved_of_run": _part(of_run),
        "starved": _part(usage.starved if usage.trainer_s else None),
        "blocked": _part(usage.blocked if usage.slot_s else None),
        "blocked_reason": max(usage.producer_waits_s, key=usage.producer_waits_s.__getitem__, default=""),
        "blocked_by_env": {
            env: _part(min(1.0, usage.blocked_s.get(env, 0.0) / slot_s))
            for env, slot_s in sorted(usage.slot_s.items())[:ENVIRONMENTS_SHOWN]
            if slot_s > 0
        },
    }


def _part(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _environments(shown: Shown) -> Iterator[dict[str, Any]]:
    board, files = shown.board, shown.files
    lanes = () if board.pressure is None else board.pressure.lanes[:ENVIRONMENTS_SHOWN]
    targets = {one.env: one for one in board.targets()}
    pinned = {} if board.pressure is None else board.pressure.wanted
    for lane in lanes:
        target = targets.get(lane.env) if lane.split is Split.TRAIN else None
        yield {
            **_plain(lane),
            "split": lane.split.name.lower(),
            "wait": lane.wait if waits.is_waiting(lane.wait) else "",
            "target": None if target is None else target.target,
            "current": None if target is None else target.current,
            "target_reason": "" if target is None else target.reason,
            "pinned": pinned.get(lane.env),
            "limit": files.book.limits.get(lane.env, ""),
            "given_up": shown.given_up.get(lane.env, ""),
        }
    known = {lane.env for lane in lanes}
    for env in (one for one in targets if one not in known):
        yield _without_lane(env, targets[env], shown)


def _without_lane(env: str, target: Target, shown: Shown) -> dict[str, Any]:
    """Return an environment whose workers have not registered yet."""
    pressure = shown.board.pressure
    return {
        "env": env,
        "split": "train",
        "target": target.target,
        "current": target.current,
        "target_reason": target.reason,
        "pinned": None if pressure is None else pressure.wanted.get(env),
        "limit": shown.files.book.limits.get(env, ""),
        "given_up": shown.given_up.get(env, ""),
    }


def _engine(one: InferenceAddress, wall: float) -> dict[str, Any]:
    silent_s = wall - one.at
    return {
        "name": one.name,
        "url": one.url,
        "pid": one.pid,
        "in_hand": one.in_hand,
        "busy": round(one.busy, 3),
        "draining": one.draining,
        "trouble": f"silent for {silent_s:.0f} s" if one.number and silent_s > SILENT_S else one.trouble,
    }


def _engine_target(shown: Shown) -> dict[str, Any] | None:
    decision, supervision = shown.board.engine_decision, shown.files.supervision
    written = None if supervision is None else supervision.engines
    told = decision or written
    if told is None:
        return None
    pinned = None if shown.board.pressure is None else shown.board.pressure.wanted.get("inference")
    return {"target": told.target, "current": told.current, "reason": told.reason, "pinned": pinned}


def _gpus(shown: Shown) -> list[dict[str, Any]]:
    """Return each GPU: its last sample, and the orchestrator's standing."""
    book: Mapping[str, GpuRecord] = {one.standing.uuid: one for one in shown.files.book.gpus}
    uuids = sorted({*shown.board.gpus, *shown.board.standings, *book})
    return [_gpu(uuid, shown.board, book.get(uuid)) for uuid in uuids]


def _gpu(uuid: str, board: RunState, record: GpuRecord | None) -> dict[str, Any]:
    sample: GpuSample | None = board.gpus.get(uuid) or (None if record is None else record.sample)
    standing: GpuStanding | None = board.standings.get(uuid) or (None if record is None else record.standing)
    known: dict[str, Any] = {"uuid": uuid}
    if sample is not None:
        known |= _plain(sample)
    if standing is not None:
        known |= {name: each for name, each in _plain(standing).items() if name != "at"}
    return {**known, "cordoned": standing is not None and standing.cordoned}


def _by_split(pressure: Pressure) -> list[dict[str, Any]]:
    counts: dict[Split, list[int]] = {}
    for lane in pressure.lanes:
        total = counts.setdefault(lane.split, [0, 0])
        total[0] += lane.accepted_groups
        total[1] += lane.accepted_sequences
    return [
        {"split": split.name.lower(), "groups": groups, "sequences": sequences}
        for split, (groups, sequences) in sorted(counts.items())
    ]


def _evaluation(files: RunFiles) -> dict[str, Any] | None:
    points = files.evaluations.in_force
    left_out = files.evaluations.left_out.text()
    if not points:
        return {"points": 0, "last": None, "left_out": left_out} if left_out else None
    last = points[-1]
    return {
        "points": len(points),
        "last": {
            "step": last.version.step,
            **msgspec.to_builtins(last.all),
            "text": f"{evaluation.policies(last)}: {evaluation.point_text(last)}",
        },
        "left_out": left_out,
    }


def _processes(shown: Shown) -> list[ProcessSample]:
    """Return the processes without the workers, which have a list of their own."""
    heard = () if shown.board.pressure is None else shown.board.pressure.workers
    workers = {row.worker for row in shown.crew} | {one.worker for one in heard}
    found = [one for name, one in sorted(shown.board.processes.items()) if name not in workers]
    return found[:PROCESSES_SHOWN]


def _process(one: ProcessSample) -> dict[str, Any]:
    return {"name": one.name, "pid": one.pid, "cpu_percent": one.cpu_percent, "rss_bytes": one.rss_bytes}


def _problems(shown: Shown) -> Iterator[dict[str, str]]:
    if isinstance(shown.config, str):
        yield {"what": "configuration", "text": shown.config}
    for what, text in shown.files.problems.items():
        yield {"what": what, "text": text}
    for env, text in shown.given_up.items():
        yield {"what": f"environment {env}", "text": text}
    if shown.reading.problem:
        yield {"what": "record", "text": shown.reading.problem}
    if shown.reading.damaged:
        yield {
            "what": "record",
            "text": f"metrics.jsonl: damaged lines are left out: {shown.reading.damaged}",
        }


def _settings(shown: Shown) -> list[dict[str, Any]]:
    """Return the live settings, with the values in force where an event tells them."""
    config, pressure = shown.config, shown.board.pressure
    if isinstance(config, str):
        return []
    told = _told(pressure) if pressure is not None else {}
    keys = [f"{section}.{name}" for section, names in SECTIONS.items() for name in names]
    for env in config.environment:
        keys += [f"environment.{env}.{name}" for name in _OF_ENVIRONMENT]
    found = []
    for key in keys[:SETTINGS_SHOWN]:
        try:
            configured = value(config, key)
        except (LiveSettingError, AttributeError):
            continue
        found.append({"key": key, "configured": configured, "now": told.get(key, configured)})
    return found


def _told(pressure: Pressure) -> dict[str, Any]:
    told: dict[str, Any] = {f"broker.{name}": getattr(pressure, name) for name in _OF_PRESSURE}
    for lane in pressure.lanes:
        told |= {f"environment.{lane.env}.{name}": getattr(lane, name) for name in _OF_LANES}
    return told | dict(pressure.settings)
