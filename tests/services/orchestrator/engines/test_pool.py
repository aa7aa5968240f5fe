"""The pool with processes that behave as engines do, under the pool alone and under the orchestrator."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.orchestrator.children import DRAINABLE, PATIENT, STUBBORN, argv, wait_for, wait_up

from rolloutmq.bus import engine_registry
from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.transport.pubsub import Subscriber
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import InferenceAddress, RunLayout, Supervision, Target, WorkerRecord
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role
from rolloutmq.schemas.wire.control import SetWorkers
from rolloutmq.schemas.wire.telemetry import EngineDecision
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.orchestrator.autoscaling.autoscaler import ScaleTarget
from rolloutmq.services.orchestrator.autoscaling.control_law import INFERENCE_BOUND
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, PressureSample
from rolloutmq.services.orchestrator.engines import pool as pooling
from rolloutmq.services.orchestrator.engines.pool import EnginePool, Placement
from rolloutmq.services.orchestrator.engines.scaling import EngineBound
from rolloutmq.services.orchestrator.server import Orchestrator
from rolloutmq.services.process.child import Exit, LocalSpawner, Process, spawn
from rolloutmq.services.process.identity import MARKER, alive, identify
from rolloutmq.services.process.runner import Stop

TOKEN = f"pool-{os.getpid()}"
ENGINE = """
import json, os, signal, sys, time
name, root = sys.argv[1:3]
going = []
signal.signal(signal.SIGUSR1, lambda *_: going.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
print('up', flush=True)
number = 0
while not going:
    number += 1
    path = f'{root}/{name}.json.{os.getpid()}.tmp'
    with open(path, 'w') as file:
        json.dump({'url': 'http://x', 'pid': os.getpid(), 'name': name, 'number': number, 'busy': 0.45}, file)
    os.replace(path, f'{root}/{name}.json')
    time.sleep(0.02)
"""
"""Says where it is until SIGUSR1, and leaves its address behind."""
BUSY = ENGINE.replace("while not going:", "while True:").replace(
    "'number'", "'draining': bool(going), 'number'"
)
"""Says that it drains from SIGUSR1 on, and ends only at SIGTERM."""
FAILS = "import sys; sys.exit('error: no such weights')"
HELD = {"env": EngineBound(inference_bound=True, short=1.0)}


@pytest.fixture(autouse=True)
def every_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every decision published: the tests read them."""
    monkeypatch.setattr(pooling, "REPEAT_S", 0.0)


def config(**inference: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "environment": {"env": {"entry": "m:C"}},
            "inference": {"max_engines": 3, "engine_confirm_s": 0.1, "engine_idle_s": 0.1, **inference},
            "orchestrator": {"tick_s": 0.02, "backoff_s": 0.01, "crash_limit": 3, "term_grace_s": 0.5},
            "broker": {"durability": "memory"},
        }
    )


def living(layout: RunLayout) -> dict[str, int]:
    """Return name and pid of the engines that live, as the pool's file says."""
    found = read_json(layout.engines, list[ProcessIdentity]) or []
    return {one.name: one.pid for one in found if alive(one)}


def command(layout: RunLayout, code: str) -> Callable[[str], tuple[str, ...]]:
    return lambda name: (*argv(code), name, str(layout.root))


class Table:
    """A pool that is looked at until something is so."""

    def __init__(self, layout: RunLayout, pool: EnginePool, decisions: list[EngineDecision]) -> None:
        self.layout = layout
        self.pool = pool
        self.decisions = decisions

    async def until(
        self,
        condition: Callable[[], bool],
        bounds: Mapping[str, EngineBound] | None = None,
        wanted: int | None = None,
    ) -> None:
        async with asyncio.timeout(30):
            # What is waited for is a file or a process: there is no event.
            while not condition():
                self.pool.look(bounds or {}, time.monotonic(), wanted)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def pool(
    run_dir: Path,
    settings: RunConfig | None = None,
    code: str = ENGINE,
    earlier: Supervision | None = None,
    placement: Placement | None = None,
) -> AsyncIterator[Table]:
    layout = RunLayout(run_dir)
    write_json(layout.inference, InferenceAddress(url="http://first", pid=1, busy=0.45))
    decisions: list[EngineDecision] = []
    made = EnginePool(
        settings or config(),
        layout,
        TOKEN,
        decisions.append,
        command(layout, code),
        placement=placement,
    )
    async with made:
        await made.take_over(earlier)
        yield Table(layout, made, decisions)


async def test_engines_come_and_go_as_an_operator_asks(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with pool(run_dir) as table:
        await table.until(lambda: table.pool.ready == 3, wanted=3)
        assert list(living(table.layout)) == ["inference-1", "inference-2"]
        await table.until(lambda: list(living(table.layout)) == ["inference-1"], wanted=2)
        await table.until(lambda: not table.layout.engine("inference-2").exists(), wanted=2)
        assert table.layout.engine("inference-1").exists()
        await table.until(lambda: table.pool.ready == 1 and not living(table.layout), wanted=1)
        last = table.decisions[-1]
        assert (last.target, last.reason) == (1, "pinned to 1")

        def ends() -> list[str]:
            return [line for line in caplog.messages if line.startswith("ended name=inference-")]

        await table.until(lambda: len(ends()) == 2, wanted=1)
        assert all(line.endswith("how=exit code 0") for line in ends())
    assert table.layout.inference.exists()


async def test_workers_that_are_held_back_bring_an_engine_and_idle_ones_end(run_dir: Path) -> None:
    async with pool(run_dir) as table:
        await table.until(lambda: table.pool.ready == 3, HELD)
        assert any("inference_bound: env short of 1.0 workers" in one.reason for one in table.decisions)
        # Each says that it is 45 % busy: two would do the work of three, but one not that of two.
        await table.until(lambda: len(living(table.layout)) == 1, {"env": EngineBound()})
        seen = len(table.decisions)
        await table.until(lambda: len(table.decisions) > seen + 30, {"env": EngineBound()})
        assert (table.decisions[-1].current, table.decisions[-1].target) == (2, 2)
        assert table.decisions[-1].reason == "hold: 0.90 of 2 engines busy"
    assert living(table.layout) == {}


async def test_the_fewest_are_there_from_the_start(run_dir: Path) -> None:
    async with pool(run_dir, config(min_engines=2)) as table:
        await table.until(lambda: table.pool.ready == 2)
        assert list(living(table.layout)) == ["inference-1"]
        await table.until(lambda: table.decisions[-1].reason.endswith("2 to 3 allowed"), wanted=1)


async def test_a_killed_engine_comes_back_under_its_name(run_dir: Path) -> None:
    async with pool(run_dir) as table:
        await table.until(lambda: table.pool.ready == 2, wanted=2)
        first = living(table.layout)["inference-1"]
        os.kill(first, signal.SIGKILL)
        await table.until(lambda: table.pool.ready == 1, wanted=2)  # what the dead left does not count
        assert table.pool.serving == 2, "to the law of the workers it is the same pool"
        await table.until(lambda: table.pool.ready == 2, wanted=2)
        assert living(table.layout)["inference-1"] != first
        await table.until(lambda: table.pool.serving == 1, wanted=1)


async def test_an_engine_that_was_drained_by_hand_is_replaced(run_dir: Path) -> None:
    async with pool(run_dir) as table:
        await table.until(lambda: table.pool.ready == 2, wanted=2)
        first = living(table.layout)["inference-1"]
        os.kill(first, signal.SIGUSR1)
        await table.until(lambda: living(table.layout).get("inference-1", first) != first, wanted=2)


async def test_a_crash_loop_is_given_up_with_its_reason_until_an_operator_says_otherwise(
    run_dir: Path,
) -> None:
    async with pool(run_dir, code=FAILS) as table:
        await table.until(lambda: bool(table.decisions) and "given up" in table.decisions[-1].reason, HELD)
        assert table.decisions[-1].reason == (
            "hold: an engine was given up: crashed 3 times in a row, each within 10 s of its start; "
            "the last: exit code 1: error: no such weights"
        )
        assert (table.decisions[-1].current, table.decisions[-1].target) == (2, 2)
        tries = table.layout.log("inference-1").read_text().count("no such weights")
        await table.until(lambda: table.decisions[-1].current == 1, wanted=1)
        await table.until(
            lambda: table.layout.log("inference-1").read_text().count("no such weights") > tries, wanted=2
        )


async def test_an_engine_that_hangs_is_not_ready(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_registry, "SILENT_S", 0.2)
    async with pool(run_dir) as table:
        await table.until(lambda: table.pool.ready == 2, wanted=2)
        pid = living(table.layout)["inference-1"]
        os.kill(pid, signal.SIGSTOP)
        await table.until(lambda: table.pool.ready == 1)
        assert table.decisions[-1].target == 2
        os.kill(pid, signal.SIGCONT)
        await table.until(lambda: table.pool.ready == 2)


async def test_a_stubborn_engine_is_ended_at_the_deadline(run_dir: Path) -> None:
    settings = config()
    quick = settings.orchestrator.model_copy(update={"drain_deadline_s": 0.05, "term_grace_s": 0.05})
    async with pool(run_dir, settings.model_copy(update={"orchestrator": quick}), STUBBORN) as table:
        await table.until(lambda: bool(living(table.layout)), wanted=2)
        await asyncio.to_thread(wait_up, table.layout.log("inference-1"))
        await table.until(lambda: not living(table.layout), wanted=1)


async def test_an_engine_that_is_not_ready_goes_before_the_youngest(run_dir: Path) -> None:
    settings = config()
    quick = settings.orchestrator.model_copy(update={"drain_deadline_s": 0.05, "term_grace_s": 0.05})
    only_the_second = f"import sys\nif sys.argv[1] == 'inference-1':\n    {PATIENT}\n{ENGINE}"
    async with pool(run_dir, settings.model_copy(update={"orchestrator": quick}), only_the_second) as table:
        await table.until(lambda: table.pool.ready == 2 and len(living(table.layout)) == 2, wanted=3)
        await table.until(lambda: list(living(table.layout)) == ["inference-2"], wanted=2)


async def test_engines_of_another_run_are_ended_and_their_addresses_removed(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with engine_of(layout, "other") as stray:
        await until(layout.engine("inference-1").exists)
        write_json(layout.engines, [stray.identity])
        async with pool(run_dir):
            assert stray.poll() == Exit(-signal.SIGTERM)
            assert not layout.engine("inference-1").exists()


async def test_an_engine_of_this_run_that_is_in_no_file_is_ended(run_dir: Path) -> None:
    """Its orchestrator was killed before it wrote the file."""
    layout = RunLayout(run_dir)
    with engine_of(layout, TOKEN) as stray:
        await until(layout.engine("inference-1").exists)
        async with pool(run_dir):
            await until(lambda: stray.poll() == Exit(-signal.SIGKILL))
            assert not layout.engine("inference-1").exists()


async def test_an_engine_that_starts_is_adopted_as_one_that_starts(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with engine_of(layout, TOKEN, PATIENT) as starting:
        await asyncio.to_thread(wait_up, layout.log("inference-1"))
        write_json(layout.engines, [starting.identity])
        async with pool(run_dir, earlier=known(2)) as table:
            assert (table.pool.serving, table.pool.ready) == (1, 1)
            await table.until(lambda: len(table.decisions) > 3, {"env": EngineBound()})
            assert table.decisions[-1].reason == "hold: 1 starting, 0 draining"
            assert living(layout) == {"inference-1": starting.identity.pid}


async def test_the_earlier_number_of_engines_is_restored(run_dir: Path) -> None:
    """An engine that crashed and waited for its restart at the kill has no process to adopt."""
    layout = RunLayout(run_dir)
    with engine_of(layout, TOKEN) as engine:
        await until(layout.engine("inference-1").exists)
        write_json(layout.engines, [engine.identity])
        async with pool(run_dir, earlier=known(3)) as table:
            assert table.pool.serving == 2, "the saturation detector would drop the capacity it knows"
            await table.until(lambda: table.pool.ready == 3)
            assert living(layout)["inference-1"] == engine.identity.pid


async def test_an_engine_that_was_given_up_stays_so_for_the_next_orchestrator(run_dir: Path) -> None:
    gone = WorkerRecord(
        worker="inference-1", env="inference", phase="fatal", since=5.0, reason="no such weights", crashes=3
    )
    async with pool(run_dir, earlier=known(2, gone)) as table:
        await table.until(lambda: len(table.decisions) > 3, HELD)
        assert table.decisions[-1].reason == "hold: an engine was given up: no such weights"
        assert living(table.layout) == {}
        await table.until(lambda: table.decisions[-1].current == 1, wanted=1)


@contextmanager
def engine_of(layout: RunLayout, token: str, code: str = ENGINE) -> Iterator[Process]:
    """Run the first further engine as an earlier orchestrator of a run would."""
    name = "inference-1"
    log = str(layout.log(name))
    spec = ProcessSpec(name=name, role=Role.INFERENCE, argv=command(layout, code)(name), log=log)
    engine = spawn(spec, token)
    try:
        yield engine
    finally:
        engine.send_group(signal.SIGKILL)
        engine.close()


def known(target: int, *lives: WorkerRecord) -> Supervision:
    """Return what an earlier orchestrator reported of the engines."""
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), f"{TOKEN}/orchestrator")
    engines = Target(env="inference", target=target, current=target, reason="so it was")
    return Supervision(orchestrator=me, engines=engines, engine_lives=lives)


async def test_a_pool_of_one_does_nothing(run_dir: Path) -> None:
    async with pool(run_dir, config(max_engines=1)) as table:
        table.pool.look(HELD, time.monotonic(), 3)
        assert table.pool.ready == 1
    assert table.decisions == []
    assert living(table.layout) == {}


# Under the orchestrator


@asynccontextmanager
async def orchestrated(
    layout: RunLayout, settings: RunConfig
) -> AsyncIterator[tuple[Orchestrator, Broker, list[EngineDecision]]]:
    """Run broker and orchestrator until the block ends, and keep the decisions that the broker forwards."""
    stop, decisions = Stop(), list[EngineDecision]()
    write_json(layout.inference, InferenceAddress(url="http://first", pid=1))
    service = Orchestrator(
        settings, layout, TOKEN, lambda name: (*argv(DRAINABLE), name), command(layout, ENGINE)
    )
    with running_broker(settings, layout) as broker:

        async def listen() -> None:
            async with Subscriber(broker.endpoints.events, [topics.telemetry("scale", "inference")]) as heard:
                async for _, payload in heard:
                    event = codec.decode_event(payload)
                    assert isinstance(event, EngineDecision)
                    decisions.append(event)

        tasks = [asyncio.create_task(listen()), asyncio.create_task(service.run(stop))]
        try:
            yield service, broker, decisions
        finally:
            stop.request("the test ends")
            tasks[0].cancel()
            await asyncio.wait(tasks)
            broker.stop()
    tasks[1].result()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        # What is waited for is a file or a process: there is no event.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_an_operator_scales_the_engines_over_the_bus(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with (
        orchestrated(layout, config()) as (service, broker, decisions),
        BrokerClient(broker.endpoints.serve) as client,
    ):
        await client.request(SetWorkers(env="inference", count=2))
        await until(lambda: service._engines.ready == 2)
        await until(lambda: bool(decisions) and decisions[-1].reason == "pinned to 2")
        await client.request(SetWorkers(env="inference", count=1))
        await until(lambda: service._engines.ready == 1 and not living(layout))


async def test_what_the_rule_of_the_workers_finds_reaches_the_engines(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scripted(scale: ScaleTarget, sample: PressureSample, _now: float) -> Decision:
        scale.decision = Decision(1, "as told", want=3.5, bound=INFERENCE_BOUND)
        seen.append(sample.engines)
        return scale.decision

    seen: list[int] = []
    monkeypatch.setattr(ScaleTarget, "decide", scripted)
    layout = RunLayout(run_dir)
    async with orchestrated(layout, config(max_engines=2)) as (service, _, decisions):
        await until(lambda: service._engines.ready == 2)
        await until(lambda: bool(decisions) and decisions[-1].target == 2)
        await until(lambda: seen[-1] == 2)
    assert living(layout) == {}


MAIN = """
import sys
from pathlib import Path
from rolloutmq.services.orchestrator import server
from rolloutmq.services.orchestrator.engines import pool
run_dir, worker, engine = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
server.worker_command = lambda run_dir: lambda name: (sys.executable, "-S", "-c", worker, name)
pool.engine_command = lambda run_dir: lambda name: (sys.executable, "-S", "-c", engine, name, str(run_dir))
sys.exit(server.main(run_dir))
"""


@contextmanager
def running(run_dir: Path, engine: str = ENGINE) -> Iterator[subprocess.Popen[str]]:
    """Run the orchestrator as its own process."""
    started = [sys.executable, "-c", MAIN, str(run_dir), DRAINABLE, engine]
    environment = {**os.environ, MARKER: f"{TOKEN}/orchestrator"}
    process = subprocess.Popen(started, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_engines_of_a_killed_orchestrator_are_adopted(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_json(layout.config, config(min_engines=2))
    with running(run_dir) as first:
        wait_for(lambda: layout.engine("inference-1").exists() and len(living(layout)) == 1)
        engine = living(layout)
        first.kill()
        first.wait()
    assert living(layout) == engine
    with running(run_dir) as second:
        assert second.stderr is not None
        while "adopted name=inference-1" not in second.stderr.readline():
            assert second.poll() is None
        assert living(layout) == engine
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=10) == 0
    assert living(layout) == {}
    assert not layout.engine("inference-1").exists()


def engine_lives(layout: RunLayout, pid: int) -> list[tuple[str, str]]:
    """Return name and phase of the engines that this orchestrator reports."""
    found = read_json(layout.supervision, Supervision)
    return (
        [(one.worker, one.phase) for one in found.engine_lives]
        if found and found.orchestrator.pid == pid
        else []
    )


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "killed before its report"])
async def test_the_drain_of_an_engine_goes_on_under_the_next_orchestrator(
    run_dir: Path, reported: bool
) -> None:
    layout, settings = RunLayout(run_dir), config()
    patient = settings.orchestrator.model_copy(update={"drain_deadline_s": 600.0})
    settings = settings.model_copy(update={"orchestrator": patient})
    write_json(layout.config, settings)
    write_json(layout.inference, InferenceAddress(url="http://first", pid=1, busy=0.45))
    drains = [("inference-1", "running"), ("inference-2", "stopping")]
    with running_broker(settings, layout) as broker:
        async with BrokerClient(broker.endpoints.serve) as client:
            with running(run_dir, BUSY) as first:
                await client.request(SetWorkers(env="inference", count=3))
                await until(
                    lambda: layout.engine("inference-1").exists() and layout.engine("inference-2").exists()
                )
                await client.request(SetWorkers(env="inference", count=2))
                await until(lambda: engine_lives(layout, first.pid) == drains)
                await until(lambda: is_draining(layout, "inference-2"))
                engines = living(layout)
                await client.request(SetWorkers(env="inference", count=None))
                await until(lambda: (target := engine_target(layout)) is not None and target.wanted is None)
                first.kill()
            before = read_json(layout.supervision, Supervision)
            assert before is not None
            if not reported:
                write_json(layout.supervision, msgspec.structs.replace(before, engine_lives=()))
            with running(run_dir, BUSY) as second:
                await until(lambda: engine_lives(layout, second.pid) == drains)
                assert living(layout) == engines
                target = engine_target(layout)
                assert target is not None
                assert (target.target, target.current) == (2, 2)
                if reported:
                    after = read_json(layout.supervision, Supervision)
                    assert after is not None
                    assert [(one.since, one.ends, one.reason) for one in after.engine_lives[1:]] == [
                        (one.since, one.ends, one.reason) for one in before.engine_lives[1:]
                    ]
                os.kill(engines["inference-2"], signal.SIGTERM)
                await until(lambda: engine_lives(layout, second.pid) == drains[:1])
                assert living(layout) == {"inference-1": engines["inference-1"]}
                second.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(second.wait, 30) == 0
        broker.stop()


def is_draining(layout: RunLayout, name: str) -> bool:
    address = read_json(layout.engine(name), InferenceAddress)
    return address is not None and address.draining


def engine_target(layout: RunLayout) -> Target | None:
    found = read_json(layout.supervision, Supervision)
    return None if found is None else found.engines


def test_a_second_signal_kills_the_engines_too(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    settings = config(min_engines=2)
    patient = settings.orchestrator.model_copy(update={"term_grace_s": 60.0})
    write_json(layout.config, settings.model_copy(update={"orchestrator": patient}))
    with running(run_dir) as process:
        wait_for(lambda: layout.engine("inference-1").exists() and len(living(layout)) == 1)
        pid = living(layout)["inference-1"]
        os.kill(pid, signal.SIGSTOP)  # it would hear nothing but a SIGKILL
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "ending name=inference-1" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    wait_for(lambda: living(layout) == {})


async def test_engines_of_a_cluster_start_once_it_has_room(run_dir: Path) -> None:
    refusal = ["no_room: it needs 1 CPU"]
    placement = Placement(LocalSpawner(), lambda: refusal[0])
    async with pool(run_dir, placement=placement) as table:
        await table.until(lambda: bool(table.decisions), wanted=3)
        assert living(table.layout) == {}
        assert (table.decisions[-1].target, table.decisions[-1].current) == (3, 1)
        assert table.decisions[-1].reason == "pinned to 3; no_room: it needs 1 CPU"
        assert table.pool.no_room == refusal[0]
        refusal[0] = ""
        await table.until(lambda: table.pool.ready == 3, wanted=3)
        assert table.pool.no_room == ""
        assert list(living(table.layout)) == ["inference.cluster-1", "inference.cluster-2"]
        await table.until(lambda: list(living(table.layout)) == ["inference.cluster-1"], wanted=2)
    assert living(table.layout) == {}
    assert not table.layout.engine("inference.cluster-1").exists()
