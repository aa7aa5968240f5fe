"""The state of a run as JSON objects, for `rolloutmq up --json`. Pure."""

from typing import Any

from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.status import waits


def facts(board: RunState, now: float) -> dict[str, Any]:
    """Return what a progress line says, as fields; None where nothing is known yet."""
    pressure, counts = board.pressure, board.counts(now)
    waiting: dict[str, Any] = {"trainer_waits": "", "workers_wait": "", "pressure": None}
    if pressure is not None:
        waiting = {
            "trainer_waits": board.outside or waits.trainer(pressure, counts),
            "workers_wait": waits.workers(pressure, board.unserved, counts),
            "pressure": pressure.rollout_pressure,
        }
    return {
        "event": "progress",
        "step": board.steps_done,
        "total_steps": board.total_steps or None,
        "reward": board.reward(),
        "steps_per_s": round(board.steps_per_s(now), 3),
        "staleness": board.step.staleness_max if board.step is not None else None,
        "staleness_bound": board.staleness_bound,
        "workers": dict(counts),
        **waiting,
        "trainer_trouble": board.trainer_trouble().text,
        "broker_silent_s": round(board.silent_s(now), 1),
        "findings": [{"env": one.env, "finding": one.finding} for one in board.findings(now)],
    }
