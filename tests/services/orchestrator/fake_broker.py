"""The orchestrator of a test, and a broker that says what the test wants."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import zmq
from msgspec.structs import replace
from tests.services.orchestrator.children import DRAINABLE, argv

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.transport.sockets import Channel, Context, make_context
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import (
    Drain,
    LaneStatus,
    LedgerCounts,
    Pressure,
    RestartWorker,
    ScaleDecision,
    Setting,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Ok
from rolloutmq.services.orchestrator.server import Orchestrator
from rolloutmq.services.process.identity import alive
from rolloutmq.services.process.runner import Stop

TOKEN = f"server-{os.getpid()}"


def config(**orchestrator: Any) -> RunConfig:
    quick = {"tick_s": 0.02, "backoff_s": 0.01, "crash_limit": 3}
    return RunConfig.model_validate(
        {
            "environment": {"env": {"entry": "m:C", "min_workers": 1, "max_workers": 3}},
            "orchestrator": {**quick, **orchestrator},
        }
    )


def living(layout: RunLayout) -> dict[str, int]:
    """Return name and pid of the workers that live, as the orchestrator's file says."""
    workers = read_json(layout.workers, list[ProcessIdentity]) or []
    return {one.name: one.pid for one in workers if alive(one)}


class FakeBroker:
    """Publishes the pressure that the test sets, answers drains, keeps the decisions that it hears."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.states: dict[str, WorkerState] = {}
        self.wanted: dict[str, int | None] = {}
        self.produced = 0
        """Groups that each worker reports."""
        self.accepted = 0
        """Sequences that it has accepted from the environment."""
        self.told: set[str] = set()
        self.joined: dict[str, WorkerState] = {}
        """Workers that joined by themselves; a drain ends them."""
        self.in_hand: dict[str, int] = {}
        self.settings: dict[str, Setting] = {}
        self.restarts: tuple[RestartWorker, ...] = ()
        self.silent_since: dict[int, float] = {}
        self.drained: list[str] = []
        self.decisions: list[ScaleDecision] = []
        self._number = 0

    async def run(self, context: Context) -> None:
        events, serve, publish = (context.socket(kind) for kind in (zmq.PUB, zmq.ROUTER, zmq.SUB))
        publish.setsockopt(zmq.SUBSCRIBE, b"")
        sockets = (events, serve, publish)
        for socket in sockets:
            socket.linger = 0  # by default what nobody reads any more would hold the context up
            socket.bind("tcp://127.0.0.1:*")
        at = [socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for socket in sockets]
        endpoints = Endpoints(ingest="", serve=at[1], events=at[0], publish=at[2], pid=1, epoch=1)
        write_json(self.layout.endpoints, endpoints)
        channels = [Channel(socket) for socket in sockets]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._press(channels[0]))
                tasks.create_task(self._answer(channels[1]))
                tasks.create_task(self._listen(channels[2]))
        finally:
            for channel in channels:
                channel.close()

    async def _press(self, events: Channel) -> None:
        while True:
            self._number += 1
            events.try_send([topics.PRESSURE, codec.encode(self._state())])
            await asyncio.sleep(0.01)

    async def _answer(self, serve: Channel) -> None:
        while True:
            *way, request = await serve.receive()
            drain = codec.decode_request(request)
            assert isinstance(drain, Drain)
            await serve.send([*way, codec.encode(Ok())])
            if drain.worker not in self.drained:
                self.drained.append(drain.worker)
                if drain.worker in self.joined:
                    self.joined[drain.worker] = WorkerState.GONE
                    continue
                # As the worker that hears it on the bus would; a crashed one hears nothing.
                if (pid := living(self.layout).get(drain.worker)) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)

    async def _listen(self, publish: Channel) -> None:
        while True:
            topic, payload = await publish.receive()
            if topic == b"telemetry.scale.inference":
                continue
            assert topic == b"telemetry.scale.env"
            event = codec.decode_event(payload)
            assert isinstance(event, ScaleDecision)
            self.decisions.append(event)

    def _state(self) -> Pressure:
        return Pressure(
            epoch=1,
            number=self._number,
            at=0.0,
            rollout_pressure=1.0,
            queued_sequences=0,
            batch_sequences=0,
            queued_groups=0,
            queued_bytes=0,
            leased_bytes=0,
            high_bytes=0,
            step=0,
            consumed_per_s=0.0,
            produced_per_s=0.0,
            staleness_max=0,
            trainer_wait="",
            ledger=LedgerCounts(),
            lanes=(self._lane(),),
            workers=(
                *(self._status(name, pid) for name, pid in living(self.layout).items()),
                *(
                    replace(self._status(name, 9), state=state, joined=True)
                    for name, state in self.joined.items()
                ),
            ),
            wanted=self.wanted,
            restarts=self.restarts,
            settings=self.settings,
        )

    def _lane(self) -> LaneStatus:
        return LaneStatus(
            env="env", split=Split.TRAIN, weight=1.0, min_share=0.0, accepted_sequences=self.accepted
        )

    def _status(self, name: str, pid: int) -> WorkerStatus:
        return WorkerStatus(
            worker=name,
            env="env",
            state=self.states.get(name, WorkerState.READY),
            pid=pid,
            host="",
            in_hand=self.in_hand.get(name, 0),
            produced=self.produced,
            abandoned=0,
            blocked_s=0.0,
            silent_s=time.monotonic() - self.silent_since.get(pid, time.monotonic()),
            draining=name in self.told or self.states.get(name) is WorkerState.DRAINING,
            error="it always raises",
        )


@asynccontextmanager
async def broker(layout: RunLayout) -> AsyncIterator[FakeBroker]:
    context = make_context()
    fake = FakeBroker(layout)
    task = asyncio.create_task(fake.run(context))
    try:
        yield fake
    finally:
        task.cancel()
        await asyncio.wait({task})
        context.destroy(linger=0)
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def orchestrator(
    layout: RunLayout, settings: RunConfig, code: str = DRAINABLE
) -> AsyncIterator["asyncio.Task[None]"]:
    """Run one until the block ends; then it is asked to stop."""
    stop = Stop()
    service = Orchestrator(settings, layout, TOKEN, lambda name: (*argv(code), name))
    task = asyncio.create_task(service.run(stop))
    try:
        yield task
    finally:
        stop.request("the test ends")
        await asyncio.wait({task})
    if not isinstance(task.exception(), ExceptionGroup):
        task.result()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        # What is waited for is a file or a process: there is no event.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
