"""The worker process: one environment, its rollouts, and the way out.

    STARTING   import the environment, wait for the policy and for the broker
    READY      roll out, as much as the credit allows
    DRAINING   begin nothing new, finish what is in hand, deliver it
    GONE       said goodbye; exit code 0
    FAILED     the environment cannot be made, or failed too often in a row; `PERMANENT_FAILURE`

There is one way to drain, `Worker.start_draining`, and any number of orders to: SIGUSR1, the reply to a heartbeat, the
`control` topic, an ack. Finishing and delivering get `orchestrator.drain_deadline_s`; what is then unfinished is
abandoned, and what is undelivered is saved by the producer. SIGTERM is a drain without patience: rollouts are cancelled
at once, and delivery gets a third of `orchestrator.term_grace_s`, since SIGKILL follows.
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

from rolloutmq.bus.engines import engines_of
from rolloutmq.bus.producer import Producer
from rolloutmq.bus.rundir import FILE_POLL_S, load_run
from rolloutmq.bus.taking import TaskTaker
from rolloutmq.schemas.control import WorkerBeat, WorkerState
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.schemas.errors import ConfigError, EnvironmentFailedError, SessionFencedError
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.records import InferenceAddress
from rolloutmq.services.runner import Stop, run_service
from rolloutmq.services.worker.engines import Engines
from rolloutmq.services.worker.entry import check_abilities, load_environment
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.line import Line
from rolloutmq.services.worker.openai import OpenAIPolicy
from rolloutmq.services.worker.rollouts import Rollouts, one_line
from rolloutmq.services.worker.teacher import Teacher

logger = logging.getLogger(__name__)

PATIENCE: Final = 0.9
"""Part of `rollout_timeout_s` after which a policy that stays away is given up, so that the rollout can say why."""
DELIVERY_S: Final = 60.0
"""The lease of a task lasts that long beyond `rollout_timeout_s`: its group may have to wait for room."""
LAST_FLUSH_S: Final = 1.0
"""Delivery gets that long even where finishing the rollouts took the whole deadline."""


def main(run_dir: Path, worker: str) -> int:
    """Run the worker of that name until it is told to end; returns the exit code.

    Raises:
        MissingError: The directory holds no run.
        ConfigError: The run has no environment of this worker.
    """
    life = Worker(run_dir, worker)
    # An order to drain that comes when the end is near must not kill. The handler of `run_service` is gone by then, and
    # to ignore the signal before that handler stands would lose an order that came during the imports.
    signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
    code = run_service(worker, life.run, on_drain=life.start_draining)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return PERMANENT_FAILURE if life.state is WorkerState.FAILED else code


async def work(run_dir: Path, worker: str, stop: Stop) -> None:
    """Be the worker of that name until `stop`, or until it is drained; raises what `Worker.run` does."""
    await Worker(run_dir, worker).run(stop)


class Worker:
    """One life of a worker. For one event loop; nothing here is thread-safe."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self.config, self.layout = load_run(run_dir)
        self.name = worker
        self.env = worker.rpartition("-")[0]
        if self.env not in self.config.environment:
            known = ", ".join(self.config.environment) or "none"
            raise ConfigError(f"environment.{self.env}", f"worker {worker} needs it; there is: {known}")
        self.section = self.config.environment[self.env]
        self.state = WorkerState.STARTING
        self.error = ""
        self._draining = asyncio.Event()
        self._drained_at = 0.0
        self._starting: asyncio.Timeout | None = None
        self._producer: Producer | None = None
        self._rollouts: Rollouts | None = None
        self._teacher: Teacher | None = None
        self._line = Line(self.layout, worker, self.beat, self.start_draining)

    def start_draining(self, reason: str = "SIGUSR1") -> None:
        """Begin nothing new, finish, deliver, go. In the loop; only the first call does anything."""
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
        """Describe this moment."""
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
        """Live until drained or stopped.

        Raises:
            ConfigError: The environment cannot be made; the state is FAILED.
            EnvironmentFailedError: It failed too often in a row; the state is FAILED.
        """
        try:
            await self._run(stop)
        except SessionFencedError as error:
            # Whoever has the name now speaks for it: no last beat.
            logger.warning("another process has this worker's name error=%s", error)
            return
        except (ConfigError, EnvironmentFailedError) as error:
            self.error = one_line(error)
            self.state = WorkerState.FAILED
            await self._line.last()
            raise
        self.state = WorkerState.GONE
        await self._line.last()
        last = self.beat()
        logger.info("gone produced=%d abandoned=%d untaught=%d", last.produced, last.abandoned, last.untaught)

    async def _run(self, stop: Stop) -> None:
        """Live, with the line to the broker and the ear for `stop` beside."""
        environment = load_environment(self.env, self.section, self.config.base_dir)
        check_abilities(self.env, self.section, environment)
        living = asyncio.create_task(self._live(environment, stop), name=self.name)
        beside = [
            asyncio.create_task(self._line.run(), name="line to the broker"),
            asyncio.create_task(self._drain_at(stop), name="ear for the stop"),
        ]
        try:
            # One that ends before `living` has failed, and its error is raised below.
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
            ear = asyncio.create_task(self._drain_with(producer), name="ear for the acks")
            stack.callback(ear.cancel)
            await self._roll(self._rollouts, stop)
            await self._deliver(producer, stop)

    async def _started(
        self, stack: AsyncExitStack, environment: Environment
    ) -> tuple[Producer, Rollouts] | None:
        """Wait for everything that rollouts need; None if the worker is to drain before it is there."""
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
                    opening = Teacher.opened(self.config, self.layout)
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
        """Open the client of the policy, once it has an address."""
        # The file is another process's: there is no event to wait for.
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
        """Open the way to submitted tasks, if the environment is to answer any."""
        if self.section.tasks == "own":
            return None
        lease_s = self.section.rollout_timeout_s + DELIVERY_S
        opening = TaskTaker.open(self.layout.root, self.name, lambda: producer.session, lease_s)
        return await stack.enter_async_context(opening)

    async def _drain_with(self, producer: Producer) -> None:
        await producer.draining.wait()
        self.start_draining("an ack")

    async def _roll(self, rollouts: Rollouts, stop: Stop) -> None:
        """Roll out until drained; then finish what is in hand, as far as time allows."""
        rolling = asyncio.create_task(rollouts.run(), name="rollouts")
        try:
            if not await _ended(rolling, self._draining):
                await _ended(rolling, stop.event, self._left_s())
        finally:
            if rollouts.in_hand:
                logger.warning("rollouts cut off in_hand=%d", rollouts.in_hand)
            rolling.cancel()
            await asyncio.wait({rolling})
        if not rolling.cancelled():
            rolling.result()

    async def _deliver(self, producer: Producer, stop: Stop) -> None:
        """Wait until everything is acked, as far as time allows; the producer saves the rest."""
        flushing = asyncio.create_task(producer.flush(max(self._left_s(), LAST_FLUSH_S)), name="delivery")
        try:
            if not await _ended(flushing, stop.event):
                await asyncio.wait({flushing}, timeout=self.config.orchestrator.term_grace_s / 3)
        finally:
            flushing.cancel()
            await asyncio.wait({flushing})

    def _left_s(self) -> float:
        """Return what is left of the drain's deadline, in seconds."""
        passed = asyncio.get_running_loop().time() - self._drained_at
        return max(0.0, self.config.orchestrator.drain_deadline_s - passed)

    def _enter(self, state: WorkerState) -> None:
        """Change the state, and tell at once."""
        if state is WorkerState.READY and self._draining.is_set():
            return
        self.state = state
        self._line.changed()


async def _ended(task: asyncio.Task[Any], event: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until the task has ended, the event is set, or the time is over; return whether the task has."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    return task.done()
