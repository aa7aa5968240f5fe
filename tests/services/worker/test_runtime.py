"""The whole worker: a real broker, a real producer, a policy server with failures."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.bus.evaluation.client import evaluate_async
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.producer.spool_file import SpoolFile
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.tasks.client import Task, TaskClient
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.evaluation import EvaluationConfig
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, EnvironmentFailedError, MissingError
from rolloutmq.schemas.files import AckedGroup, InferenceAddress, RunLayout, Sign
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.control import Drain, GetStatus, Pressure, StatusReply, WorkerState, WorkerStatus
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Ack, Wait
from rolloutmq.schemas.wire.requests import RegisterProducer
from rolloutmq.schemas.wire.tasks import TaskState
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.process.stacks import hang_of
from rolloutmq.services.worker import runtime
from rolloutmq.services.worker.runtime import Worker, work
from rolloutmq.services.worker.user_code.failures import UserFailure

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer

ENVIRONMENTS = """
import asyncio
import os
import time
from rolloutmq import SingleTurn, Trajectory

class Good(SingleTurn):
    def task(self, rng):
        return "473"

    def prompt(self, task):
        return task + "="

    def score(self, task, completion):
        return 1.0

class Bad(Good):
    def score(self, task, completion):
        raise ValueError("never any good")

class Leaving(Good):
    async def score(self, task, completion):
        await asyncio.gather(self.leave())

    async def leave(self):
        raise SystemExit(0)

class Hanging(Good):
    async def score(self, task, completion):
        await asyncio.Event().wait()

class Stuck(Good):
    def score(self, task, completion):
        while True:
            time.sleep(0.01)

class Ending(Good):
    def score(self, task, completion):
        os._exit(0)

class Slow(Good):
    scored = 0  # one answer in four never comes to an end

    async def score(self, task, completion):
        Slow.scored += 1
        if Slow.scored % 4 == 0:
            await asyncio.Event().wait()
        return 1.0

class Picky(Good):
    def prompt(self, task):
        if task == "bad":
            raise ValueError("no such prompt")
        return task

class Alone(Good):
    async def rollout(self, policy, size, rng):
        sampled = {"token_ids": [1, 2], "mask": [False, True], "logprobs": [0.0, -0.5]}
        return [Trajectory(**sampled, score=float(one)) for one in range(size)]

class Entered(Good):
    async def __aenter__(self):
        print("entered")

    async def __aexit__(self, *_):
        print("left")
"""


class Stage:
    """A run directory with a broker, and workers in this process."""

    def __init__(self, root: Path, config: RunConfig, broker: Broker) -> None:
        self.layout = RunLayout(root)
        self.config = config
        self.broker = broker
        self.stop = Stop()

    def worker(self, number: int = 0) -> Worker:
        return Worker(self.layout.root, f"echo-{number}")

    async def pressure(self) -> Pressure:
        async with BrokerClient(self.broker.endpoints.serve) as client:
            reply = await client.request(GetStatus())
        assert isinstance(reply, StatusReply)
        return reply.pressure

    async def status(self, worker: str = "echo-0") -> WorkerStatus | None:
        """Return what the broker has heard of the worker."""
        return next((w for w in (await self.pressure()).workers if w.worker == worker), None)

    async def wait(self) -> str:
        """Return why the producers of the environment wait."""
        return next((lane.wait for lane in (await self.pressure()).lanes), "")

    async def heard(self, condition: Callable[[WorkerStatus], bool], worker: str = "echo-0") -> WorkerStatus:
        """Wait until the broker has heard that of the worker."""
        async with asyncio.timeout(30):
            while (status := await self.status(worker)) is None or not condition(status):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return status

    async def drain(self, worker: str = "echo-0") -> None:
        """Order a drain over the bus."""
        async with BrokerClient(self.broker.endpoints.serve) as client:
            await client.request(Drain(worker=worker, reason="the test"))

    def acked(self, worker: str = "echo-0") -> list[AckedGroup]:
        """Read the worker's log of accepted groups."""
        lines = self.layout.ack_log(worker).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=AckedGroup) for line in lines]


Staged = Callable[..., AbstractAsyncContextManager[Stage]]
"""Makes a stage; keyword arguments change the environment's section."""


def configured(base_dir: Path, **changes: Any) -> RunConfig:
    section = {"entry": "envs.py:Good", "group_size": 4, "concurrency": 3, "pacing": False}
    orchestrator = OrchestratorConfig(drain_deadline_s=changes.pop("drain_deadline_s", 10.0))
    evaluation = EvaluationConfig(**changes.pop("evaluation", {}))
    (base_dir / "envs.py").write_text(ENVIRONMENTS)
    return RunConfig(
        environment={"echo": EnvironmentConfig(**(section | changes))},
        orchestrator=orchestrator,
        evaluation=evaluation,
        base_dir=base_dir,
    )


@pytest.fixture
async def staged(run_dir: Path, server: "FakeServer", tmp_path: Path) -> Staged:
    """Set up a broker and, unless told otherwise, the address of the policy."""

    @asynccontextmanager
    async def make(policy: bool = True, **changes: Any) -> AsyncIterator[Stage]:
        config = configured(tmp_path, **changes)
        layout = RunLayout(run_dir)
        write_json(layout.config, config)
        if policy:
            write_json(layout.inference, InferenceAddress(url=server.url, pid=os.getpid()))
        with running_broker(config, layout) as broker:
            yield Stage(run_dir, config, broker)

    return make


@asynccontextmanager
async def living(worker: Worker, stop: Stop) -> AsyncIterator["asyncio.Task[None]"]:
    """Run a worker beside; at the end it must have ended by itself."""
    task = asyncio.create_task(worker.run(stop))
    try:
        yield task
        async with asyncio.timeout(30):
            await task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_groups_arrive_and_the_worker_is_heard_of(staged: Staged, server: "FakeServer") -> None:
    async with staged() as stage:
        server.step = 3
        worker = stage.worker()
        async with living(worker, stage.stop):
            await stage.heard(lambda status: status.state is WorkerState.READY)
            status = await stage.heard(lambda status: status.produced >= 20)
            assert (status.env, status.pid, status.error) == ("echo", os.getpid(), "")
            worker.start_draining()
        assert worker.state is WorkerState.GONE
        last = await stage.heard(lambda status: status.state is WorkerState.GONE)
        acked = stage.acked()
        assert len(acked) == last.produced == worker.beat().produced
        assert len({group.group_id for group in acked}) == len(acked)
        assert last.in_hand == 0


async def by_message(stage: Stage, worker: Worker) -> None:
    await stage.drain(worker.name)


async def by_call(_stage: Stage, worker: Worker) -> None:
    worker.start_draining()


async def by_everything_thrice(stage: Stage, worker: Worker) -> None:
    for _ in range(3):
        worker.start_draining("SIGUSR1")
        await stage.drain(worker.name)


@pytest.mark.parametrize("order", [by_call, by_message, by_everything_thrice])
async def test_a_drain_finishes_what_is_in_hand_and_delivers_it(
    staged: Staged, server: "FakeServer", order: Callable[[Stage, Worker], Awaitable[None]]
) -> None:
    async with staged(concurrency=5) as stage:
        worker = stage.worker()
        server.gate.clear()
        async with living(worker, stage.stop) as task:
            await until(lambda: server.waiting == 5)
            await order(stage, worker)
            await stage.heard(lambda status: status.state is WorkerState.DRAINING and status.in_hand == 5)
            assert not task.done()
            server.gate.set()
        assert worker.beat().abandoned == 0
        assert len(stage.acked()) == worker.beat().produced == 5
        assert len(server.asked) == 5


async def test_sigterm_cancels_what_is_in_hand(staged: Staged, server: "FakeServer") -> None:
    async with staged(concurrency=5) as stage:
        worker = stage.worker()
        server.gate.clear()
        async with living(worker, stage.stop):
            await until(lambda: server.waiting == 5)
            stage.stop.request("SIGTERM")
        assert (worker.beat().produced, worker.beat().abandoned) == (0, 5)
        status = await stage.heard(lambda status: status.state is WorkerState.GONE)
        assert status.abandoned == 5


async def test_a_drain_of_hanging_rollouts_ends_at_its_deadline(staged: Staged) -> None:
    async with staged(entry="envs.py:Hanging", drain_deadline_s=0.1) as stage:
        worker = stage.worker()
        async with living(worker, stage.stop):
            await stage.heard(lambda status: status.in_hand == 3)
            worker.start_draining()
        assert worker.beat().abandoned == 3
        assert worker.state is WorkerState.GONE


@pytest.mark.parametrize("deadline_s", [100.0, None])
async def test_a_stop_cuts_a_drain_short(staged: Staged, deadline_s: float | None) -> None:
    async with staged(entry="envs.py:Hanging", drain_deadline_s=deadline_s) as stage:
        worker = stage.worker()
        async with living(worker, stage.stop) as task:
            await stage.heard(lambda status: status.in_hand == 3)
            worker.start_draining()
            await stage.heard(lambda status: status.state is WorkerState.DRAINING)
            assert not task.done()
            stage.stop.request("SIGTERM")
        assert worker.beat().abandoned == 3


async def test_the_policy_is_waited_for(staged: Staged, server: "FakeServer") -> None:
    async with staged(policy=False) as stage:
        worker = stage.worker()
        async with living(worker, stage.stop):
            await stage.heard(lambda status: status.state is WorkerState.STARTING)
            write_json(stage.layout.inference, InferenceAddress(url=server.url, pid=1))
            await stage.heard(lambda status: status.produced > 0)
            stage.stop.request("SIGTERM")


async def test_a_worker_that_reaches_no_engine_says_so_and_holds_no_permit(
    staged: Staged, server: "FakeServer"
) -> None:
    """Whatever listens there on this host's own loopback is another program."""
    async with staged(policy=False) as stage:
        far = InferenceAddress(url=server.url, pid=1, name="inference.far", network="of another host")
        write_json(stage.layout.engine(far.name), far)
        async with living(stage.worker(), stage.stop):
            await stage.heard(lambda it: "only its own host reaches inference.far" in it.waits_for)
            assert (server.models_asked, (await stage.pressure()).lanes) == (0, ())
            write_json(stage.layout.inference, InferenceAddress(url=server.url, pid=1))
            await stage.heard(lambda status: status.produced > 0)
            stage.stop.request("SIGTERM")


async def test_a_broker_that_comes_back_is_found_again(staged: Staged, run_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        async with staged() as stage:
            worker = stage.worker()
            await stack.enter_async_context(living(worker, Stop()))
            await stage.heard(lambda status: status.produced > 0)
        with running_broker(stage.config, stage.layout) as broker:
            back = Stage(run_dir, stage.config, broker)
            before = worker.beat().produced
            await back.heard(lambda status: status.produced > before)
            worker.start_draining()
            await stack.aclose()
            assert len(back.acked()) == worker.beat().produced


@pytest.mark.parametrize("how", ["drain", "stop"])
async def test_a_worker_that_still_waits_can_be_ended(staged: Staged, how: str) -> None:
    async with staged(policy=False) as stage:
        worker = stage.worker()
        async with living(worker, stage.stop):
            await stage.heard(lambda status: status.state is WorkerState.STARTING)
            if how == "drain":
                await stage.drain()
            else:
                stage.stop.request("SIGTERM")
        assert worker.state is WorkerState.GONE


async def test_an_environment_that_samples_by_itself_needs_no_server(staged: Staged) -> None:
    async with staged(policy=False, entry="envs.py:Alone") as stage:
        none = InferenceConfig(kind="none")
        write_json(stage.layout.config, stage.config.model_copy(update={"inference": none}))
        working = asyncio.create_task(work(stage.layout.root, "echo-0", stage.stop))
        await stage.heard(lambda status: status.produced > 0)
        stage.stop.request("SIGTERM")
        await working


async def test_one_that_asks_its_policy_without_a_server_says_so(staged: Staged) -> None:
    async with staged(policy=False, failure_limit=3) as stage:
        none = InferenceConfig(kind="none")
        write_json(stage.layout.config, stage.config.model_copy(update={"inference": none}))
        with pytest.raises(EnvironmentFailedError, match=r"inference\.kind: must not be `none`"):
            await work(stage.layout.root, "echo-0", stage.stop)


async def test_an_environment_that_always_raises_fails_for_good(staged: Staged) -> None:
    async with staged(entry="envs.py:Bad", failure_limit=7) as stage:
        worker = stage.worker()
        with pytest.raises(EnvironmentFailedError, match=r"environment\.echo: \d+ rollouts"):
            await worker.run(stage.stop)
        status = await stage.heard(lambda status: status.state is WorkerState.FAILED)
        assert "ValueError: never any good" in status.error
        assert status.produced == 0
        assert status.abandoned >= 7
        failure = read_json(stage.layout.failure("echo"), UserFailure)
        assert failure is not None
        assert failure.headline.startswith("ValueError: never any good (envs.py:")
        assert 'raise ValueError("never any good")\nE   ValueError: never any good\n' in failure.report
        assert "task        '473'\nprompt      '473='\ncompletion  'answer' (2 tokens, " in failure.report


async def test_a_rollout_that_took_too_long_tells_its_place_and_its_task(staged: Staged) -> None:
    line = ENVIRONMENTS.splitlines().index("        await asyncio.Event().wait()") + 1
    async with staged(entry="envs.py:Hanging", failure_limit=2, rollout_timeout_s=0.5) as stage:
        with pytest.raises(EnvironmentFailedError) as failed:
            await stage.worker().run(stage.stop)
    assert (
        f"took longer than rollout_timeout_s (0.5 s), at envs.py:{line} with task '473'" in failed.value.last
    )


async def test_an_exit_in_a_task_of_the_environment_is_a_failed_rollout(staged: Staged) -> None:
    async with staged(entry="envs.py:Leaving", failure_limit=7) as stage:
        with pytest.raises(EnvironmentFailedError, match="SystemExit: 0"):
            await stage.worker().run(stage.stop)


async def test_an_entry_that_is_wrong_fails_for_good(staged: Staged) -> None:
    async with staged(entry="envs.py:Goud") as stage:
        worker = stage.worker()
        with pytest.raises(ConfigError, match="did you mean `Good`"):
            await worker.run(stage.stop)
        status = await stage.heard(lambda status: status.state is WorkerState.FAILED)
        assert "environment.echo.entry" in status.error


async def test_an_environment_with_a_context_is_entered_and_left(
    staged: Staged, capsys: pytest.CaptureFixture[str]
) -> None:
    async with staged(entry="envs.py:Entered") as stage:
        worker = stage.worker()
        async with living(worker, stage.stop):
            await stage.heard(lambda status: status.produced > 0)
            assert capsys.readouterr().out == "entered\n"
            worker.start_draining()
        assert capsys.readouterr().out == "left\n"


async def test_the_newer_of_two_with_one_name_stays(staged: Staged) -> None:
    async with staged() as stage:
        old, new = stage.worker(), stage.worker()
        stop = Stop()
        async with living(old, Stop()) as ended:
            await stage.heard(lambda status: status.produced > 0)
            async with living(new, stop):
                async with asyncio.timeout(30):
                    await ended
                await until(lambda: new.beat().produced > 0)
                stop.request("SIGTERM")
        assert (await stage.heard(lambda status: status.state is WorkerState.GONE)).state is WorkerState.GONE


async def test_a_worker_sends_what_a_fenced_one_of_its_name_set_aside(staged: Staged) -> None:
    async with staged() as stage:
        session = SessionState(RegisterProducer(producer="echo-0", env="echo", group_size=4), Spool(1 << 20))
        session.registered(Ack(epoch=1, session=1, cumulative=0, byte_limit=0, start_limit=0), 0.0)
        left = Group.build("left", tokens=[[1]] * 4, mask=[[1]] * 4, scores=[0.0] * 4)
        session.spool.add(left, encode_group(left, 1 << 20))
        SpoolFile(stage.layout.spools / "echo-0", session).set_aside()
        async with living(stage.worker(), stage.stop):
            await stage.heard(lambda status: status.produced > 0)
            stage.stop.request("SIGTERM")
        assert stage.acked()[0].group_id == "left"
        assert not list(stage.layout.spools.iterdir())


async def test_an_external_server_needs_no_file(staged: Staged, server: "FakeServer") -> None:
    async with staged(policy=False) as stage:
        external = InferenceConfig(kind="external", url=server.url + "/v1")
        write_json(stage.layout.config, stage.config.model_copy(update={"inference": external}))
        server.step = None
        stop = Stop()
        working = asyncio.create_task(work(stage.layout.root, "echo-0", stop))
        await stage.heard(lambda status: status.produced > 0)
        stop.request("SIGTERM")
        await working


def test_a_worker_without_its_environment_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        Worker(run_dir, "echo-0")
    write_json(RunLayout(run_dir).config, configured(tmp_path))
    with pytest.raises(
        ConfigError, match=r"environment\.sort3: worker sort3-0 needs this section \(configured: echo\)"
    ):
        Worker(run_dir, "sort3-0")


# A process of its own.

SLOW = """
import pathlib, time
here = pathlib.Path(__file__).parent
(here / "importing").touch()
while not (here / "go").exists():
    time.sleep(0.01)
"""


def spawn(run_dir: Path) -> "subprocess.Popen[bytes]":
    """Start a worker as the orchestrator does: SIGUSR1 blocked, output to a file."""
    argv = [sys.executable, "-m", "rolloutmq.launch.cli", "worker", "--run-dir", str(run_dir)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with (run_dir / "worker.log").open("ab") as log:
            return subprocess.Popen([*argv, "--worker", "echo-0"], stdout=log, stderr=log)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@asynccontextmanager
async def spawned(stage: Stage) -> AsyncIterator["subprocess.Popen[bytes]"]:
    process = spawn(stage.layout.root)
    try:
        yield process
    except BaseException:
        sys.stderr.write((stage.layout.root / "worker.log").read_text())
        raise
    finally:
        process.kill()
        process.wait()


async def exit_code(process: "subprocess.Popen[bytes]") -> int:
    await until(lambda: process.poll() is not None)
    return process.returncode


async def test_sigusr1_while_importing_drains_instead_of_killing(staged: Staged, tmp_path: Path) -> None:
    async with staged(entry="slow.py:Good") as stage:
        (tmp_path / "slow.py").write_text(SLOW + ENVIRONMENTS)
        async with spawned(stage) as process:
            await until((tmp_path / "importing").exists)
            for _ in range(3):
                process.send_signal(signal.SIGUSR1)
            (tmp_path / "go").touch()
            assert await exit_code(process) == 0
        assert (await stage.heard(lambda status: status.state is WorkerState.GONE)).produced == 0


async def test_sigusr1_and_the_message_together_drain_once(staged: Staged, server: "FakeServer") -> None:
    async with staged() as stage, spawned(stage) as process:
        await stage.heard(lambda status: status.produced > 0)
        for _ in range(3):
            process.send_signal(signal.SIGUSR1)
            await stage.drain()
        while process.poll() is None:  # until the last moment of the process, and past its handlers
            process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(0.001)
        assert process.returncode == 0
        last = await stage.heard(lambda status: status.state is WorkerState.GONE)
        assert last.abandoned == 0
        assert len(stage.acked()) == last.produced
        log = (stage.layout.root / "worker.log").read_text()
        assert log.count(" draining reason=") == 1
        assert len(server.asked) == last.produced


async def test_a_worker_that_can_never_work_says_so_by_its_exit_code(staged: Staged) -> None:
    async with staged(entry="envs.py:Bad", failure_limit=3) as stage, spawned(stage) as process:
        assert await exit_code(process) == PERMANENT_FAILURE
        log = (stage.layout.root / "worker.log").read_text()
        assert "in score" in log  # the traceback leads to the user's line
        assert log.splitlines()[-1].startswith("error: environment.echo: ")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - what is waited for lies in other objects
            await asyncio.sleep(0.005)


async def test_a_worker_answers_what_a_trainer_submits(staged: Staged, server: "FakeServer") -> None:
    async with staged(tasks="submitted", entry="envs.py:Picky") as stage, open_tasks(stage) as client:
        worker = stage.worker()
        async with living(worker, stage.stop):
            ids = await client.submit([Task(env="echo", payload=text, size=2) for text in ("11", "12")])
            bad = await client.submit([Task(env="echo", payload="bad")])
            found = await client.results([*ids, *bad], 10.0)
            assert [one.state for one in found] == [TaskState.DONE, TaskState.DONE, TaskState.FAILED]
            assert found[2].reason == "echo-0: ValueError: no such prompt"
            assert {asked["prompt"] for asked in server.asked} == {"11", "12"}
            worker.start_draining()
        assert {acked.group_id for acked in stage.acked()} == {one.group_id for one in found[:2]}
        assert (worker.beat().produced, worker.beat().abandoned) == (2, 3)
        assert worker.state is WorkerState.GONE


async def test_a_worker_without_a_task_is_idle(staged: Staged) -> None:
    """Its permits are unused: the staleness bound holds nobody back, and more workers would not help."""
    submitted = {"tasks": "submitted", "entry": "envs.py:Picky", "pacing": True, "concurrency": 1}
    async with staged(**submitted) as stage:
        worker = stage.worker()
        async with living(worker, stage.stop):
            async with asyncio.timeout(30):
                while await stage.wait() != Wait.NO_TASKS:  # noqa: ASYNC110 - the broker looks once a second
                    await asyncio.sleep(0.01)
            before = (
                worker.beat().blocked_s
            )  # the wait for the permit, which it has, and some of that for the task
            await stage.heard(lambda status: status.blocked_s > before)
            worker.start_draining()


async def test_a_drained_worker_leaves_the_tasks_to_the_next(staged: Staged, server: "FakeServer") -> None:
    async with staged(tasks="submitted", drain_deadline_s=0.1) as stage, open_tasks(stage) as client:
        server.gate.clear()
        first = stage.worker(0)
        async with living(first, stage.stop):
            ids = await client.submit([Task(env="echo", payload=str(n)) for n in range(5)])
            await until(lambda: server.waiting == 3)
            first.start_draining()
        server.gate.set()
        second = stage.worker(1)
        async with living(second, stage.stop):
            found = await client.results(ids, 10.0)
            assert {(one.state, one.worker) for one in found} == {(TaskState.DONE, "echo-1")}
            second.start_draining()


async def test_late_members_are_counted_from_the_worker_to_the_pressure(staged: Staged) -> None:
    async with staged(
        entry="envs.py:Slow", concurrency=1, group_size=4, min_group_size=2, group_deadline_s=0.05
    ) as stage:
        worker = stage.worker()
        async with living(worker, stage.stop):
            status = await stage.heard(lambda status: status.late_members >= 2)
            assert status.late_members <= worker.beat().late_members
            worker.start_draining()
        last = await stage.heard(lambda status: status.state is WorkerState.GONE)
        async with BrokerClient(stage.broker.endpoints.serve) as client:
            reply = await client.request(GetStatus())
        assert isinstance(reply, StatusReply)
        assert last.late_members == worker.beat().late_members == last.produced
        assert reply.pressure.late_members == {"echo": last.late_members}


async def test_an_environment_that_cannot_do_what_is_asked_fails_at_once(
    staged: Staged, tmp_path: Path
) -> None:
    (tmp_path / "bare.py").write_text("class Bare:\n    async def rollout(self, policy, size, rng): ...\n")
    async with staged(entry="bare.py:Bare", tasks="submitted") as stage:
        worker = stage.worker()
        with pytest.raises(ConfigError, match="Bare has no method `rollout_task`"):
            await worker.run(stage.stop)
        assert worker.state is WorkerState.FAILED


def open_tasks(stage: Stage) -> AbstractAsyncContextManager[TaskClient]:
    return TaskClient.open(stage.layout.root)


EVALUATED = {"enabled": True, "tasks": 3, "samples": 2, "concurrency": 2, "deadline_s": 60.0}


async def test_a_worker_evaluates_although_its_training_may_start_nothing(
    staged: Staged, server: "FakeServer"
) -> None:
    """No trainer is there: the training stops at the staleness bound, and its permits are used up."""
    async with staged(evaluation=EVALUATED, pacing=True, max_staleness=0, tasks="own") as stage:
        life = stage.worker()
        running = asyncio.create_task(life.run(stage.stop))
        before = await stage.heard(lambda status: status.produced * 4 >= 256)
        done = await evaluate_async(stage.layout.root)
        assert (done.all.answered, done.all.greedy, done.all.mean) == (3, 1.0, 1.0)
        status = await stage.status()
        assert status is not None
        assert (status.produced, status.in_hand) == (before.produced, 0), (
            "heartbeats tell of the training alone"
        )
        greedy = [body for body in server.asked if body.get("temperature") == 0.0]
        assert [body["n"] for body in greedy] == [1] * 3
        assert sum(body["n"] == 2 for body in server.asked) == 3
        stage.stop.request("the test")
        await running
        lines = stage.acked("echo-0.eval")
        assert [(line.split, line.env) for line in lines] == [(Split.EVAL, "echo")] * 6
        assert {line.split for line in stage.acked()} == {Split.TRAIN}


async def test_a_worker_of_a_held_out_environment_answers_the_evaluation_alone(
    staged: Staged, server: "FakeServer"
) -> None:
    async with staged(evaluation=EVALUATED, split="eval") as stage:
        running = asyncio.create_task(stage.worker().run(stage.stop))
        done = await evaluate_async(stage.layout.root, samples=5)
        assert (done.all.answered, done.sequences) == (3, 3 + 15)
        assert len(server.asked) == 6, "nothing was rolled out beside"
        stage.stop.request("the test")
        await running
        assert {line.split for line in stage.acked()} == {Split.EVAL}


async def test_a_task_of_an_evaluation_that_fails_never_ends_the_worker(staged: Staged) -> None:
    async with staged(entry="envs.py:Bad", evaluation=EVALUATED, tasks="submitted", failure_limit=1) as stage:
        running = asyncio.create_task(stage.worker().run(stage.stop))
        done = await evaluate_async(stage.layout.root)
        assert (done.all.answered, done.all.failed, done.all.greedy) == (0, 3, None)
        assert not running.done()
        stage.stop.request("the test")
        await running


async def test_a_score_that_holds_the_event_loop_is_told_while_it_does(staged: Staged) -> None:
    line = ENVIRONMENTS.splitlines().index("            time.sleep(0.01)") + 1
    async with staged(entry="envs.py:Stuck") as stage, spawned(stage) as process:
        await until(lambda: hang_of(stage.layout, "echo-0", process.pid) is not None)
        hang = hang_of(stage.layout, "echo-0", process.pid)
        assert hang is not None
        assert hang.text in {f"its code is at envs.py:{at}, with task '473'" for at in (line - 1, line)}
        log = (stage.layout.root / "worker.log").read_text()
        assert "environment holds the event loop env=echo held_s=5 at=envs.py:" in log


async def test_code_that_ends_its_worker_is_a_failure_with_a_place(staged: Staged) -> None:
    line = ENVIRONMENTS.splitlines().index("        os._exit(0)") + 1
    async with staged(entry="envs.py:Ending") as stage, spawned(stage) as process:
        assert await exit_code(process) == 1
        error = f"environment ended its worker env=echo error=os._exit(0) ends the process (envs.py:{line})"
        assert error in (stage.layout.root / "worker.log").read_text().splitlines()[-1]
        failure = read_json(stage.layout.failure("echo"), UserFailure)
        assert failure is not None
        assert "task        '473'" in failure.report


def test_a_full_disk_makes_a_sign_of_life_no_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that started the worker would kill it for its silence."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sign = Sign(pid=os.getpid(), state=WorkerState.READY, answered=True)
    path = tmp_path / "signs" / "e-0.json"
    runtime.show_sign(path, sign)
    os.utime(path, (0, 0))
    monkeypatch.setattr(runtime, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        runtime.show_sign(path, sign)
    assert path.stat().st_mtime > 0
    assert read_json(path, Sign) == sign
