"""The worker process: one environment, its rollouts, and an orderly end.

    STARTING   import the environment, wait for the policy and the broker
    READY      run rollouts, as credits and permits allow
    DRAINING   start nothing new, finish running rollouts, deliver them
    GONE       final heartbeat sent; exit code 0
    FAILED     the environment cannot be created, or failed too often in a row; exit code `PERMANENT_FAILURE`

`Worker.start_draining` is the one way to drain. SIGUSR1, the reply to a heartbeat, the `control` topic and an ack all
call it. Finishing and delivering may take as long as `OrchestratorConfig.drain_s`; after that the worker abandons
unfinished rollouts, and the producers save undelivered groups. SIGTERM drains without waiting: rollouts are cancelled
at once, and delivery gets a third of `orchestrator.term_grace_s`, since SIGKILL follows.

If the environment is evaluated, the worker has a second producer beside the first, of split `eval`, and slots that only
answer tasks of the evaluation. Both have their own permits, so neither waits for the other. A worker of an environment
of split `eval` has nothing else to do.
"""

import asyncio
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.engine_registry import FIRST, engines_of, is_reachable
from rolloutmq.bus.evaluation.plan import answering_producer
from rolloutmq.bus.files import PRIVATE_DIRECTORY
from rolloutmq.bus.log_throttle import LogThrottle, WaitLog
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.producer.resend import resend_set_aside
from rolloutmq.bus.rundir import FILE_POLL_S, load_run, write_json
from rolloutmq.bus.tasks.taker import TaskTaker
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError, EnvironmentFailedError, SessionFencedError
from rolloutmq.schemas.files import InferenceAddress, Sign
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.control import AWAY_LIMIT, WorkerBeat, WorkerState
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.http_server.tls import client_tls
from rolloutmq.services.process.identity import start_of
from rolloutmq.services.process.latency_publisher import publishing, recorder_of
from rolloutmq.services.process.runner import Stop, run_service
from rolloutmq.services.rewards.joining import joined
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.heartbeat import Heartbeat
from rolloutmq.services.worker.loader import check_abilities, load_environment
from rolloutmq.services.worker.openai.call_latencies import CallLatencies
from rolloutmq.services.worker.openai.call_trace import RolloutTracer
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.openai.engine_tokens import token_of
from rolloutmq.services.worker.openai.reach import PausingReach, Reach
from rolloutmq.services.worker.policy import CountingPolicy, NoPolicy, Policy
from rolloutmq.services.worker.rollouts import TRACEBACK_EVERY_S, RateLimitedLog, Rollouts
from rolloutmq.services.worker.teacher_client import TeacherClient
from rolloutmq.services.worker.user_code.exits import contain_exits
from rolloutmq.services.worker.user_code.failures import UserFailure, UserFiles, failure_of, one_line
from rolloutmq.services.worker.user_code.loop_watch import LoopWatch
from rolloutmq.services.worker.user_code.process_exits import told_exits

logger = logging.getLogger(__name__)

WAIT_CHARS: Final = 1000
"""Longest `waits_for` of a heartbeat."""
PATIENCE: Final = 0.9
"""Fraction of `rollout_timeout_s` to wait for the policy, so that the rollout can report the reason."""
DELIVERY_S: Final = 60.0
"""Seconds that a task's lease exceeds `rollout_timeout_s`: its group may have to wait for credits."""
FAILURE: Final = 1
"""Exit code in place of 0, if the environment's code ended the worker by `os._exit`."""
SIGN_S: Final = 1.0
"""Time between two signs of life on another host."""
LAST_FLUSH_S: Final = 1.0
"""Seconds for delivery even if finishing the rollouts took the whole deadline."""


def main(run_dir: Path, worker: str) -> int:
    """Run the worker of that name until it ends; return the exit code.

    Raises:
        MissingError: The directory holds no run.
        ConfigError: The run has no environment of this worker.
    """
    life = Worker(run_dir, worker)
    # SIGUSR1 near the end must not kill: the handler of `run_service` is gone by then. Ignoring the signal before that
    # handler is installed would lose an order that arrives during the imports.
    signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
    code = run_service(worker, life.run, on_drain=life.start_draining)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return PERMANENT_FAILURE if life.state is WorkerState.FAILED else code


async def work(run_dir: Path, worker: str, stop: Stop) -> None:
    """Run the worker of that name until `stop`, or until drained. Raises the errors of `Worker.run`."""
    await Worker(run_dir, worker).run(stop)


def show_sign(path: Path, sign: Sign) -> None:
    """Write a sign of life; without space for it renew the last one, which needs none, and raise OSError."""
    try:
        path.parent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        write_json(path, sign)
    except OSError:
        with suppress(OSError):
            os.utime(path)
        raise


class Worker:
    """One life of a worker. For one event loop; not thread-safe."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self.config, self.layout = load_run(run_dir)
        self.name = worker
        self.env = worker.rpartition("-")[0]
        if self.env not in self.config.environment:
            configured = ", ".join(self.config.environment) or "none"
            raise ConfigError(
                f"environment.{self.env}", f"worker {worker} needs this section (configured: {configured})"
            )
        self.section = self.config.environment[self.env]
        evaluated = self.env in self.config.evaluated
        self._evaluation_seed = self.config.evaluation.seed if evaluated else None
        if evaluated and self.section.split == "eval":
            self.section = _answering(self.section, self.section.concurrency)
        self._drain_s = self.config.orchestrator.drain_s(self.section.rollout_timeout_s)
        self._joined = self.layout.connection.exists()
        self._began = start_of(os.getpid())
        self.state = WorkerState.STARTING
        self.error = ""
        self._draining = asyncio.Event()
        self._drained_at = 0.0
        self._starting: asyncio.Timeout | None = None
        self._producer: Producer | None = None
        self._evaluating: Producer | None = None
        self._rollouts: Rollouts | None = None
        self._counting: CountingPolicy | None = None
        self._reach: Reach | None = None
        self._answers: Rollouts | None = None
        """Those that answer the evaluation beside the training; no heartbeat tells of them."""
        self._teacher: TeacherClient | None = None
        self._engine_wait = ""
        """Why no engine can be asked while the worker starts; it has no session before, and so holds no permit."""
        self._tracer: RolloutTracer | None = None
        self._files = UserFiles.of(self.config.base_dir, [self.section])
        self._failures = RateLimitedLog(TRACEBACK_EVERY_S)
        self._latencies = recorder_of(worker, self.config.telemetry)
        self._heartbeat = Heartbeat(self.layout, worker, self.beat, self.start_draining)

    def start_draining(self, reason: str = "SIGUSR1") -> None:
        """Start nothing new, finish, deliver, end. Call in the event loop; only the first call counts."""
        if self._draining.is_set():
            return
        loop = asyncio.get_running_loop()
        self._draining.set()
        self._drained_at = loop.time()
        self._enter(WorkerState.DRAINING)
        logger.info("draining reason=%s in_hand=%d", reason, self.beat().in_hand)
        if self._starting is not None:
            self._starting.reschedule(loop.time())
        for producer in (self._producer, self._evaluating):
            if producer is not None:
                producer.start_draining()

    def beat(self) -> WorkerBeat:
        """Return the current state."""
        rollouts = self._rollouts
        return WorkerBeat(
            worker=self.name,
            env=self.env,
            state=self.state,
            pid=os.getpid(),
            host=socket.gethostname(),
            in_hand=rollouts.in_hand if rollouts else 0,
            produced=rollouts.produced if rollouts else 0,
            abandoned=rollouts.abandoned if rollouts else 0,
            blocked_s=(self._producer.waits_s if self._producer else 0.0)
            + (rollouts.taking_s if rollouts else 0.0),
            error=self.error or (rollouts.error if rollouts else ""),
            late_members=rollouts.late_members if rollouts else 0,
            untaught=rollouts.untaught if rollouts else 0,
            completions=self._counting.completions if self._counting else 0,
            completion_tokens=self._counting.tokens if self._counting else 0,
            waits_for=self._waits_for(),
            engines_away=self._engines_away(),
            joined=self._joined,
            started=self._began,
        )

    def _waits_for(self) -> str:
        if self._teacher is not None and (told := self._teacher.wait(time.monotonic())):
            return told
        if self._reach is not None and self._reach.is_lost:
            return f"no engine is within reach: {', '.join(self._reach.away)}"[:WAIT_CHARS]
        return self._engine_wait if self.state is WorkerState.STARTING else ""

    def _engines_away(self) -> dict[str, str]:
        away = self._reach.away if self._reach is not None else {}
        return dict(list(away.items())[:AWAY_LIMIT])

    async def run(self, stop: Stop) -> None:
        """Run until drained or stopped.

        Raises:
            ConfigError: The environment cannot be created; the state is FAILED.
            EnvironmentFailedError: It failed too often in a row; the state is FAILED.
        """
        try:
            await self._run(stop)
        except SessionFencedError as error:
            # The newer process reports under this name: no final heartbeat.
            logger.warning("worker name taken over by another process error=%s", error)
            return
        except (ConfigError, EnvironmentFailedError) as error:
            self.error = one_line(error)
            self.state = WorkerState.FAILED
            if error.__cause__ is not None:
                self._keep(failure_of(error.__cause__, self._files))
            await self._heartbeat.last()
            raise
        self.state = WorkerState.GONE
        await self._heartbeat.last()
        last = self.beat()
        logger.info(
            "worker ended produced=%d abandoned=%d untaught=%d", last.produced, last.abandoned, last.untaught
        )

    async def _run(self, stop: Stop) -> None:
        """Run the rollouts, with the watch of the event loop around them."""
        contain_exits(asyncio.get_running_loop())
        watch = LoopWatch(self.layout, self.name, self._files, self.section.rollout_timeout_s)
        with told_exits(self._files, self._leaves), watch:
            await self._watched(stop)

    async def _watched(self, stop: Stop) -> None:
        """Run the rollouts with the heartbeat and the stop watcher beside them."""
        environment = load_environment(self.env, self.section, self.config.base_dir)
        numbered = self.env in self.config.curriculum
        check_abilities(self.env, self.config.environment[self.env], environment, numbered=numbered)
        living = asyncio.create_task(self._live(environment, stop), name=self.name)
        beside = [
            asyncio.create_task(self._heartbeat.run(), name="heartbeat"),
            asyncio.create_task(self._drain_at(stop), name="stop watcher"),
            asyncio.create_task(self._show_life(), name="sign of life"),
        ]
        try:
            # If the heartbeat ends first it has failed; its error is raised below.
            await asyncio.wait({living, beside[0]}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (living, *beside):
                task.cancel()
            await asyncio.wait({living, *beside})
        for task in (living, *beside):
            if not task.cancelled():
                task.result()

    def _failed(self, error: BaseException, why: str) -> None:
        """Keep the report of a failed rollout, one in a while: a broken environment fails a thousand times a second."""
        if self._failures.due(time.monotonic()) is not None:
            self._keep(failure_of(error, self._files, why))

    def _leaves(self, failure: UserFailure, status: int) -> int:
        """Keep the report of code that ends this process, which is a failure whatever its exit code is."""
        self._keep(failure)
        logger.error("environment ended its worker env=%s error=%s", self.env, failure.headline)
        return status or FAILURE

    def _keep(self, failure: UserFailure) -> None:
        """Leave a report for the end of the run."""
        try:
            self.layout.failures.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
            write_json(self.layout.failure(self.env), failure)
        except OSError as error:
            logger.warning("report not written path=%s error=%s", self.layout.failure(self.env), error)

    async def _show_life(self) -> None:
        """On another host, tell the command that started this worker each second that its loop runs."""
        path, throttle = self.layout.sign(self.name), LogThrottle()
        while self._joined:
            sign = Sign(pid=os.getpid(), state=self.state, answered=self._heartbeat.answered)
            try:
                show_sign(path, sign)
            except OSError as error:  # a full disk ends no worker
                if throttle.is_due(str(error), time.monotonic()):
                    logger.warning("sign of life not written path=%s error=%s", path, error)
            await asyncio.sleep(SIGN_S)

    async def _drain_at(self, stop: Stop) -> None:
        self.start_draining(await stop.wait())

    async def _live(self, environment: Environment, stop: Stop) -> None:
        interval_s = self.config.telemetry.interval_s
        async with publishing(self._latencies, self.layout, interval_s), AsyncExitStack() as stack:
            started = await self._started(stack, environment)
            if started is None:
                return
            producer, *beside = started
            self._enter(WorkerState.READY)
            watcher = asyncio.create_task(self._drain_with(producer), name="drain watcher")
            stack.callback(watcher.cancel)
            await self._roll(stop)
            await asyncio.gather(*(self._deliver(one, stop) for one in (producer, *beside)))

    async def _started(self, stack: AsyncExitStack, environment: Environment) -> list[Producer] | None:
        """Wait for everything rollouts need, and return the producers; None if the worker drains before."""
        if self._draining.is_set():
            return None
        try:
            async with asyncio.timeout(None) as self._starting:  # `start_draining` lets it expire
                if isinstance(environment, AbstractAsyncContextManager):
                    await stack.enter_async_context(environment)
                tracer = self._tracer = RolloutTracer(
                    self.layout, self.name, self.env, self.config.telemetry.trace_ratio
                )
                stack.callback(tracer.close)
                policy = await self._policy(stack)
                counting = CountingPolicy(policy)
                producer = await self._opened(stack)
                tasks = await self._tasks(stack, producer)
                stack.enter_context(joined(environment, self.env, self.name, self.layout))
                evaluating = await self._evaluation(stack, environment, policy)
                if self.config.teacher.enabled:
                    opening = TeacherClient.opened(self.config, self.layout)
                    self._teacher = await stack.enter_async_context(opening)
        except TimeoutError:
            if not self._draining.is_set():
                raise
            return None
        finally:
            self._starting = None
        self._producer, self._counting = producer, counting
        self._rollouts = Rollouts(
            self.name,
            self.section,
            environment,
            counting,
            producer,
            seed=self.config.run.seed,
            tasks=tasks,
            draining=self._draining,
            teacher=self._teacher,
            evaluation_seed=self._evaluation_seed if self.section.split == "eval" else None,
            on_failure=self._failed,
            files=self._files,
            tracer=tracer,
            latencies=self._latencies,
            reach=self._reach_of(producer),
        )
        return [producer, *evaluating]

    async def _evaluation(
        self, stack: AsyncExitStack, environment: Environment, policy: Policy
    ) -> list[Producer]:
        """Open what answers the evaluation beside the training, if the environment is evaluated."""
        if self._evaluation_seed is None or self.section.split == "eval":
            return []
        name, asked = answering_producer(self.name), self.config.evaluation
        opening = self._producer_of(name, Split.EVAL, max(1, asked.samples), asked.concurrency)
        await self._send_set_aside(name)
        producer = self._evaluating = await stack.enter_async_context(opening)
        self._answers = Rollouts(
            name,
            _answering(self.section, asked.concurrency),
            environment,
            policy,
            producer,
            tasks=await self._taker(stack, name, producer),
            draining=self._draining,
            evaluation_seed=self._evaluation_seed,
            on_failure=self._failed,
            files=self._files,
            tracer=self._tracer,
            latencies=self._latencies,
            reach=self._reach_of(producer),
        )
        return [producer]

    async def _policy(self, stack: AsyncExitStack) -> Policy:
        """Open the client of the policy once an engine is registered. A wait of some seconds is logged."""
        if self.config.inference.kind == "none":
            return NoPolicy()
        log = WaitLog()
        # Another process writes the file: there is no event to wait for.
        while not self._addresses():
            self._engine_wait = self._out_of_reach()[:WAIT_CHARS]
            if log.is_due("no engine", now := time.monotonic()):
                logger.warning(
                    "waiting for an inference server waited_s=%.0f: %s", log.waited_s(now), self._no_engine()
                )
            await asyncio.sleep(FILE_POLL_S)
        rng = random.Random(f"{self.config.run.seed}/{self.name}/engines")
        is_external = self.config.inference.kind == "external"
        policy = await stack.enter_async_context(
            OpenAIPolicy.opened(
                Engines(self._addresses, rng, self._known, self._bound()),
                known=self._known,
                patience_s=PATIENCE * self.section.rollout_timeout_s,
                token=token_of(self.config, self.layout),
                tls=None if is_external else client_tls(self.config),
                latencies=CallLatencies(self._latencies, self.env),
                # A server of another host names a directory there.
                root=str(self.layout.model) if self.layout.connection.exists() else "",
            )
        )
        self._reach = policy.reach
        return policy

    def _reach_of(self, producer: Producer) -> PausingReach | None:
        if self._reach is None:
            return None
        return self._reach.pausing(lambda paused: producer.pause(paused=paused))

    def _known(self) -> PolicyVersion:
        return self._producer.policy if self._producer else PolicyVersion()

    def _bound(self) -> int | None:
        """Return the steps by which an engine may be behind the trainer; None if nothing is dropped for its age."""
        drops = self.section.stale == "drop" and self.section.split == "train"
        return self.section.max_staleness if drops else None

    def _addresses(self) -> list[InferenceAddress]:
        inference = self.config.inference
        if inference.kind == "external":
            return [InferenceAddress(url=inference.url, pid=0)]
        return [one for one in engines_of(self.layout) if is_reachable(one)]

    def _no_engine(self) -> str:
        return self._out_of_reach() or f"{self.layout.engine(FIRST)} does not exist"

    def _out_of_reach(self) -> str:
        """Name the engines that this host cannot ask; empty if the run has none at all."""
        apart = ", ".join(f"{one.name} ({one.url})" for one in engines_of(self.layout))
        if not apart:
            return ""
        return f"only its own host reaches {apart}; set `inference.host`, or start an engine on this host"

    async def _opened(self, stack: AsyncExitStack) -> Producer:
        section = self.section
        split = Split.TRAIN if section.split == "train" else Split.EVAL
        await self._send_set_aside(self.name)
        opening = self._producer_of(self.name, split, section.group_size, section.concurrency)
        return await stack.enter_async_context(opening)

    async def _send_set_aside(self, name: str) -> None:
        """Send what fenced processes of this name left here, before the name has a session of its own."""
        acks = self.layout.acks
        await resend_set_aside(self.layout.root, self.layout.spools / name, name, ack_logs=acks)

    def _producer_of(
        self, name: str, split: Split, group_size: int, slots: int
    ) -> AbstractAsyncContextManager[Producer]:
        return Producer.open(
            self.layout.root,
            env=self.env,
            producer=name,
            run=self.config.run.name,
            group_size=group_size,
            slots=slots,
            weight=self.section.weight,
            min_share=self.section.min_share,
            split=split,
            ack_log=self.layout.ack_log(name),
            save_to=self.layout.spools / name,
            drain_s=0.0,  # `_deliver` has waited already
        )

    async def _tasks(self, stack: AsyncExitStack, producer: Producer) -> TaskTaker | None:
        """Open the client of submitted tasks if the environment answers any."""
        if self.section.tasks == "own":
            return None
        return await self._taker(stack, self.name, producer)

    async def _taker(self, stack: AsyncExitStack, name: str, producer: Producer) -> TaskTaker:
        lease_s = self.section.rollout_timeout_s + DELIVERY_S
        opening = TaskTaker.open(self.layout.root, name, lambda: producer.session, lease_s)
        return await stack.enter_async_context(opening)

    async def _drain_with(self, producer: Producer) -> None:
        await producer.draining.wait()
        self.start_draining("ack")

    async def _roll(self, stop: Stop) -> None:
        """Run rollouts until drained, then finish running ones as time allows."""
        both = [one for one in (self._rollouts, self._answers) if one is not None]
        rolling = asyncio.create_task(_together(both), name="rollouts")
        try:
            if not await _ended(rolling, self._draining):
                await _ended(rolling, stop.event, self._left_s())
        finally:
            if in_hand := sum(one.in_hand for one in both):
                logger.warning("rollouts cancelled in_hand=%d", in_hand)
            rolling.cancel()
            await asyncio.wait({rolling})
        if not rolling.cancelled():
            rolling.result()

    async def _deliver(self, producer: Producer, stop: Stop) -> None:
        """Wait until everything is acked, as time allows; the producer saves the rest."""
        flushing = asyncio.create_task(producer.flush(max(self._left_s(), LAST_FLUSH_S)), name="delivery")
        try:
            if not await _ended(flushing, stop.event):
                await asyncio.wait({flushing}, timeout=self.config.orchestrator.term_grace_s / 3)
        finally:
            flushing.cancel()
            await asyncio.wait({flushing})

    def _left_s(self) -> float:
        """Return the seconds left until the deadline of the drain."""
        passed = asyncio.get_running_loop().time() - self._drained_at
        return max(0.0, self._drain_s - passed)

    def _enter(self, state: WorkerState) -> None:
        """Change the state and send a heartbeat at once."""
        if state is WorkerState.READY and self._draining.is_set():
            return
        self.state = state
        self._heartbeat.changed()


def _answering(section: EnvironmentConfig, concurrency: int) -> EnvironmentConfig:
    """Return the rules of slots that answer an evaluation: submitted tasks only, and every answer of a group."""
    update = {"tasks": "submitted", "group_deadline_s": 0.0, "concurrency": concurrency}
    return section.model_copy(update=update)


async def _together(all_: Sequence[Rollouts]) -> None:
    """Run rollouts side by side; the first error ends all of them."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in all_:
                tasks.create_task(one.run(), name=one.worker)
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__


async def _ended(task: asyncio.Task[Any], event: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until the task ends, the event is set, or the time is over; return whether the task has ended."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    return task.done()
