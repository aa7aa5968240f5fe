"""Cost of the panel: what telemetry and the dashboard take while somebody has the page of a run open.

The run has the load of `broker.throughput`, at durability `disk`: two producers of the SDK, a broker and a consumer.
Producers send as fast as the broker lets them, so its queue is full, and the consumer trains at a settled rate, far
above that of a real trainer: eight steps a second. Telemetry samples these processes and records all events.

The session has phases without and with an open page in turns (without, with, with, without), so a drift of the machine
meets both alike. A page is read by a client that asks for what the page asks for; the work of the browser is not
counted. The cost is the CPU of telemetry and dashboard with a page, less that of telemetry alone in the phases without.
A phase with a page begins with its opening, so that reading on in the record counts, too. The start of the server is a
row of its own. Bytes are compared between the first and the last phase with a page.

    python -m benchmarks.end_to_end.panel DIRECTORY RATE    the consumer, at groups a second
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Final

import psutil
import uvloop

from benchmarks.broker import throughput
from benchmarks.end_to_end.page_client import OpenPage, PageClient
from benchmarks.harness import cpu, scratch, stage
from benchmarks.harness.row import Row, near, within
from rolloutmq import Consumer
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.services.process.identity import identify

SHAPE: Final = throughput.MIDDLE
RATE: Final = 500.0
"""Groups a second."""
PHASES: Final = 12
PHASE_S: Final = 50.0
SETTLE_S: Final = 10.0
"""Time until the queue is full and the rate settled."""
TURNS: Final = (False, True, True, False)
"""Whether the page is open, phase after phase."""
UPDATES_PER_S: Final = 0.9
"""Fewest updates of a page: there is one a second, and the last one may be under way."""
GOAL_PERCENT: Final = 3.0
"""Most CPU of the panel, in percent of one core."""
GROWTH: Final = 1.5
"""Most bytes of an update and of the memory at the end, relative to those at the beginning."""
RECORD_GROWTH: Final = 1.2
"""Most bytes a second of the record at the end, relative to those at the beginning."""
LOAD_PART: Final = 0.9
"""Least part of the rate that must be reached."""
TAIL_BYTES: Final = 1 << 18
"""End of the record that has a state of the queue."""
LOOK_S: Final = 0.1
LATE_S: Final = 1.0
"""Most time by which the consumer makes up for a pause."""


@dataclass(frozen=True)
class Phase:
    """One phase; CPU and bytes are those of its time.

    Attributes:
        is_open: Whether a page was open.
        lasted_s: Its length.
        telemetry_s, dashboard_s: Seconds of CPU.
        opening: Bytes that the page read until it knew everything.
        later: Bytes that it read afterwards.
        updates: Updates of the page.
        recorded: Bytes that the record of the run grew by.
        resident: Bytes of memory of telemetry and dashboard at the end.
    """

    is_open: bool
    lasted_s: float
    telemetry_s: float
    dashboard_s: float = 0.0
    opening: int = 0
    later: int = 0
    updates: int = 0
    recorded: int = 0
    resident: int = 0


@dataclass(frozen=True)
class Session:
    """One session.

    Attributes:
        rate: Groups a second.
        phases: All phases.
        linked_s: CPU of the server until it printed its link.
        opened_s: The same until the first page knew everything.
    """

    rate: float
    phases: tuple[Phase, ...]
    linked_s: float
    opened_s: float

    def of(self, *, is_open: bool) -> list[Phase]:
        """Return the phases with or without a page."""
        return [phase for phase in self.phases if phase.is_open is is_open]


def rows() -> Iterator[Row]:
    """One session of ten minutes."""
    with scratch.directory() as directory:
        yield from judged(session(directory))


def judged(session: Session) -> Iterator[Row]:
    """Return the rows of a session."""
    minutes = sum(phase.lasted_s for phase in session.phases) / 60
    payload = f"{minutes:.0f} minutes, {session.rate:g} a second of {SHAPE}"
    pages = session.of(is_open=True)
    alone, panel = percents(session)
    yield within(
        "CPU of telemetry and dashboard with a page open, above telemetry alone, % of a core, disk",
        payload,
        partial(float, panel),
        partial(float, alone),
        "telemetry alone",
        GOAL_PERCENT,
        rounds=1,
    )
    for figure, of, most in (
        ("sent to a page, kB an update, disk", update_kb, GROWTH),
        ("memory of telemetry and dashboard, MB, disk", resident_mb, GROWTH),
        ("record of a run, kB/s, disk", recorded_kb, RECORD_GROWTH),
        ("read to open a page, kB, disk", opening_kb, None),
    ):
        last, first = partial(of, pages[-1]), partial(of, pages[0])
        yield near(figure, f"{payload}, the end", last, first, "the beginning", most, rounds=1)
    yield within(
        "CPU until the first page knows everything, s, disk",
        payload,
        partial(float, session.opened_s),
        partial(float, session.linked_s),
        "until the link is printed",
        rounds=1,
    )


def percents(session: Session) -> tuple[float, float]:
    """Return the CPU of telemetry without a page, and what the panel takes above it, in percent of a core."""
    pages = session.of(is_open=True)
    alone = mean(phase.telemetry_s / phase.lasted_s for phase in session.of(is_open=False))
    panel = mean((phase.telemetry_s + phase.dashboard_s) / phase.lasted_s for phase in pages)
    return 100 * alone, 100 * (panel - alone)


def update_kb(phase: Phase) -> float:
    """Return the bytes of an update after the opening, in kB."""
    return phase.later / 1e3 / (phase.updates - 1)


def resident_mb(phase: Phase) -> float:
    """Return the memory of both processes at the end of a phase, in MB."""
    return phase.resident / 1e6


def recorded_kb(phase: Phase) -> float:
    """Return the growth of the record, in kB a second."""
    return phase.recorded / 1e3 / phase.lasted_s


def opening_kb(phase: Phase) -> float:
    """Return the bytes that a page read until it knew everything, in kB."""
    return phase.opening / 1e3


def session(
    directory: Path,
    phases: int = PHASES,
    phase_s: float = PHASE_S,
    settle_s: float = SETTLE_S,
    rate: float = RATE,
) -> Session:
    """Play a session in a new run directory.

    Raises:
        StageError: A process failed, the load was less than the rate, the page was lost, or it got fewer updates than
            one a second.
    """
    layout = RunLayout(directory)
    calls = [
        (f"producer-{number}", directory, SHAPE.word, 1, throughput.SLOTS)
        for number in range(throughput.PRODUCERS)
    ]
    with (
        stage.broker(layout, stage.config(durability="disk")) as broker,
        stage.player("end_to_end.panel", directory, rate) as consumer,
        stage.players("broker.throughput", calls) as producers,
        stage.service(layout, "telemetry") as telemetry,
    ):
        for one in (consumer, *producers):
            one.wait_ready()
        named = {Role.BROKER: broker.pid, Role.TELEMETRY: telemetry.pid, Role.TRAINER: consumer.pid}
        _list(layout, named, [one.pid for one in producers])
        for one in (consumer, *producers):
            one.begin()
        _await_training(layout)
        time.sleep(settle_s)
        before, began = trained(layout), time.monotonic()
        played = _phases(layout, telemetry.pid, phases, phase_s)
        whole = trained(layout) - before + throughput.batch_groups(SHAPE)  # one batch is under way
        reached = whole / (time.monotonic() - began)
    if reached < LOAD_PART * rate:
        raise stage.StageError(f"the load was {reached:.0f} groups a second instead of {rate:g}")
    return Session(rate, *played)


def _await_training(layout: RunLayout) -> None:
    deadline = time.monotonic() + stage.DEADLINE_S
    while not trained(layout):
        if time.monotonic() > deadline:
            raise stage.StageError("telemetry has recorded no trained group")
        time.sleep(LOOK_S)


def trained(layout: RunLayout) -> int:
    """Return the groups trained so far, by the last state of the queue in the record; 0 without one."""
    if not layout.metrics.exists():
        return 0
    with layout.metrics.open("rb") as record:
        record.seek(-min(TAIL_BYTES, _size(layout)), os.SEEK_END)
        lines = record.read().splitlines()
    for line in reversed(lines):
        if b'"kind":"pressure"' in line:
            with contextlib.suppress(ValueError):
                return int(json.loads(line)["ledger"]["trained"])
    return 0


def _list(layout: RunLayout, named: dict[Role, int], producers: Sequence[int]) -> None:
    """List the processes as a launcher does, so that telemetry samples them."""
    write_json(layout.processes, [identify(role.value, role, pid, "bench") for role, pid in named.items()])
    workers = [
        identify(f"bench-{number}-0", Role.WORKER, pid, "bench") for number, pid in enumerate(producers)
    ]
    write_json(layout.workers, workers)


def _phases(
    layout: RunLayout, telemetry: int, count: int, lasts_s: float
) -> tuple[tuple[Phase, ...], float, float]:
    """Play the phases; return them, and what a session knows of the start of the server.

    The server starts after the first phase, and stays: without a page it does nothing.
    """
    played = [_without(layout, telemetry, lasts_s)]
    with dashboard(layout) as (server, link):
        linked_s = cpu.spent_s(server)
        client = PageClient(link)
        with client.opened() as page:
            _await(page)
            opened_s = cpu.spent_s(server)
        for number in range(1, count):
            if TURNS[number % len(TURNS)]:
                played.append(_with_page(layout, telemetry, server, client, lasts_s))
            else:
                played.append(_without(layout, telemetry, lasts_s))
    return tuple(played), linked_s, opened_s


def _without(layout: RunLayout, telemetry: int, lasts_s: float) -> Phase:
    before, size, began = cpu.spent_s(telemetry), _size(layout), time.monotonic()
    time.sleep(lasts_s)
    spent_s = cpu.spent_s(telemetry) - before
    return Phase(False, time.monotonic() - began, telemetry_s=spent_s, recorded=_size(layout) - size)


def _with_page(layout: RunLayout, telemetry: int, server: int, client: PageClient, lasts_s: float) -> Phase:
    pids = telemetry, server
    before, size, began = [*map(cpu.spent_s, pids)], _size(layout), time.monotonic()
    with client.opened() as page:
        _await(page)
        time.sleep(max(0.0, began + lasts_s - time.monotonic()))
        page.check()
        lasted_s = time.monotonic() - began
        after = [*map(cpu.spent_s, pids)]
        resident = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    if page.updates < max(2, int(UPDATES_PER_S * lasted_s)):
        raise stage.StageError(f"the page got {page.updates} updates in {lasted_s:.0f} s")
    return Phase(
        True,
        lasted_s,
        after[0] - before[0],
        after[1] - before[1],
        opening=page.opening,
        later=page.later,
        updates=page.updates,
        recorded=_size(layout) - size,
        resident=resident,
    )


def _await(page: OpenPage) -> None:
    if not page.whole.wait(stage.DEADLINE_S):
        raise stage.StageError("the page got no update")
    page.check()


def _size(layout: RunLayout) -> int:
    return layout.metrics.stat().st_size if layout.metrics.exists() else 0


@contextlib.contextmanager
def dashboard(layout: RunLayout) -> Iterator[tuple[int, str]]:
    """Start the server of the page, and kill it at the end; yield its process id and its link."""
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "dashboard", "-r", str(layout.root)]
    with (
        (layout.root / "dashboard.out").open("ab") as log,
        stage.ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)) as server,
    ):
        assert server.stdout is not None
        yield server.pid, server.stdout.readline().decode().strip()


async def _consume(directory: Path, rate: float) -> None:
    """Train a batch at a time, each when it is due, for ever."""
    sequences = throughput.batch_groups(SHAPE) * SHAPE.sequences
    async with Consumer.open(directory, sequences=sequences, ahead=True) as consumer:
        await asyncio.to_thread(stage.ready)
        due = time.monotonic()
        async for batch in consumer:
            due = max(due + len(batch.groups) / rate, time.monotonic() - LATE_S)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            consumer.log(batch.step, loss=1.0 / (1.0 + batch.step))
            await batch.ack()


def main(directory: str, rate: str) -> None:
    """Run the consumer."""
    uvloop.run(_consume(Path(directory), float(rate)))


if __name__ == "__main__":
    main(*sys.argv[1:])
