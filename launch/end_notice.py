"""The end of a run, as its user sees it: what it waits for, and the exception in his code that ended it.

The processes end group by group. Those of the present group are named with what they still do, and with the time after
which they are killed.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from textwrap import indent
from typing import Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import GetStatus, StatusReply, WorkerStatus
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView
from rolloutmq.services.worker.user_code.failures import UserFailure

DOES: Final[Mapping[Role, str]] = {
    Role.TRAINER: "settles its step and writes a checkpoint",
    Role.CURRICULUM: "saves its state",
    Role.CLUSTER: "ends the processes on the cluster",
    Role.GATEWAY: "answers its requests",
    Role.INFERENCE: "answers its requests",
    Role.RELAY: "ends its transfers",
    Role.TEACHER: "answers its requests",
    Role.BROKER: "saves the queued groups",
    Role.TELEMETRY: "records the end",
}
JOINED_S: Final = 20.0
"""Longest wait for the engines and relays of other hosts, as for the run's own. They hear of it within a second."""
JOINED_LOOK_S: Final = 0.2
ANSWER_S: Final = 2.0
SILENT_S: Final = 5.0
"""Silence of one of them from which nobody waits for it."""
_PASSED_ON: Final = re.compile(
    r"(?:orchestrator|curriculum): exit code \d+: error: (environment\..*)", re.DOTALL
)
"""Reason of a process that ended because an environment failed."""
_OWN: Final = re.compile(r"environment\.[^:]+: (?!all workers failed;).*", re.DOTALL)
"""Reason of the environment itself, inside it."""


async def until_joined_end(layout: RunLayout, is_killed: Callable[[], bool]) -> None:
    """Wait until the engines and relays of other hosts have ended, at most `JOINED_S`, or until this run is killed."""
    found = endpoints_of(layout)
    if found is None:
        return
    until = time.monotonic() + JOINED_S
    async with BrokerClient(found.serve) as client:
        while not is_killed() and time.monotonic() < until:
            try:
                reply = await client.request(GetStatus(), ANSWER_S)
            except RolloutMQError:
                return
            network = reply.network if isinstance(reply, StatusReply) else None
            if network is None or not _living(network):
                return
            await asyncio.sleep(JOINED_LOOK_S)


def _living(network: NetworkStatus) -> list[str]:
    """Return the engines and relays of other hosts that are heard."""
    engines = [one.name for one in network.engines if one.silent_s <= SILENT_S]
    return engines + [one.name for one in network.relays if one.silent_s <= SILENT_S]


def end_notice(
    views: Iterable[ProcessView],
    workers: Iterable[WorkerStatus],
    grace_s: Mapping[Role, float],
    drain_s: float,
    now: float,
) -> str:
    """Return which processes the end waits for, and why; empty if it waits for none.

    Args:
        views: Processes of the launcher.
        workers: Workers as the broker last knew them.
        grace_s: Seconds from the request to SIGKILL, by role.
        drain_s: Seconds that workers have to finish their rollouts.
        now: Present time on the clock of the views.
    """
    stopping = [view for view in views if view.phase is Phase.STOPPING]
    parts = [
        _orchestrator(view, workers, drain_s, now)
        if view.role is Role.ORCHESTRATOR
        else f"{view.name} {DOES.get(view.role, 'ends')}, killed in {_left_s(view, grace_s[view.role], now):.0f} s"
        for view in stopping
    ]
    return f"ending, waits for: {'; '.join(parts)}" if parts else ""


def _orchestrator(view: ProcessView, workers: Iterable[WorkerStatus], drain_s: float, now: float) -> str:
    busy = [worker for worker in workers if worker.in_hand]
    if not busy:
        return f"{view.name} ends its workers"
    names = ", ".join(worker.worker for worker in busy[:3]) + (", ..." if len(busy) > 3 else "")
    rollouts = sum(worker.in_hand for worker in busy)
    left_s = _left_s(view, drain_s, now)
    within = f"for at most {left_s:.0f} s (orchestrator.end_deadline_s)" if left_s else "and are ended now"
    return f"{view.name}, whose workers finish {rollouts} rollouts {within}: {names}"


def _left_s(view: ProcessView, seconds: float, now: float) -> float:
    return max(0.0, view.since + seconds - now)


def cause_of(reason: str) -> str:
    """Return why a run failed: of an environment its own reason alone, without the processes that passed it on.

    Args:
        reason: Reason of the process that ended the run, with those of others inside.
    """
    passed_on = _PASSED_ON.match(reason)
    if passed_on is None:
        return reason
    own = _OWN.search(passed_on[1])
    return own[0] if own is not None else passed_on[1]


def failure_report(layout: RunLayout, reason: str, since: float) -> str:
    """Return the last exception of the environment that ended a run, with its frames; empty if there is none.

    Args:
        layout: Files of the run.
        reason: Why the run ended.
        since: Beginning of this life of the run, wall-clock seconds.
    """
    found = re.match(r"environment\.([^.:]+)", reason)
    if found is None:
        return ""
    return _failure_of(layout, found[1], since)


def failure_reports(layout: RunLayout, since: float) -> list[str]:
    """Return the last exception of each environment that had one, whatever ended the run, or nothing did.

    Args:
        layout: Files of the run.
        since: Beginning of this life of the run, wall-clock seconds.
    """
    envs = sorted(path.stem for path in layout.failures.glob("*.json"))
    return [told for env in envs if (told := _failure_of(layout, env, since))]


def _failure_of(layout: RunLayout, env: str, since: float) -> str:
    path, failure = layout.failure(env), None
    with suppress(OSError, msgspec.DecodeError):
        failure = read_json(path, UserFailure) if path.stat().st_mtime >= since else None
    if failure is None:
        return ""
    return f"last error of environment {env}: {failure.headline}\n\n{indent(failure.report, '    ')}\n"
