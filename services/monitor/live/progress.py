"""Progress lines, for output that is not a terminal. Pure.

A line is due after 25 steps, after 2 seconds with a change, and after 30 seconds in any case. A fast run does not
flood a log, and a stuck run still prints.
"""

import json
from typing import Final

from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.services.monitor.live.facts import facts
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.status import waits
from rolloutmq.services.monitor.text import format

EVERY_STEPS: Final = 25
EVERY_S: Final = 2.0
AT_LEAST_S: Final = 0.5
"""Minimum time between two lines."""
AT_MOST_S: Final = 30.0


class Progress:
    """Decides when a line is due, and renders it.

    Args:
        board: State of the run.
        as_json: Render lines of JSON.
    """

    def __init__(self, board: RunState, *, as_json: bool = False) -> None:
        self._board = board
        self._as_json = as_json
        self._said_at: float | None = None
        self._said_step = 0
        self._said = ""

    def line(self, now: float) -> str | None:
        """Return the line to print now, or None if none is due."""
        step = self._board.steps_done
        told = facts(self._board, now) if self._as_json else {}
        body = json.dumps(told) if self._as_json else describe(self._board, now)
        if self._said_at is not None:
            silence = now - self._said_at
            many = step - self._said_step >= EVERY_STEPS and silence >= AT_LEAST_S
            news = body != self._said and silence >= EVERY_S
            if not (many or news or silence >= AT_MOST_S):
                return None
        self._said_at, self._said_step, self._said = now, step, body
        if self._as_json:
            return json.dumps({**told, "ran_s": round(self._board.elapsed_s(now), 3)})
        return f"[{format.clock(self._board.elapsed_s(now)):>5}] {body}"

    def notice(self, text: str) -> str:
        """Return the line of a notice."""
        return json.dumps({"event": "notice", "text": text}) if self._as_json else text


def describe(board: RunState, now: float) -> str:
    """Return the state of a run as one line."""
    pressure = board.pressure
    if pressure is None:
        return "waiting for the broker"
    total = f"/{board.total_steps}" if board.total_steps else ""
    reward = board.reward()
    parts = [
        f"step {board.steps_done:>{len(total) - 1 if total else 1}}{total}",
        f"reward {reward:.3f}" if reward is not None else "reward -----",
        f"{board.steps_per_s(now):4.1f} steps/s",
        f"pressure {pressure.rollout_pressure:4.2f}",
        f"staleness {board.step.staleness_max if board.step else 0}/{board.staleness_bound}",
        f"workers {_workers(board, now)}",
    ]
    parts += ["the launcher was killed"] if board.is_dead else []
    parts += ["the orchestrator is silent"] if board.orchestrator else []
    if silent := board.silent_s(now):
        return "  ".join([*parts, f"the broker is silent for {silent:.0f} s"])
    health = [f"{one.env}: {one.finding}" for one in board.findings(now)]
    return "  ".join([*parts, *_waits(board, now), *health])


def _workers(board: RunState, now: float) -> str:
    counts = board.counts(now)
    ready = counts.pop(WorkerState.READY, 0)
    return " ".join([str(ready), *(f"+{count} {state}" for state, count in counts.items())])


def _waits(board: RunState, now: float) -> list[str]:
    pressure = board.pressure
    if pressure is None:
        return []
    engines, _, _ = waits.before_start(pressure, board.unserved, board.counts(now)).partition(",")
    lanes = [lane.wait for lane in pressure.lanes if waits.is_waiting(lane.wait)]
    reasons = dict.fromkeys([engines, *lanes] if engines else lanes)
    waiting, _, _ = (board.outside or waits.trainer(pressure)).partition(",")
    trouble = board.trainer_trouble().short
    expired = waits.expired(pressure) if waiting else ""
    trainer = [f"trainer waits: {waiting}{expired and f', {expired}'}"] if waiting else []
    return [*filter(None, [trouble]), *trainer] + [f"workers wait: {reason}" for reason in reasons]
