"""The worker process: one environment, its rollouts, and an orderly end.

    STARTING   import the environment, wait for the policy and the broker
    READY      run rollouts, as credits and permits allow
    DRAINING   start nothing new, finish running rollouts, deliver them
    GONE       final heartbeat sent; exit code 0
    FAILED     the environment cannot be created, or failed too often in a row; exit code `PERMANENT_FAILURE`

`Worker.start_draining` is the one way to drain. SIGUSR1, the reply to a heartbeat, the `control` topic and an ack all
call it. Finishing and delivering may take `orchestrator.drain_deadline_s`; after that the worker abandons unfinished
rollouts, and the producer saves undelivered groups. SIGTERM drains without waiting: rollouts are cancelled at once, and
delivery gets a third of `orchestrator.term_grace_s`, since SIGKILL follows.
"""

import asyncio
import logging
import os
import random
import signal
import socket
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import FILE_POLL_S, load_run
from rolloutmq.bus.tasks.taker import TaskTaker
from rolloutmq.schemas.errors import ConfigError, EnvironmentFailedError, SessionFencedError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerState
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.process.runner import Stop, run_service
from rolloutmq.services.worker.engine_choice import Engines
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.heartbeat import Heartbeat
from rolloutmq.services.worker.loader import check_abilities, load_environment
from rolloutmq.services.worker.openai_client import OpenAIPolicy
from rolloutmq.services.worker.rollouts import Rollouts, one_line
from rolloutmq.services.worker.teacher_client import TeacherClient

logger = logging.getLogger(__name__)

PATIENCE: Final = 0.9
"""Fraction of `rollout_timeout_s` to wait for the policy, so that the rollout can report the reason."""
DELIVERY_S: Final = 60.0
"""Seconds that a task's lease exceeds `rollout_timeout_s`: its group may have to wait for credits."""
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
        self.state = WorkerState.STARTING
        self.error = ""
        self._draining = asyncio.Event()
        self._drained_at = 0.0
        self._starting: asyncio.Timeout | None = None
        self._producer: Producer | None = None
        self._rollouts: Rollouts | None = None
        self._teacher: TeacherClient | None = None
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
        if self._producer is not None:
            self._producer.start_draining()

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
            blocked_s=self._producer.waits_s if self._producer else 0.0,
            error=self.error or (rollouts.error if rollouts else ""),
            late_members=rollouts.late_members if rollouts else 0,
            untaught=rollouts.untaught if rollouts else 0,
            waits_for=self._teacher.wait(time.monotonic()) if self._teacher else "",
        )

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
            await self._heartbeat.last()
            raise
        self.state = WorkerState.GONE
        await self._heartbeat.last()
        last = self.beat()
        logger.info(
            "worker ended produced=%d abandoned=%d untaught=%d", last.produced, last.abandoned, last.untaught
        )

    async def _run(self, stop: Stop) -> None:
        """Run the rollouts with the heartbeat and the stop watcher beside them."""
        environment = load_environment(self.env, self.section, self.config.base_dir)
        check_abilities(self.env, self.section, environment)
        living = asyncio.create_task(self._live(environment, stop), name=self.name)
        beside = [
            asyncio.create_task(self._heartbeat.run(), name="heartbeat"),
            asyncio.create_task(self._drain_at(stop), name="stop watcher"),
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

    async def _drain_at(self, stop: Stop) -> None:
        self.start_draining(await stop.wait())

    async def _live(self, environment: Environment, stop: Stop) -> None:
        async with AsyncExitStack() as stack:
            started = await self._started(stack, environment)
            if started is None:
                return
            producer, self._rollouts = started
            self._enter(WorkerState.READY)
            watcher = asyncio.create_task(self._drain_with(producer), name="drain watcher")
            stack.callback(watcher.cancel)
            await self._roll(self._rollouts, stop)
            await self._deliver(producer, stop)

    async def _started(
        self, stack: AsyncExitStack, environment: Environment
    ) -> tuple[Producer, Rollouts] | None:
        """Wait for everything rollouts need; None if the worker drains before."""
        if self._draining.is_set():
            return None
        try:
            async with asyncio.timeout(None) as self._starting:  # `start_draining` lets it expire
                if isinstance(environment, AbstractAsyncContextManager):
                    await stack.enter_async_context(environment)
                policy = await self._policy(stack)
                producer = await self._opened(stack)
                tasks = await self._tasks(stack, producer)
                if self.config.teacher.enabled:
                    opening = TeacherClient.opened(self.config, self.layout)
                    self._teacher = await stack.enter_async_context(opening)
        except TimeoutError:
            if not self._draining.is_set():
                raise
            return None
        finally:
            self._starting = None
        self._producer = producer
        rollouts = Rollouts(
            self.name,
            self.section,
            environment,
            policy,
            producer,
            seed=self.config.run.seed,
            tasks=tasks,
            draining=self._draining,
            teacher=self._teacher,
        )
        return producer, rollouts

    async def _policy(self, stack: AsyncExitStack) -> OpenAIPolicy:
        """Open the client of the policy once an engine is registered."""
        # Another process writes the file: there is no event to wait for.
        while not self._addresses():  # noqa: ASYNC110
            await asyncio.sleep(FILE_POLL_S)
        rng = random.Random(f"{self.config.run.seed}/{self.name}/engines")
        return await stack.enter_async_context(
            OpenAIPolicy.opened(
                Engines(self._addresses, rng),
                known=lambda: self._producer.policy if self._producer else PolicyVersion(),
                patience_s=PATIENCE * self.section.rollout_timeout_s,
            )
        )

    def _addresses(self) -> list[InferenceAddress]:
        inference = self.config.inference
        if inference.kind == "external":
            return [InferenceAddress(url=inference.url, pid=0)]
        return engines_of(self.layout)

    async def _opened(self, stack: AsyncExitStack) -> Producer:
        section = self.section
        return await stack.enter_async_context(
            Producer.open(
                self.layout.root,
                env=self.env,
                producer=self.name,
                run=self.config.run.name,
                group_size=section.group_size,
                slots=section.concurrency,
                weight=section.weight,
                min_share=section.min_share,
                split=Split.TRAIN if section.split == "train" else Split.EVAL,
                ack_log=self.layout.ack_log(self.name),
                save_to=self.layout.spools / self.name,
                drain_s=0.0,  # `_deliver` has waited already
            )
        )

    async def _tasks(self, stack: AsyncExitStack, producer: Producer) -> TaskTaker | None:
        """Open the client of submitted tasks if the environment answers any."""
        if self.section.tasks == "own":
            return None
        lease_s = self.section.rollout_timeout_s + DELIVERY_S
        opening = TaskTaker.open(self.layout.root, self.name, lambda: producer.session, lease_s)
        return await stack.enter_async_context(opening)

    async def _drain_with(self, producer: Producer) -> None:
        await producer.draining.wait()
        self.start_draining("ack")

    async def _roll(self, rollouts: Rollouts, stop: Stop) -> None:
        """Run rollouts until drained, then finish running ones as time allows."""
        rolling = asyncio.create_task(rollouts.run(), name="rollouts")
        try:
            if not await _ended(rolling, self._draining):
                await _ended(rolling, stop.event, self._left_s())
        finally:
            if rollouts.in_hand:
                logger.warning("rollouts cancelled in_hand=%d", rollouts.in_hand)
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
        return max(0.0, self.config.orchestrator.drain_deadline_s - passed)

    def _enter(self, state: WorkerState) -> None:
        """Change the state and send a heartbeat at once."""
        if state is WorkerState.READY and self._draining.is_set():
            return
        self.state = state
        self._heartbeat.changed()


async def _ended(task: asyncio.Task[Any], event: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until the task ends, the event is set, or the time is over; return whether the task has ended."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    return task.done()
