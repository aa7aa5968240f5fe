"""The whole state of a run as one JSON object, for `rolloutmq top --json`. Pure.

Its names are those of `status --json` and of the lines of `up --json`.
"""

from typing import Any

import msgspec

from rolloutmq.services.monitor.live.facts import facts
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.report.latencies import plain
from rolloutmq.services.monitor.status import counts

_FLOW = ("produced_per_s", "consumed_per_s", "queued_bytes", "leased_bytes", "high_bytes", "batch_sequences")


def snapshot(board: RunState, now: float, wall: float) -> dict[str, Any]:
    """Return the state of a run; null where nothing is known yet.

    Args:
        board: State of the run.
        now: CLOCK_MONOTONIC.
        wall: Seconds since the epoch.
    """
    told = facts(board, now)
    pressure, point = board.pressure, board.evaluation
    return {
        **told,
        "event": "state",
        "t": round(wall, 3),
        "run": board.name,
        "ran_s": round(board.elapsed_s(now), 3),
        "worker_states": told["workers"],
        "workers": msgspec.to_builtins(board.crew(now)),
        "targets": msgspec.to_builtins(board.targets()),
        "counts": None if pressure is None else counts.counted(pressure).plain(),
        "ledger": None if pressure is None else _without_kind(pressure.ledger),
        "lanes": [] if pressure is None else [_without_kind(lane) for lane in pressure.lanes],
        **{name: None if pressure is None else getattr(pressure, name) for name in _FLOW},
        "waits_s": None if pressure is None else board.waited().waits_s,
        "latencies": plain(board.latencies.percentiles(now)),
        "figures": board.figures,
        "not_finite": list(board.not_finite),
        "evaluation": None if point is None else _without_kind(point),
        "engines": [_without_kind(one) for one in board.engines(now)],
        "gpus": [_gpu(board, uuid) for uuid in sorted(board.gpus.keys() | board.standings.keys())],
        "host": None if board.host is None else _without_kind(board.host),
        "processes": {
            name: {"cpu_percent": one.cpu_percent, "rss_bytes": one.rss_bytes}
            for name, one in sorted(board.processes.items())
        },
        "network": None if board.network is None else _without_kind(board.network),
        "notice": board.notice,
        "problems": [text for text in (board.orchestrator, board.record) if text],
    }


def _gpu(board: RunState, uuid: str) -> dict[str, Any]:
    sample, standing = board.gpus.get(uuid), board.standings.get(uuid)
    return {
        "uuid": uuid,
        "cordoned": None if standing is None else standing.cordoned,
        "standing": None if standing is None else _without_kind(standing),
        "sample": None if sample is None else _without_kind(sample),
    }


def _without_kind(message: msgspec.Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message)
    fields.pop("kind", None)
    return fields
